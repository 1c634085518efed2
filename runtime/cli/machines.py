"""Verbs about time on a machine: calibrate, simulate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.cli.ablate_options import Ablate
from runtime.cli.app import Json, Out, app, needs_live, progress_bar, quiet_threads, say, say_json, say_next
from runtime.cli.cpu_options import CpuExperts, CpuLayers, CpuThreads, read_threads, with_cpu
from runtime.cli.draft_options import DEFAULT_ACCEPTANCE, Acceptance, DraftMib, Drafts, with_drafts
from runtime.cli.hardware_options import (
    DEFAULT_HARDWARE,
    Disk,
    Gpu,
    Hardware,
    Host,
    Link,
    Set,
    Weights,
    chosen_profile,
    hardware_flags,
    in_format,
)
from runtime.cli.strategy_options import (
    BudgetMib,
    BudgetRatio,
    MicroBatch,
    Mode,
    Prefetch,
    Prefill,
    Preload,
    Recall,
    Scope,
    Seed,
    Strategy,
    Warmup,
    strategy_table,
)
from runtime.cli.traces import Draft, Estimator, Gamma, Model, PromptFile, Texts, Vectors

if TYPE_CHECKING:
    from trace_capture.hardware import HardwareProfile
    from trace_capture.run import Run

Profile = Annotated[
    Path | None,
    typer.Option("--profile", help="Another trace, or counts (.json), that tell which experts are popular."),
]
TracePath = Annotated[Path, typer.Argument(help="A trace made by capture or import.")]


@app.command("calibrate")
def calibrate_command(
    out: Out,
    model: Model = "demo",
    prompts: PromptFile = None,
    text: Texts = [],  # noqa: B006 - typer reads it once
    h2d_bytes_per_s: Annotated[float | None, typer.Option(help="Rate of the emulated link.")] = None,
    copy_to_compute: Annotated[
        float | None, typer.Option(help="Instead: copy time over compute time per token (default 11).")
    ] = None,
    latency_ns: Annotated[int, typer.Option(min=0, help="Time per copy on the emulated link.")] = 20_000,
    vectors: Vectors = None,
    estimator: Estimator = None,
    draft: Draft = None,
    gamma: Gamma = 8,
    copy_to_cpu: Annotated[
        float | None,
        typer.Option(help="Pace the emulated CPU side: an expert's copy over its CPU time, about 2 on real machines."),
    ] = None,
    cpu_threads: Annotated[
        str | None,
        typer.Option(
            help="Numbers of threads to measure experts on the CPU with, such as 1,2,4 (default: powers of two up to "
            "all cores; beside an emulated device, which takes cores itself, 1)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine with one model into a hardware profile.

    Example: moe-studio calibrate --model demo --out hardware.toml
    """
    with needs_live():
        from runtime.calibrate import calibrate
        from runtime.models import load_model, read_prompts
        from runtime.self_check import with_error_band
        from runtime.speculative import load_drafting
    from trace_capture.samples import sample_folder

    quiet_threads()
    given = prompts is not None or text
    texts = read_prompts(prompts, text) if given else read_prompts(sample_folder() / "demo_prompts.txt", ())
    with progress_bar(not as_json) as step:
        loaded = load_model(model)
        profile = calibrate(
            loaded,
            " ".join(texts),
            h2d_bytes_per_s=h2d_bytes_per_s,
            copy_to_compute_ratio=copy_to_compute,
            latency_ns=latency_ns,
            vectors_path=vectors,
            estimator_path=estimator,
            drafting=load_drafting(draft, gamma, loaded),
            copy_to_cpu_ratio=copy_to_cpu,
            cpu_threads=read_threads(cpu_threads, has_cores=loaded.on_cuda),
            progress=step("calibrate"),
        )
        profile = with_error_band(loaded, profile, texts[:3], progress=step("check predictions"))
    profile.save(out)
    if as_json:
        say_json(profile.model_dump(mode="json"))
        return
    _say_profile(profile, out)
    say_next(f"moe-studio simulate TRACE --hardware {out}")


