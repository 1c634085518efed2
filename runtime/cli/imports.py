"""Verbs that read what other programs recorded or measured: import, import-hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.cli.app import Json, Out, app, say, say_json, say_next
from runtime.cli.hardware_options import Gpu, Host, Link
from runtime.cli.traces import report_trace

if TYPE_CHECKING:
    from trace_capture.expert_counts import ExpertCounts
    from trace_capture.importers.calibration import Calibrated, Calibration


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


@app.command("import-hardware")
def import_hardware_command(
    source: Annotated[Path, typer.Argument(help="FreeToken's bandwidth JSON, or llama-bench results in any form.")],
    out: Out,
    gpu: Gpu = None,
    host: Host = None,
    link: Link = None,
    model: Annotated[
        str | None, typer.Option("--model", help="What llama-bench ran: qwen3-30b-a3b:q4_k_m or a config.json.")
    ] = None,
    layer_kind: Annotated[
        str | None, typer.Option(help="Which of FreeToken's layer kinds, where it has several.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn rates that another program measured on a machine into a hardware profile.

    Example: moe-studio import-hardware ~/.cache/freetoken/benchbw/GPU-1.json --out hw.toml --gpu rtx4090

    Example: moe-studio import-hardware bench.json --model qwen3-30b-a3b:q4_k_m --gpu rtx4090 --host ddr5-6000-2ch
    --link pcie4x16 --out hw.toml
    """
    from trace_capture.errors import ProfileError
    from trace_capture.importers.calibration import calibrated
    from trace_capture.importers.formats import read_text
    from trace_capture.importers.freetoken_bandwidth import is_freetoken_bandwidth, read_freetoken_bandwidth
    from trace_capture.importers.llama_bench import is_llama_bench

    text = read_text(source)
    if is_freetoken_bandwidth(text):
        found = read_freetoken_bandwidth(text, source, layer_kind)
    elif is_llama_bench(text):
        found = _llama_bench(text, source, model, gpu, host, link)
    else:
        raise ProfileError(f"{source} is neither FreeToken's bandwidth JSON (version 6) nor llama-bench results")
    result = calibrated(found, gpu, host, link)
    result.profile.save(out)
    _report_hardware(result, out, as_json)


def _llama_bench(
    text: str, path: Path, model: str | None, gpu: str | None, host: str | None, link: str | None
) -> Calibration:
    from trace_capture.errors import ProfileError
    from trace_capture.importers.llama_bench import read_llama_bench
    from trace_capture.known_shapes import find_shape
    from trace_capture.machine_parts import compose_profile

    if model is None or gpu is None or host is None or link is None:
        raise ProfileError(
            f"{path} holds speeds of a model and no rates of parts: give --model, --gpu, --host and --link"
        )
    base = compose_profile(gpu, host, link)
    ratio = base.device.read_ratio.value if base.device.read_ratio else 1.0
    layer_ns = base.host.layer_dispatch_ns.value if base.host else 0.0
    return read_llama_bench(text, path, find_shape(model), base.device.memory_bytes_per_s.value * ratio, layer_ns)


def _report_hardware(result: Calibrated, path: Path, as_json: bool) -> None:
    profile = result.profile
    numbers = {
        name: getattr(getattr(profile, name.partition(".")[0]), name.partition(".")[2]) for name in result.measured
    }
    if as_json:
        measured = {name: number.model_dump() for name, number in numbers.items()}
        say_json({"path": str(path), "name": profile.name, "measured": measured, "notes": list(result.notes)})
        return
    say(f"{path}: {profile.name}, {profile.description}")
    for name, number in numbers.items():
        say(f"  {name} = {number.value:,.6g}")
    for note in result.notes:
        say(f"  note: {note}")
    say_next(f"moe-studio simulate TRACE --hardware {path}")


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
