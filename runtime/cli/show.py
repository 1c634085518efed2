"""Verbs that show and check: dashboard, report, compare, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runtime.cli.app import Json, app, say, say_json, say_next

Folder = Annotated[Path, typer.Argument(help="A folder with runs, such as the demonstration writes.")]
OUR_PACKAGES = ("trace_capture", "simulator", "runtime", "dashboard")


@app.command("dashboard")
def dashboard_command(
    folder: Folder,
    host: Annotated[
        str, typer.Option(help="Address to listen on; anything but this machine is unprotected.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8050,
) -> None:
    """Look at the runs of a folder in a browser.

    Example: moe-studio dashboard studio-demo
    """
    from dashboard.server import serve

    serve(folder, host=host, port=port)


@app.command("report")
def report_command(
    folder: Folder,
    out: Annotated[Path | None, typer.Option("--out", help="HTML file; by default report.html in the folder.")] = None,
) -> None:
    """Write the figures of a folder as one self-contained HTML file.

    Example: moe-studio report studio-demo
    """
    from dashboard.report import write_report

    path = write_report(folder, out or folder / "report.html")
    say(f"wrote {path}; open it in a browser")


@app.command("compare")
def compare_command(
    predicted: Annotated[Path, typer.Argument(help="A .run.json, normally simulated.")],
    measured: Annotated[Path, typer.Argument(help="A .run.json, normally measured.")],
    as_json: Json = False,
) -> None:
    """Two runs side by side: time per output token part by part, hits, bytes.

    Example: moe-studio compare demo/2-lru-cache.predicted.run.json demo/2-lru-cache.measured.run.json
    """
    from simulator.critical_path import what_limits
    from trace_capture.run import Run

    left, right = Run.load(predicted, spans=False), Run.load(measured, spans=False)
    names = ["tpot_ms", "ttft_ms", "hit_rate", "lookups", "loads", "bytes_loaded"]
    values = {name: (getattr(left.metrics, name), getattr(right.metrics, name)) for name in names}
    terms = left.metrics.tpot_terms_ms
    values |= {
        f"tpot_terms_ms.{name}": (value, right.metrics.tpot_terms_ms.get(name, 0.0)) for name, value in terms.items()
    }
    if as_json:
        limits = {"what_limits": (what_limits(left), what_limits(right))}
        say_json({name: {"first": a, "second": b} for name, (a, b) in (values | limits).items()})
        return
    for place, run in (("first", left), ("second", right)):
        emulated = ", emulated link" if run.info.emulated else ""
        say(f"{place}: {run.info.label} ({run.info.kind}{emulated}) on {run.info.hardware}")
    for name, (a, b) in values.items():
        change = f"{100 * (a / b - 1):+8.1f} %" if b else ""
        say(f"  {name:24} {a:14,.3f} {b:14,.3f} {change}")
    for place, run in (("first", left), ("second", right)):
        say(f"{place}. {what_limits(run)}")
    say_next(f"moe-studio dashboard {predicted.parent}")


@app.command("timeline")
def timeline_command(
    runs: Annotated[list[Path], typer.Argument(help="One or more .run.json with their timelines, shown together.")],
    out: Annotated[Path, typer.Option("--out", help="Chrome JSON to write; packed when it ends in .gz.")],
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Only output tokens FIRST:STOP, counted from 0 over all prompts.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write timelines for ui.perfetto.dev: passes, layers and work, counters, arrows from prefetches to their use.

    Example: moe-studio timeline demo/4-tuned.predicted.run.json demo/4-tuned.measured.run.json --tokens 10:20
    --out t.json.gz
    """
    from simulator.timeline import write_perfetto
    from trace_capture.run import Run

    window = _token_window(tokens)
    loaded = [Run.load(path) for path in runs]
    counts = write_perfetto(loaded, out, tokens=window)
    if as_json:
        say_json({"path": str(out), "runs": [run.info.label for run in loaded], "tokens": window} | counts)
        return
    shown = ", ".join(f"{number} {name}" for name, number in counts.items())
    say(f"wrote {out}: {shown} of {len(loaded)} run{'s' if len(loaded) > 1 else ''}")
    say_next("open ui.perfetto.dev in a browser and drop the file there; it is read on your machine only")


def _token_window(text: str | None) -> tuple[int, int] | None:
    """`10:20` as two numbers."""
    from trace_capture.errors import ConfigError

    if text is None:
        return None
    first, _, stop = text.partition(":")
    if not (first.isascii() and first.isdigit() and stop.isascii() and stop.isdigit()):
        raise ConfigError(f"--tokens '{text}' is not a window; write FIRST:STOP, such as 10:20")
    return int(first), int(stop)


@app.command("doctor")
def doctor_command(as_json: Json = False) -> None:
    """Check the installation: foreign packages that took our names, versions, devices, compiled modules.

    Example: moe-studio doctor
    """
    from importlib.metadata import packages_distributions

    from simulator.compiled import status
    from trace_capture.errors import StudioError
    from trace_capture.versions import software_versions

    owners = packages_distributions()
    foreign = {
        name: sorted(set(owners.get(name, [])) - {"moe-studio"})
        for name in OUR_PACKAGES
        if set(owners.get(name, [])) - {"moe-studio"}
    }
    versions = software_versions("numpy", "simpy", "pulp", "dash", "pyarrow", "torch", "transformers")
    device, hot = _device(), status()
    if as_json:
        facts = {"versions": versions, "device": device, "name_collisions": foreign}
        say_json(facts | {"hot_modules": hot._asdict() | {"mend": hot.mend}})
    else:
        say("versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()))
        say(f"device: {device}")
        say(f"the replay's hot modules: {hot}" + (f"; {hot.mend}" if hot.mend else ""))
    if foreign:
        names = ", ".join(f"{name} (from {', '.join(dists)})" for name, dists in foreign.items())
        raise StudioError(
            f"other distributions install packages of our names: {names}; use a virtual environment of its own"
        )
    if not as_json:
        say("no name collisions; all good")
        say_next("moe-studio demo")


def _device() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed: traces can be replayed and tuned; for live runs pip install 'moe-studio[live]'"
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "no CUDA device seen: the engine runs on its emulated device"