def _say_profile(profile: HardwareProfile, out: Path) -> None:
    """What calibration measured."""
    say(f"{out}: {profile.description}")
    if profile.error_band is not None:
        say(f"  measured TPOT is expected at {profile.error_band.text()} of predictions; {profile.error_band.source}")
    say(f"  link {profile.link.h2d_bytes_per_s.value / 1e6:,.2f} MB/s{' (emulated)' if profile.emulated else ''}")
    measured = profile.measured
    if measured is not None:
        dense_us, experts_us = measured.dense_ns[0] / 1e3, measured.experts_ns[0] / 1e3
        say(f"  one layer of decode: dense {dense_us:.0f} us, experts {experts_us:.0f} us")
        decide_us, load_us = measured.decide_ns / 1e3, measured.decide_per_load_ns / 1e3
        say(f"  engine bookkeeping: {decide_us:.1f} us per MoE layer, {load_us:.1f} us per load")
        by_source = {"router": measured.predict_ns} | measured.predict_by_source_ns
        costs = ", ".join(f"{name} {cost / 1e3:.1f}" for name, cost in by_source.items())
        say(f"  one prediction of the next layer, us: {costs}")
        on_cpu = [measured.with_cpu_threads(count).cpu_experts_ns[0] / 1e3 for count in measured.cpu_threads]
        counts = ", ".join(f"{each:.0f} with {n}" for n, each in zip(measured.cpu_threads, on_cpu, strict=True))
        say(f"  a layer's experts on the CPU, us by threads: {counts}")
        if measured.draft is not None:
            drafts, draft_ms = measured.draft.drafts[-1], measured.draft.drafting_ns[-1] / 1e6
            say(
                f"  making {drafts} drafts: {draft_ms:.1f} ms; planning loads meanwhile {measured.plan_ns / 1e3:.0f} us"
            )


@app.command("simulate")
def simulate_command(
    trace: TracePath,
    strategy: Strategy = "lru",
    scope: Scope = "layer",
    prefetch: Prefetch = "none",
    mode: Mode = "hint",
    recall: Recall = 1.0,
    seed: Seed = 0,
    budget_mib: BudgetMib = None,
    budget_ratio: BudgetRatio = None,
    preload: Preload = None,
    prefill: Prefill = "on-demand",
    micro_batch: MicroBatch = None,
    config: Annotated[Path | None, typer.Option(help="A configuration (TOML) instead of the flags above.")] = None,
    cpu_layers: CpuLayers = None,
    cpu_experts: CpuExperts = None,
    cpu_threads: CpuThreads = None,
    profile: Profile = None,
    warmup: Warmup = 0,
    hardware: Hardware = DEFAULT_HARDWARE,
    gpu: Gpu = None,
    host: Host = None,
    link: Link = None,
    disk: Disk = None,
    numbers: Set = [],  # noqa: B006 - typer reads it once
    weights: Weights = None,
    drafts: Drafts = None,
    acceptance: Acceptance = DEFAULT_ACCEPTANCE,
    draft_mib: DraftMib = 0.0,
    ablate: Ablate = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the run record and timeline.")] = None,
    keep: Annotated[Path | None, typer.Option("--save-config", help="File for the configuration (TOML).")] = None,
    as_json: Json = False,
) -> None:
    """Replay a trace on a machine: hit rate, bytes, and time per output token by its parts.

    Example: moe-studio simulate t.parquet --budget-mib 4000 --gpu rtx3060 --host ddr4-3600-2ch --link pcie3x16
    """
    from simulator.ablation import ablated, ablated_trace, read_ablations
    from simulator.config_file import load_config, save_config
    from simulator.policies.config import OffloadConfig, parse_config
    from simulator.replay import simulate
    from trace_capture.expert_counts import load_popularity
    from trace_capture.trace import Trace

    budget = budget_mib, budget_ratio
    table = strategy_table(strategy, scope, prefetch, mode, recall, seed, *budget, preload, prefill, micro_batch)
    machine, without = (hardware, gpu, host, link, disk, numbers), read_ablations(ablate)
    whole = with_cpu(load_config(config) if config else parse_config(table), cpu_layers, cpu_experts, cpu_threads)
    run = simulate(
        ablated_trace(with_drafts(in_format(Trace.load(trace), weights), drafts, acceptance, draft_mib), without),
        chosen_profile(*machine),
        ablated(whole, without),
        record_spans=out is not None,
        profile=load_popularity(profile) if profile else None,
        warmup_passes=warmup,
    )
    if out is not None:
        _save(run, out)
    if keep is not None:
        save_config(OffloadConfig.model_validate(run.info.config), keep)
    if as_json:
        say_json(run_json(run))
        return
    say_run(run)
    say_next(f"moe-studio tune {trace} {hardware_flags(*machine)} --budget-ratio 0.5 --out tuned.toml")


