"""The verb tune: the best configuration for a trace, a machine and a budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.cli.app import Json, Out, app, fail, progress_bar, say, say_json, say_next
from runtime.cli.draft_options import DEFAULT_ACCEPTANCE, Acceptance, DraftMib, Drafts
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
    in_format,
)
from runtime.cli.machines import Profile, TracePath, run_json, with_band
from runtime.cli.strategy_options import BudgetMib, BudgetRatio, Seed

if TYPE_CHECKING:
    from simulator.tune import TuneResult
    from simulator.tune_quality import CommitCost
    from trace_capture.hardware import HardwareProfile
    from trace_capture.model_shape import ModelShape
    from trace_capture.trace import Trace

_SHOWN = 8


@app.command("tune")
def tune_command(
    trace: TracePath,
    out: Out,
    hardware: Hardware = DEFAULT_HARDWARE,
    gpu: Gpu = None,
    host: Host = None,
    link: Link = None,
    disk: Disk = None,
    numbers: Set = [],  # noqa: B006 - typer reads it once
    weights: Weights = None,
    budget_mib: BudgetMib = None,
    budget_ratio: BudgetRatio = None,
    global_pool: Annotated[bool, typer.Option(help="Also try one pool for all layers.")] = False,
    popular: Profile = None,
    objective: Annotated[
        str, typer.Option(help="tpot, ttft, throughput (prompts included), or memory: the least that is fast enough.")
    ] = "tpot",
    slowdown: Annotated[
        float, typer.Option(min=0, help="With --objective memory: slower than the best by at most this share.")
    ] = 0.1,
    quality: Annotated[
        list[Path], typer.Option(help="What evaluate wrote: layers may commit. One per prefetch source; repeatable.")
    ] = [],  # noqa: B006
    quality_budget: Annotated[
        str, typer.Option(help="Divergence that layers which commit may cost, kl=NATS per token.")
    ] = "kl=0.02",
    drafts: Drafts = None,
    acceptance: Acceptance = DEFAULT_ACCEPTANCE,
    draft_mib: DraftMib = 0.0,
    trials: Annotated[int, typer.Option(min=0, help="Proposals of the optimiser beyond the grid.")] = 40,
    seed: Seed = 0,
    from_run: Annotated[
        Path | None,
        typer.Option(help="A run (.run.json): tune with what it measured instead of the profile's figures."),
    ] = None,
    study: Annotated[Path | None, typer.Option(help="SQLite file, so that a stopped search goes on.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; -1 for one per core. The result is the same.")] = 1,
    cluster: Annotated[str | None, typer.Option(help="dask or ray, or dask:ADDRESS, instead of processes.")] = None,
    as_json: Json = False,
) -> None:
    """Find the best configuration for a trace, a machine and a budget; write it as TOML.

    Example: moe-studio tune t.parquet --hardware hardware.toml --budget-ratio 0.5 --out tuned.toml --study tune.sqlite
    """
    from simulator.config_file import save_config
    from simulator.policies.config import DeviceConfig
    from simulator.tune import TuneOptions, tune
    from simulator.tune_quality import parse_quality_budget
    from trace_capture.expert_counts import load_popularity
    from trace_capture.trace import Trace

    loaded, profile = in_format(Trace.load(trace), weights), chosen_profile(hardware, gpu, host, link, disk, numbers)
    options = TuneOptions(
        objective=objective,
        trials=trials,
        seed=seed,
        study=study,
        jobs=jobs,
        cluster=cluster,
        slowdown_ratio=slowdown,
        commit=_commit_costs(quality, loaded.shape),
        quality_nats=parse_quality_budget(quality_budget),
        drafts=drafts,
        acceptance_ratio=acceptance,
        draft_bytes=round(draft_mib * 2**20),
    )
    device = DeviceConfig.for_machine(profile)
    profile, taken = _measured_profile(profile, from_run, loaded)
    with _interruptible(study), progress_bar(not as_json) as step:
        result = tune(
            loaded,
            profile,
            budget_bytes=_budget_bytes(budget_mib, budget_ratio, loaded.shape.total_expert_bytes),
            device=device,
            scopes=("layer", "global") if global_pool else ("layer",),
            options=options,
            profile=load_popularity(popular) if popular else None,
            progress=step("tune"),
        )
    save_config(result.config, out)
    if as_json:
        say_json(tune_json(result) | {"path": str(out), "from_run": list(taken)})
        return
    _say_result(result, out)
    for note in taken:
        say(f"  {note}")
    say_next(f"moe-studio run --model MODEL --config {out} --text 'your prompt'")


@contextmanager
def _interruptible(study: Path | None) -> Iterator[None]:
    """Say after Ctrl-C what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"the same command goes on from {study}" if study else "with --study FILE the next one could go on"
        fail(f"tuning was interrupted; {kept}")
        raise typer.Exit(130) from None


