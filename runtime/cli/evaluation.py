"""The verb that says what a mode of prefetching costs in quality: evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.app import Json, app, console, needs_live, progress_bar, quiet_threads, say, say_json, say_next
from runtime.cli.strategy_options import Prefetch
from runtime.cli.traces import Estimator, Model, Seed, Stream, Vectors

if TYPE_CHECKING:
    from runtime.evaluate import Evaluation, ModeScores
    from runtime.intervals import Estimate
    from simulator.policies.config import OffloadConfig

ANY_SPEED = 1e12
"""Bytes per second of the emulated link without --config: quality does not depend on it."""


@app.command("evaluate")
def evaluate_command(
    texts: Annotated[list[Path], typer.Option("--texts", help="Text file; a form feed separates texts. Repeatable.")],
    model: Model = "demo",
    config: Annotated[Path | None, typer.Option(help="Configuration (TOML), such as tune writes.")] = None,
    budget_ratio: Annotated[float, typer.Option(help="Without --config: LRU with this share of the experts.")] = 0.5,
    prefetch: Prefetch = "quasi-hidden",
    modes: Annotated[
        str, typer.Option(help="Comma-separated: hint, verify, commit, or config for what --config says.")
    ] = "hint,verify,commit",
    window_tokens: Annotated[int, typer.Option(min=2, help="Length of the windows that texts are cut into.")] = 256,
    max_windows: Annotated[int, typer.Option(min=1, help="Windows to score at most, evenly spread.")] = 64,
    vectors: Vectors = None,
    estimator: Estimator = None,
    stream: Stream = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file for the result.")] = None,
    as_json: Json = False,
) -> None:
    """What a mode of prefetching costs: perplexity, KL, agreement and recall beside the exact model.

    Example: moe-studio evaluate --model demo --texts notes.txt --modes hint,commit
    """
    with needs_live():
        from runtime.checkpoint import load_streamed, should_stream
        from runtime.evaluate import evaluate
        from runtime.models import load_model, read_texts
    from trace_capture.files import make_folder

    quiet_threads()
    pieces, chosen = read_texts(texts), _config(config, budget_ratio, prefetch)
    if out is not None:
        make_folder(out.parent)
    with progress_bar(not as_json) as step:
        result = evaluate(
            load_streamed(model) if should_stream(model, stream) else load_model(model),
            pieces,
            chosen,
            modes=[mode.strip() for mode in modes.split(",") if mode.strip()],
            window_tokens=window_tokens,
            max_windows=max_windows,
            vectors_path=vectors,
            estimator_path=estimator,
            progress=step("evaluate"),
            seed=seed,
        )
    if out is not None:
        out.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if as_json:
        say_json(result.model_dump(mode="json"))
        return
    _say_evaluation(result)
    if out is not None:
        say(f"wrote {out}: everything above, and recall per layer of every mode with its intervals")
    say_next(f"moe-studio capture --model {model} --predict {prefetch} --text 'your prompt' --out t.parquet, then tune")


def _config(path: Path | None, budget_ratio: float, prefetch: str) -> OffloadConfig:
    from simulator.config_file import load_config
    from simulator.policies.config import parse_config

    if path is not None:
        return load_config(path)
    device = {"h2d_bytes_per_s": ANY_SPEED, "latency_ns": 0}
    return parse_config({"cache": {"budget_ratio": budget_ratio}, "prefetch": {"source": prefetch}, "device": device})


def _say_evaluation(result: Evaluation) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    say(f"{result.model}, {result.config.title}: {result.num_tokens:,} tokens in {result.num_windows} windows")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("mode", "perplexity", "over exact", "KL, nats", "agreement, %"):
        table.add_column(title, justify="left" if title == "mode" else "right", no_wrap=True)
    table.add_row("exact", _with_interval(result.exact_perplexity, 2, below=True), "", "", "")
    for mode in result.modes:
        table.add_row(
            mode.mode,
            _with_interval(mode.perplexity, 2, below=True),
            _with_interval(mode.perplexity_ratio, 3, below=True),
            _with_interval(mode.kl_nats, 4, below=True),
            _with_interval(mode.agreement, 1, 100, below=True),
        )
    console().print(table)
    for mode in result.modes:
        lossless = "" if mode.max_logit_difference else ": lossless"
        say(f"{mode.mode}: largest difference of a logit {mode.max_logit_difference:.3g}{lossless}")
    predicting = [mode for mode in result.modes if mode.mean_recall is not None]
    if predicting:
        _say_recall(predicting[-1])
    if result.drift:
        _say_drift(result)
    say(f"intervals: {result.intervals}")


def _say_drift(result: Evaluation) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    say("\nnative routing: cosine with what the layer's router really reads, and its recall when it reads instead")
    say("the quasi-hidden state q, or (baseline) s, the input of the router one layer before")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("layer", "cosine q", "cosine s", "recall q, %", "recall s, %"):
        table.add_column(title, justify="right", no_wrap=True)
    for layer in result.drift:
        cosines = [f"{figure.value:.3f}" for figure in (layer.quasi_cosine, layer.input_cosine)]
        recalls = [_with_interval(figure, 1, 100) for figure in (layer.quasi_recall, layer.input_recall)]
        table.add_row(str(layer.layer), *cosines, *recalls)
    console().print(table)


def _say_recall(mode: ModeScores) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    say(f"\nrecall of predictions in mode {mode.mode}, %: of all routed experts, of whole sets, of the first-ranked")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("layer", "recall@k", "whole set", "rank 1"):
        table.add_column(title, justify="right", no_wrap=True)
    for layer in (*mode.recall, mode.mean_recall):
        if layer is not None:
            figures = (layer.slot, layer.whole, layer.first)
            name = "all" if layer.layer is None else str(layer.layer)
            table.add_row(name, *[_with_interval(figure, 1, 100) for figure in figures])
    console().print(table)


def _with_interval(estimate: Estimate, digits: int, scale: float = 1.0, *, below: bool = False) -> str:
    """A value with its interval behind or below it, such as `88.1 (87.0-89.2)`."""
    text = f"{scale * estimate.value:.{digits}f}"
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return text
    return f"{text}{chr(10) if below else ' '}({scale * estimate.low:.{digits}f}-{scale * estimate.high:.{digits}f})"
