"""Verbs that run a real model: run, demo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.cli.ablate_options import Ablate
from runtime.cli.app import Json, app, console, needs_live, progress_bar, quiet_threads, say, say_json, say_next
from runtime.cli.cpu_options import CpuExperts, CpuLayers, CpuThreads, with_cpu
from runtime.cli.machines import run_json, say_run
from runtime.cli.strategy_options import Warmup
from runtime.cli.traces import Draft, Estimator, Gamma, Model, NewTokens, PromptFile, Seed, Stream, Temperature, Vectors

if TYPE_CHECKING:
    from runtime.demo import DemoResult
    from simulator.policies.config import OffloadConfig, Provenance
    from simulator.routing_drift import RoutingDrift, RoutingWatch
    from trace_capture.run import Run


@app.command("run")
def run_command(
    model: Model = "demo",
    config: Annotated[Path | None, typer.Option(help="Configuration (TOML), such as tune writes.")] = None,
    budget_ratio: Annotated[float, typer.Option(help="Without --config: LRU with this share of the experts.")] = 0.5,
    cpu_layers: CpuLayers = None,
    cpu_experts: CpuExperts = None,
    cpu_threads: CpuThreads = None,
    prompts: PromptFile = None,
    text: Annotated[list[str], typer.Option("--text", "--prompt", help="A prompt; may be repeated.")] = [],  # noqa: B006
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.8,
    seed: Seed = 0,
    draft: Draft = None,
    gamma: Gamma = 8,
    ablate: Ablate = None,
    vectors: Vectors = None,
    estimator: Estimator = None,
    stream: Stream = None,
    warmup: Warmup = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the run record.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Validation record (JSON) to append what was promised and measured to.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a model with its experts offloaded: text, speed, hit rate, and predicted beside measured.

    Example: moe-studio run --model demo --config tuned.toml --text "It was a dark night"
    """
    with needs_live():
        from runtime.checkpoint import load_streamed, should_stream
        from runtime.measure import measure
        from runtime.models import Sampling, load_model, read_prompts
        from runtime.speculative import load_drafting
    from simulator.ablation import ablated, draft_left, read_ablations
    from simulator.config_file import load_config
    from simulator.policies.config import OffloadConfig

    quiet_threads()
    chosen = load_config(config) if config else OffloadConfig.for_fraction(budget_ratio)
    without = read_ablations(ablate)
    chosen, draft = ablated(with_cpu(chosen, cpu_layers, cpu_experts, cpu_threads), without), draft_left(draft, without)
    texts = read_prompts(prompts, text)
    watch = _watch_for(chosen)
    with progress_bar(not as_json) as step:
        loaded = load_streamed(model) if should_stream(model, stream) else load_model(model)
        run = measure(
            loaded,
            texts,
            chosen,
            max_new_tokens,
            sampling=Sampling(temperature, seed),
            drafting=load_drafting(draft, gamma, loaded),
            vectors_path=vectors,
            estimator_path=estimator,
            warmup_passes=warmup,
            watch=watch,
            progress=step("run"),
        )
    if out is not None:
        run.save(out, "measured")
    if record is not None:
        _append_promise(record, chosen, run)
    promised, drift = chosen.provenance, watch.drift() if watch else None
    if as_json:
        predicted = {"predicted_tpot_ms": promised.predicted_tpot_ms} if promised else {}
        seen = {"routing": drift.as_json()} if drift else {}
        say_json(run_json(run) | predicted | seen | {"texts": list(run.texts)})
        return
    for prompt, continuation in zip(texts, run.texts, strict=True):
        say(f"{prompt}{continuation}\n")
    say_run(run)
    if promised is not None:
        _say_promise(promised, run)
    if drift is not None:
        _say_drift(drift)
    if record is not None:
        say(f"{record}: appended what was promised and measured")
    say_next("moe-studio capture --predict quasi-hidden --out t.parquet, then tune, for a configuration of your own")


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option("--out", help="Folder for everything the demonstration writes.")] = Path(
        "studio-demo"
    ),
    budget_ratio: Annotated[float, typer.Option(min=0.125, max=1.0, help="Share of experts that get a slot.")] = 0.4,
    num_prompts: Annotated[
        int | None,
        typer.Option("--prompts", min=3, help="Prompts; the last third is run live (18, or 3 with --quick)."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to generate per prompt (48, or 10 with --quick).")
    ] = None,
    seed: Seed = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few prompts and tokens and a hasty calibration: rougher figures, sooner.")
    ] = False,
    as_json: Json = False,
) -> None:
    """The whole loop on a small trained model: capture, replay, tune, run, compare.

    Example: moe-studio demo --out studio-demo
    """
    with needs_live():
        from runtime.demo import DemoOptions, demo
    from dashboard.report import write_report

    quiet_threads()
    with progress_bar(not as_json) as step:
        options = DemoOptions.quick() if quick else DemoOptions()
        sizes = {"num_prompts": num_prompts, "max_new_tokens": max_new_tokens}
        chosen = {name: value for name, value in sizes.items() if value is not None}
        result = demo(out, replace(options, budget_ratio=budget_ratio, seed=seed, **chosen), step)
    write_report(out, out / "report.html")
    rows = demo_rows(result)
    if as_json:
        say_json({"folder": str(out), "strategies": rows, "engine": engine_cost(result)})
        return
    _say_demo(result, rows)


