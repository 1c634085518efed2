"""The verb synthesize: a first trace for who has none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.cli.app import Json, Out, app, progress_bar, say, say_json, say_next


@app.command("synthesize")
def synthesize_command(
    out: Out,
    model: Annotated[str, typer.Option("--model", help="A known model, such as qwen3-30b-a3b.")] = "qwen3-30b-a3b",
    like: Annotated[Path | None, typer.Option("--like", help="A captured trace to fit; of any model.")] = None,
    reuse: Annotated[float | None, typer.Option(min=0, max=1, help="Share of experts the token before used.")] = None,
    skew: Annotated[float | None, typer.Option(min=0, help="Zipf exponent of expert popularity.")] = None,
    memory: Annotated[float | None, typer.Option(min=0, help="How much past use in a sequence draws experts.")] = None,
    popularity: Annotated[
        Path | None, typer.Option("--popularity", help="Counts of experts (.json, by import) to draw by; fits no skew.")
    ] = None,
    recall: Annotated[float | None, typer.Option(min=0, max=1, help="Of the predictor that the trace gets.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Sequences.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded after each prompt.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal traces.")] = 0,
    as_json: Json = False,
) -> None:
    """Make up a trace of a model that nobody has captured, with the locality of another trace or of published figures.

    What it answers is a first estimate and is labelled synthetic wherever it is shown; capture a trace of your own
    prompts for more.

    Example: moe-studio synthesize --model qwen3-30b-a3b --out first.parquet
    """
    from dataclasses import asdict, replace

    from trace_capture.expert_counts import ExpertCounts
    from trace_capture.known_shapes import known_shape
    from trace_capture.synthetic_fit import (
        TYPICAL_RECALL,
        SyntheticSettings,
        fit_settings,
        fitted_trace,
        hit_ratios,
        published_statistics,
        statistics_of,
    )
    from trace_capture.trace import Trace

    shape = known_shape(model)
    counts = ExpertCounts.load(popularity) if popularity else None
    if like is None and reuse is not None:
        settings = SyntheticSettings(reuse, skew or 0.0, memory or 0.0, TYPICAL_RECALL)
        source = "as given"
    elif counts is not None:
        wanted = statistics_of(Trace.load(like)) if like else published_statistics(shape.name.partition(":")[0])
        settings = SyntheticSettings(wanted.reuse_ratio, 0.0, 0.0, TYPICAL_RECALL)
        source = wanted.source
    else:
        wanted = statistics_of(Trace.load(like)) if like else published_statistics(shape.name.partition(":")[0])
        with progress_bar(not as_json) as step:
            settings = fit_settings(wanted, shape, prompt_tokens, tokens, seed=seed, progress=step("fit"))
        source = wanted.source
    given = {"reuse_ratio": reuse, "skew": skew, "memory": memory, "predictor_recall": recall}
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    if counts is not None:
        source += f"; popularity of experts by {popularity}"
    trace = fitted_trace(shape, settings, prompts, prompt_tokens, tokens, seed, counts)
    trace.save(out)
    facts: dict[str, Any] = {"path": str(out), "model": shape.name, "settings": asdict(settings), "source": source}
    facts |= {"lru_hit_ratios_at_eighth_quarter_half": hit_ratios(trace), "tokens": trace.num_tokens}
    if as_json:
        say_json(facts)
        return
    say(f"{out}: synthetic routing of {shape.name}, {trace.num_tokens} tokens; {source}")
    say(f"  reuse {settings.reuse_ratio:.2f}, skew {settings.skew:.2f}, memory {settings.memory:.2f}")
    rates = ", ".join(f"{100 * rate:.0f} %" for rate in hit_ratios(trace))
    say(f"  LRU hit rates with room for an eighth, a quarter and half of the experts: {rates}")
    say_next(f"moe-studio inspect {out} --worth --set vram_gb=12 --set host=ddr5-6000-2ch")