def run_json(run: Run) -> dict[str, Any]:
    """A run as one flat JSON object."""
    from simulator.critical_path import critical_path, what_limits

    info = run.info.model_dump(mode="json")
    metrics: dict[str, Any] = info.pop("metrics")
    path = [share._asdict() for share in critical_path(run.metrics)]
    band = run.info.error_band
    regret = {"regret_ratio": run.regret_ratio, "critical_path": path, "what_limits": what_limits(run)}
    return (
        metrics
        | regret
        | {
            key: info[key]
            for key in (
                "kind",
                "label",
                "emulated",
                "model",
                "hardware",
                "bounds",
                "notes",
                "trace_digest",
                "error_band",
                "warmup_passes",
                "preloaded_experts",
            )
        }
        | {"error_band_ratio": band.half_width_ratio if band else None}
    )


def say_run(run: Run) -> None:
    """A run for a person."""
    from simulator.critical_path import critical_path, what_limits

    metrics = run.metrics
    say(f"{run.info.label} on {run.info.hardware} ({run.info.kind}), {run.info.model}")
    say(f"  TPOT {with_band(run)}, {metrics.tokens_per_s:.2f} tokens/s, TTFT {metrics.ttft_ms:.2f} ms")
    for share in critical_path(metrics):
        say(f"    {share.ms:10.3f} ms {100 * share.ratio:5.1f} %  {share.text}")
    say(f"  {what_limits(run)}")
    on_cpu = f", {100 * metrics.cpu_runs / metrics.lookups:.1f} % ran on the CPU" if metrics.cpu_runs else ""
    say(f"  hit rate {100 * metrics.hit_rate:.1f} % (decode {100 * metrics.decode_hit_rate:.1f} %){on_cpu}")
    total, each = metrics.bytes_loaded / 1e6, metrics.bytes_per_token / 1e6
    say(f"  {metrics.loads} loads, {total:,.1f} MB over the link, {each:,.3f} MB per token")
    _say_bounds(run)
    for note in run.info.notes:
        say(f"  note: {note}")


def _say_bounds(run: Run) -> None:
    """What perfection could reach, and how far the run is from it."""
    if run.info.warmup_passes:
        say(f"  without the first {run.info.warmup_passes} decode passes, the warm-up")
    if run.info.preloaded_experts:
        say(f"  started with {run.info.preloaded_experts} experts on the device")
    bounds = run.info.bounds
    if "belady_hit_rate" in bounds:
        say(f"  best hit rate any eviction could reach on demand: {100 * bounds['belady_hit_rate']:.1f} % (Belady)")
    if "max_ms" not in bounds:
        return
    say(f"  bound: {bounds['max_ms']:.3f} ms, the larger of compute and of the copies that perfect eviction needs")
    perfect = {
        "on demand": "on_demand_ms",
        "a perfect prefetch one layer ahead": "look_ahead_ms",
        "without limit": "prefetch_ms",
    }
    texts = [f"{name} {bounds[key]:.3f} ms" for name, key in perfect.items() if key in bounds]
    say(f"  with perfect eviction: {', '.join(texts)}")
    above_ms = run.metrics.tpot_ms - bounds["max_ms"]
    say(f"  regret: {run.regret_ratio:.3f} times the bound, {above_ms:.3f} ms above it")


def with_band(run: Run) -> str:
    """The time per token of a run, with its band where it has one."""
    band = run.info.error_band
    tpot = run.metrics.tpot_ms
    return f"{tpot:.3f} ms" if band is None else band.around_text(tpot)


def _save(run: Run, folder: Path) -> None:
    from simulator.timeline import write_perfetto
    from trace_capture.files import make_folder

    make_folder(folder)
    run.save(folder, "simulated")
    write_perfetto([run], folder / "timeline.perfetto.json")