def _watch_for(config: OffloadConfig) -> RoutingWatch | None:
    """What compares routing with that of the tuning trace; None where the configuration does not know it, or where
    layers run predicted experts, so that their routers are not waited for."""
    from simulator.routing_drift import RoutingWatch

    reference = config.provenance.routing if config.provenance else None
    mode = config.prefetch.mode
    if reference is None or "commit" in ((mode,) if isinstance(mode, str) else mode):
        return None
    return RoutingWatch(reference)


def _say_drift(drift: RoutingDrift) -> None:
    mend = "; capture such prompts and tune again (moe-studio capture, then tune)" if drift.is_unlike else ""
    say(f"  {drift.text()}{mend}")


def _append_promise(path: Path, config: OffloadConfig, run: Run) -> None:
    from simulator.validation.promises import record_promise

    record_promise(path, config, run, f"moe-studio run --model {run.info.model} --config CONFIG --record {path.name}")


def _say_promise(promised: Provenance, run: Run) -> None:
    """What the configuration promised beside what was measured."""
    measured_ms = run.metrics.tpot_ms
    error = promised.predicted_tpot_ms / measured_ms - 1
    band, predicted_ms = promised.error_band, promised.predicted_tpot_ms
    promise = f"{predicted_ms:.3f} ms" if band is None else band.around_text(predicted_ms)
    say(f"  predicted {promise} on held-out tokens of the tuning trace")
    say(f"  measured  {measured_ms:.3f} ms on these prompts: prediction off by {100 * error:+.1f} %")
    rates = 100 * promised.predicted_hit_rate, 100 * run.metrics.decode_hit_rate
    say(f"  decode hit rate predicted {rates[0]:.1f} %, measured {rates[1]:.1f} %")


def demo_rows(result: DemoResult) -> list[dict[str, Any]]:
    """The last table of the demonstration, a dictionary per strategy."""
    slowest = result.comparisons[0].measured[0].metrics.tpot_ms
    return [
        {
            "strategy": comparison.measured[0].info.label,
            "predicted_tpot_ms": comparison.predicted.metrics.tpot_ms,
            "error_band": band.model_dump() if (band := comparison.predicted.info.error_band) else None,
            "error_band_ratio": band.half_width_ratio if band else None,
            "measured_tpot_ms": comparison.measured[0].metrics.tpot_ms,
            "error_ratio": comparison.run_error_ratio,
            "slowdown": float(comparison.slowdown.mean()),
            "decode_hit_rate": comparison.measured[0].metrics.decode_hit_rate,
            "predicted_decode_hit_rate": comparison.predicted.metrics.decode_hit_rate,
            "bytes_per_token": comparison.measured[0].metrics.bytes_per_token,
            "speed_up": slowest / comparison.measured[0].metrics.tpot_ms,
        }
        for comparison in result.comparisons
    ]


def engine_cost(result: DemoResult) -> dict[str, float]:
    """Bookkeeping of the engine, in microseconds."""
    measured = result.hardware.measured
    if measured is None:
        return {}
    return {
        "decide_us_per_layer": measured.decide_ns / 1e3,
        "decide_us_per_load": measured.decide_per_load_ns / 1e3,
        "predict_us_per_layer": measured.predict_ns / 1e3,
    }


def _say_demo(result: DemoResult, rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("strategy", "predicted", "measured", "error", "hits", "MB/token", "speed-up"):
        table.add_column(title, justify="left" if title == "strategy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["strategy"],
            f"{row['predicted_tpot_ms']:.2f}",
            f"{row['measured_tpot_ms']:.2f}",
            f"{100 * row['error_ratio']:+.1f} %",
            f"{100 * row['decode_hit_rate']:.1f} %",
            f"{row['bytes_per_token'] / 1e6:.3f}",
            f"{row['speed_up']:.2f}x",
        )
    band = result.hardware.error_band
    say("Milliseconds per output token in decode on held-out prompts: predicted by the simulator, measured on the")
    say(
        "live engine over an emulated link."
        + (f" Expected of predictions: {band.text()}, on other prompts." if band else "")
    )
    console().print(table)
    slowdowns = [row["slowdown"] for row in rows]
    if max(slowdowns) > 1.1 or min(slowdowns) < 0.9:
        span = f"{min(slowdowns):.2f} to {max(slowdowns):.2f} times"
        say(f"fixed work took this machine {span} as long as in calibration, which is in the errors")
    say(f"tuned is: {result.tuned.config.label}")
    cost = engine_cost(result)
    per_layer, per_load = cost["decide_us_per_layer"], cost["decide_us_per_load"]
    say(f"engine bookkeeping: {per_layer:.1f} us per MoE layer, {per_load:.1f} us per load")
    say(
        "The tiny model's experts cross an emulated link, paced so that copying takes as many times the compute as\n"
        "published for Qwen3-30B-A3B on an RTX A6000. The ratios carry over, the milliseconds do not."
    )
    folder = result.folder
    say(f"wrote {folder}: report.html (open it), timeline.perfetto.json (for ui.perfetto.dev), tuned.toml,")
    say("  trace.parquet, hardware.toml, and a *.run.json with its timeline per run")
    say_next(f"moe-studio dashboard {folder}")
