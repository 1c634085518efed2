"""Verbs that read what other programs recorded: import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.cli.app import Json, app, say, say_json, say_next
from runtime.cli.traces import report_trace

if TYPE_CHECKING:
    from trace_capture.expert_counts import ExpertCounts


@app.command("import")
def import_command(
    source: Annotated[Path | None, typer.Argument(help="The file to read.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write: .parquet for a trace, .json for counts of experts.")
    ] = None,
    trace_format: Annotated[str | None, typer.Option("--format", help="Format; recognised when left out.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="For files that do not say: qwen3-30b-a3b:q4_k_m, a config.json or a trace."),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=0, help="Length of the prompt, for files that do not say.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show the formats.")] = False,
    as_json: Json = False,
) -> None:
    """Turn routing that another program recorded into the project's own format.

    Example: moe-studio import qwen.route.csv --out qwen.parquet
    Example: moe-studio import answers.jsonl --model qwen3-30b-a3b --out t.parquet
    """
    from runtime.importing import ALL_IMPORTERS
    from trace_capture.errors import TraceError
    from trace_capture.importers import ImportOptions, import_file
    from trace_capture.known_shapes import find_shape
    from trace_capture.trace import Trace

    if listing:
        _list_formats(as_json)
        return
    if source is None or out is None:
        raise TraceError("name a file and --out: moe-studio import FILE --out t.parquet ('--list' shows the formats)")
    options = ImportOptions(find_shape(model) if model else None, prompt_tokens)
    routing = import_file(source, trace_format, options, ALL_IMPORTERS)
    routing.save(out)
    if isinstance(routing, Trace):
        report_trace(routing, out, as_json)
    else:
        _report_counts(routing, out, as_json)


def _list_formats(as_json: bool) -> None:
    from runtime.importing import ALL_IMPORTERS

    if as_json:
        say_json({name: {"description": one.description, "gives": one.gives} for name, one in ALL_IMPORTERS.items()})
        return
    for name, one in ALL_IMPORTERS.items():
        say(f"{name:16} {one.gives:7} {one.description}")
    say_next("moe-studio import FILE --out t.parquet")


def _report_counts(counts: ExpertCounts, path: Path, as_json: bool) -> None:
    facts = _counts_facts(counts) | {"path": str(path)}
    if as_json:
        say_json(facts)
        return
    say(f"{path}: counts of experts of {facts['model']}, {facts['source']}")
    say(f"  {facts['moe_layers']} MoE layers x {facts['experts']} experts, {facts['activations']:,} activations")
    say(f"  the hottest quarter of each layer's experts takes {100 * facts['hottest_quarter_ratio']:.1f} %")
    say(f"  load entropy: {100 * facts['load_entropy_ratio']:.1f} % of even; {facts['unused']} experts never used")
    for note in facts["notes"]:
        say(f"  note: {note}")
    say_next(f"moe-studio simulate TRACE --strategy static --profile {path}")


def _counts_facts(counts: ExpertCounts) -> dict[str, Any]:
    import numpy as np

    from trace_capture.statistics import load_entropy_ratio

    table = counts.counts
    quarter = max(1, table.shape[1] // 4)
    hottest = -np.sort(-table, axis=1)[:, :quarter]
    return {
        "model": counts.shape.name,
        "source": counts.source,
        "moe_layers": counts.shape.num_moe_layers,
        "experts": counts.shape.num_experts,
        "activations": int(table.sum()),
        "hottest_quarter_ratio": round(float(hottest.sum() / table.sum()), 4),
        "load_entropy_ratio": round(float(np.nanmean(load_entropy_ratio(table))), 4),
        "unused": int((table == 0).sum()),
        "notes": list(counts.options.get("notes", [])),
        "digest": counts.digest,
    }
