"""The verb about machines one does not own: hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.cli.app import Json, app, console, say, say_json, say_next
from runtime.cli.hardware_options import DEFAULT_HARDWARE, Disk, Gpu, Host, Link, Set, chosen_profile, hardware_flags

if TYPE_CHECKING:
    from simulator.costs.listing import TermCost
    from trace_capture.hardware import HardwareProfile
    from trace_capture.model_shape import ModelShape


@app.command("hardware")
def hardware_command(
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="A profile: TOML file, a shipped machine, or parts joined by '+'.")
    ] = None,
    gpu: Gpu = None,
    host: Host = None,
    link: Link = None,
    disk: Disk = None,
    numbers: Set = [],  # noqa: B006 - typer reads it once
    model: Annotated[
        str | None, typer.Option("--model", help="A built-in shape (qwen3-30b-a3b:q4_k_m), a config.json or a trace.")
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="Tokens in the cache.")] = 0,
    draft_mib: Annotated[float, typer.Option(min=0, help="Weights of a draft model, for what a draft costs.")] = 0,
    as_json: Json = False,
) -> None:
    """List the parts that machines are made of, or show what a model's token costs on one, term by term.

    Example: moe-studio hardware
    Example: moe-studio hardware --gpu rtx4090 --host ddr5-6000-2ch --link pcie4x16 --model qwen3-30b-a3b:q4_k_m
    """
    machine = hardware or DEFAULT_HARDWARE, gpu, host, link, disk, numbers
    if not (hardware or gpu or host or link or disk or numbers or model):
        _list_parts(as_json)
        return
    profile = chosen_profile(*machine)
    if model is None:
        _show_profile(profile, as_json)
        if not as_json:
            say_next(f"moe-studio hardware {hardware_flags(*machine)} --model qwen3-30b-a3b:q4_k_m")
        return
    from trace_capture.known_shapes import find_shape
    from trace_capture.trace import DraftSettings

    draft = DraftSettings(kind="model", gamma=1, weight_bytes=int(draft_mib * (1 << 20))) if draft_mib else None
    report = _report(profile, find_shape(model), context, draft)
    if as_json:
        say_json(report)
        return
    _say_report(report)
    say_next(f"moe-studio simulate TRACE {hardware_flags(*machine)}")


def _report(profile: HardwareProfile, shape: ModelShape, context: int, draft: Any) -> dict[str, Any]:
    from simulator.costs.listing import headlines, memory_need, term_costs

    terms = term_costs(profile, shape, context, draft)
    return {
        "hardware": profile.name,
        "emulated": profile.emulated,
        "model": shape.name,
        "weights": shape.weight_dtype,
        "context": context,
        "kv_counts": shape.kv_counts,
        "terms": [_term_json(term) for term in terms],
        "headlines": headlines(terms),
        "memory": memory_need(profile, shape, context),
    }


def _term_json(term: TermCost) -> dict[str, Any]:
    return {
        "term": term.name,
        "per": term.per,
        "each_ns": term.each_ns,
        "times_per_token": term.times,
        "token_ms": term.token_ns / 1e6,
        "kinds": term.kinds,
        "from": [{"number": name} | number.model_dump() for name, number in term.numbers.items()],
    }


def _say_report(report: dict[str, Any]) -> None:
    from rich.table import Table

    say(f"{report['model']} ({report['weights']}) on {report['hardware']}, {report['context']:,} tokens of context")
    table = Table("term", "us", "per", "times", "ms/token", "from numbers that are", box=None, pad_edge=False)
    for term in report["terms"]:
        each, times, total = term["each_ns"] / 1e3, term["times_per_token"], term["token_ms"]
        kinds = ", ".join(term["kinds"])
        table.add_row(term["term"], f"{each:,.1f}", term["per"], f"{times:,.4g}", f"{total:.3f}", kinds)
    console().print(table)
    memory, names = report["memory"], {"all_resident_ms": "all experts resident", "all_on_cpu_ms": "all on the CPU"}
    names["all_loaded_ms"] = "all loaded on demand"
    corners = ", ".join(f"{names[key]} {value:.2f} ms" for key, value in report["headlines"].items())
    say(f"a token without overlap: {corners}")
    held = f"experts {memory['experts_bytes'] / 1e9:.1f} GB, other weights {memory['other_weights_bytes'] / 1e9:.1f} GB"
    room = f"device {memory['device_bytes'] / 1e9:.1f} GB"
    if memory["host_bytes_for_experts"] is not None:
        room += f", host {memory['host_bytes_for_experts'] / 1e9:.1f} GB for experts"
    say(f"memory: {held}, cache {memory['cache_bytes'] / 1e9:.2f} GB; {room}")
    say("every number with its source: --json, or the same command without --model")


def _list_parts(as_json: bool) -> None:
    from trace_capture.known_shapes import known_shape_names
    from trace_capture.machine_parts import PART_KINDS, part_names, profile_names
    from trace_capture.weight_formats import WEIGHT_BITS

    parts = {kind: part_names(kind) for kind in PART_KINDS}
    if as_json:
        listing = {"machines": profile_names(), "models": known_shape_names(), "weights": WEIGHT_BITS}
        say_json(parts | listing)
        return
    for kind, names in parts.items():
        say(f"--{kind}: {', '.join(names)}")
    say(f"--hardware: {', '.join(profile_names())}")
    say(f"--model: {', '.join(known_shape_names())}")
    say(f"weights, behind the model and a colon: {', '.join(WEIGHT_BITS)}")
    say_next("moe-studio hardware --gpu rtx4090 --host ddr5-6000-2ch --link pcie4x16 --model qwen3-30b-a3b:q4_k_m")


def _show_profile(profile: HardwareProfile, as_json: bool) -> None:
    from trace_capture.hardware import Quantity

    if as_json:
        say_json(profile.model_dump(mode="json", exclude_none=True))
        return
    say(profile.name + (f": {profile.description}" if profile.description else ""))
    for name in ("device", "host", "link", "disk"):
        part = getattr(profile, name)
        if part is None:
            continue
        say(f"{name}: {part.name}")
        for key, number in part:
            if isinstance(number, Quantity):
                say(f"  {key} = {number.value:,.6g} ({number.kind}: {number.source})")
