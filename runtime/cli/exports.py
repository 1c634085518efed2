"""The verb that writes configurations for other engines: export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.cli.app import Json, app, progress_bar, say, say_json, say_next
from runtime.cli.hardware_options import Disk, Gpu, Host, Link, Set, Weights, chosen_profile, in_format

if TYPE_CHECKING:
    from simulator.exports import Export
    from simulator.policies.config import OffloadConfig
    from trace_capture.expert_counts import ExpertCounts
    from trace_capture.hardware import HardwareProfile
    from trace_capture.model_shape import ModelShape
    from trace_capture.trace import Trace


@app.command("export")
def export_command(
    config: Annotated[Path | None, typer.Argument(help="A configuration (TOML), normally from tune.")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Engine to write for; --list shows them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All targets, a folder each.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show the targets and the versions they assume.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A trace (counts of experts, predictions), or counts (.json) alone.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Shape of the model, by name or config.json; by default the trace's.")
    ] = None,
    weights: Weights = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="The machine; by default the one it was tuned for, if it ships.")
    ] = None,
    gpu: Gpu = None,
    host: Host = None,
    link: Link = None,
    disk: Disk = None,
    numbers: Set = [],  # noqa: B006 - typer reads it once
    model_path: Annotated[
        str | None, typer.Option("--model-path", "--gguf", help="Weights where the engine will run; written as it is.")
    ] = None,
    draft_model: Annotated[str | None, typer.Option("--draft-model", help="The same of a draft model.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of context to make room for.")] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="PATH", help="Folder to write, or the file that the first becomes; else it is only shown."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a configuration for another engine, with what it is predicted to do there and what is lost.

    Example: moe-studio export tuned.toml --target llama.cpp --trace t.parquet --gguf model.gguf --out llama
    """
    from simulator.config_file import load_config
    from simulator.exports import TARGETS, ExportOptions
    from trace_capture.errors import ConfigError

    if listing:
        _list_targets(as_json)
        return
    if config is None:
        raise ConfigError(
            "name a configuration: moe-studio export tuned.toml --target llama.cpp ('--list' for targets)"
        )
    if every == (target is not None):
        raise ConfigError("give one of --target NAME and --all; 'moe-studio export --list' shows the targets")
    if every and out is None:
        raise ConfigError("--all writes a folder for each target: say where with --out FOLDER")
    loaded = load_config(config)
    routing = _routing(loaded, trace, weights)
    shape = _shape(loaded, model, weights) if model or routing is None else routing.shape
    machine = _machine(loaded, hardware, gpu, host, link, disk, numbers)
    options = ExportOptions(model_path, draft_model, context)
    targets = list(TARGETS) if target is None else [target]
    _export(loaded, targets, shape, machine, routing, options, out, every, as_json)


def _export(
    config: OffloadConfig,
    targets: list[str],
    shape: ModelShape,
    machine: HardwareProfile | None,
    routing: Trace | ExpertCounts | None,
    options: Any,
    out: str | None,
    every: bool,
    as_json: bool,
) -> None:
    """Make and write the exports; of several, those that cannot be made are told and left out."""
    from simulator.exports import export
    from trace_capture.errors import ConfigError
    from trace_capture.trace import Trace

    trace = routing if isinstance(routing, Trace) else None
    popular = None if isinstance(routing, Trace) else routing
    done: list[Export] = []
    refused: dict[str, str] = {}
    with progress_bar(every and not as_json) as step:
        report = step("export")
        for place, name in enumerate(targets, start=1):
            try:
                done.append(
                    export(config, name, shape, hardware=machine, trace=trace, options=options, popular=popular)
                )
            except ConfigError as error:
                if not every:
                    raise
                refused[name] = str(error)
            report(place, len(targets))
    paths = {one.target: _write(one, f"{Path(out) / one.target}/" if every else out) for one in done if out is not None}
    if as_json:
        files = {name: [str(path) for path in written] for name, written in paths.items()}
        found = {one.target: one.as_json() | _files_json(one, files.get(one.target)) for one in done}
        say_json({"exports": found, "refused": refused} if every else next(iter(found.values())))
        return
    for one in done:
        _say(one, paths.get(one.target, []), short=every)
    for name, reason in refused.items():
        say(f"{name}: not exported: {reason}")


def _write(one: Export, place: str) -> list[Path]:
    """As the file that is named with the others beside it, or into a folder: one that exists, whose name ends in a
    slash, or has no suffix or, where there are several files, another one than the first of them."""
    path, first = Path(place), Path(one.files[0].name).suffix
    is_file = path.suffix == first or (len(one.files) == 1 and path.suffix != "")
    return one.write(path, place.endswith("/") or path.is_dir() or not is_file)


def _files_json(one: Export, paths: list[str] | None) -> dict[str, Any]:
    """Where the files are, or what they hold where they were not written."""
    return {"paths": paths} if paths else {"files": {file.name: file.text for file in one.files}}


def _say(one: Export, paths: list[Path], short: bool) -> None:
    if short:
        say(f"{one.target}: {', '.join(map(str, paths))}")
        say(f"  {one.predicted.text}")
        return
    if not paths:
        say(one.files[0].text.rstrip("\n"))
        say_next(f"write all files ({', '.join(file.name for file in one.files)}) with --out FOLDER")
        return
    say(", ".join(map(str, paths)))
    for line in one.about:
        say(f"  {line}")
    say_next(one.command)


def _list_targets(as_json: bool) -> None:
    from simulator.exports import TARGETS

    if as_json:
        say_json({name: {"title": target.title, "engine": target.engine} for name, target in TARGETS.items()})
        return
    for name, target in TARGETS.items():
        say(f"{name:14} {target.title}")
        say(f"{'':14} for {target.engine}")
    say_next("moe-studio export tuned.toml --target llama.cpp --trace t.parquet --out llama")


def _routing(config: OffloadConfig, trace: Path | None, weights: str | None) -> Trace | ExpertCounts | None:
    """The trace or counts, in the weight format that is asked for or that the configuration was tuned with."""
    if trace is None:
        return None
    from simulator.exports.inputs import tuned_format
    from trace_capture.expert_counts import load_popularity

    loaded = load_popularity(trace)
    return in_format(loaded, weights or tuned_format(config, loaded.shape))


def _shape(config: OffloadConfig, model: str | None, weights: str | None) -> ModelShape:
    """The model that is named, or the one that the configuration was tuned for where it is a built-in one."""
    from simulator.exports.inputs import tuned_shape
    from trace_capture.known_shapes import find_shape

    shape = tuned_shape(config) if model is None else find_shape(model)
    return shape.with_weights(weights) if weights else shape


def _machine(
    config: OffloadConfig,
    hardware: str | None,
    gpu: str | None,
    host: str | None,
    link: str | None,
    disk: str | None,
    numbers: list[str],
) -> HardwareProfile | None:
    """The machine that the options describe, or the one that the configuration was tuned for where it can be had."""
    from trace_capture.errors import ConfigError, ProfileError

    tuned = config.provenance.hardware if config.provenance else None
    if hardware or tuned and (gpu or host or link or disk or numbers):
        return chosen_profile(hardware or str(tuned), gpu, host, link, disk, numbers)
    if gpu or host or link or disk or numbers:
        raise ConfigError("the configuration does not name a machine to change: give --hardware too")
    if config.provenance is None:
        return None
    try:
        profile = chosen_profile(config.provenance.hardware, None, None, None, None, [])
    except ProfileError:
        return None
    return profile if profile.digest == config.provenance.hardware_digest else None