def _measured_profile(
    profile: HardwareProfile, path: Path | None, trace: Trace
) -> tuple[HardwareProfile, tuple[str, ...]]:
    """The profile rescaled by a run where one is given, and what was taken over. An emulated link is still paced to
    the rate it had."""
    if path is None:
        return profile, ()
    from simulator.tune_feedback import profile_from_run
    from trace_capture.run import Run

    rescaled = profile_from_run(profile, Run.load(path), trace)
    return rescaled.hardware, rescaled.notes


def _commit_costs(paths: list[Path], shape: ModelShape) -> tuple[CommitCost, ...]:
    from simulator.tune_quality import read_commit_cost
    from trace_capture.errors import ConfigError

    costs = [read_commit_cost(path, shape) for path in paths]
    sources = [cost.source for cost in costs]
    if len(set(sources)) < len(sources):
        raise ConfigError(f"two --quality records are about one source ({', '.join(sources)}); give one for each")
    return tuple(costs)


def _budget_bytes(mib: float | None, ratio: float | None, total: int) -> int:
    from trace_capture.errors import ConfigError

    if mib is not None and ratio is not None:
        raise ConfigError("give one of --budget-mib and --budget-ratio, not both")
    return int(mib * (1 << 20)) if mib is not None else int((0.5 if ratio is None else ratio) * total)


def _say_result(result: TuneResult, out: Path) -> None:
    for place, candidate in enumerate(result.candidates[:_SHOWN], start=1):
        first = f", first token {candidate.figures.ttft_ms:.3f} ms" if result.objective == "ttft" else ""
        speed = f"{candidate.train_tpot_ms:9.3f} ms/token{first}, hit rate {candidate.train_hit_rate:.3f}"
        say(f"  {place}. {speed}: {candidate.config.title}")
    _say_front(result)
    chosen, plain = result.chosen.metrics, result.baseline.metrics
    tried = f"{len(result.candidates)} configurations, of which the optimiser proposed up to {result.trials}"
    say(f"{out}: {result.config.title}; the best for {result.objective} of {tried}")
    gain = plain.tpot_ms / chosen.tpot_ms
    say(f"  held-out: {with_band(result.chosen)} against {plain.tpot_ms:.3f} ms of plain LRU ({gain:.2f}x)")
    if result.objective in ("ttft", "throughput"):
        say(f"  held-out, time to first token: {chosen.ttft_ms:.3f} ms against {plain.ttft_ms:.3f} ms")
    say(f"  regret: {result.regret_ms:.3f} ms above the bound")
    for note in result.notes:
        say(f"  {note}")


def _say_front(result: TuneResult) -> None:
    """The Pareto front, shortly."""
    if len(result.front) < 2:
        return
    say("no other configuration is better in one of speed, device memory and quality and as good in the others:")
    for point in result.front[:_SHOWN]:
        quality = f", KL {point.kl_nats:.4f}" if point.kl_nats else ""
        mark = "*" if point.is_chosen else " "
        say(f"  {mark} {point.speed_ms:9.3f} ms, {point.device_bytes / 2**20:,.1f} MiB{quality}: {point.label}")
    if len(result.front) > _SHOWN:
        say(f"    and {len(result.front) - _SHOWN} more; --json has all of them")


def tune_json(result: TuneResult) -> dict[str, Any]:
    """A result as one JSON object; `front` is what `dashboard.tune_figures.front_figure` draws."""
    from dataclasses import asdict

    return {
        "config": result.config.model_dump(mode="json", exclude_none=True),
        "objective": result.objective,
        "trials": result.trials,
        "candidates": [
            {"label": c.config.title, "tpot_ms": c.train_tpot_ms, "hit_rate": c.train_hit_rate}
            | {"ttft_ms": c.figures.ttft_ms, "device_bytes": c.figures.device_bytes, "kl_nats": c.kl_nats}
            | {"gamma": c.gamma}
            for c in result.candidates
        ],
        "front": [asdict(point) for point in result.front],
        "held_out": run_json(result.chosen),
        "baseline": run_json(result.baseline),
        "regret_ms": result.regret_ms,
        "notes": list(result.notes),
    }
