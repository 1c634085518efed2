"""The verb whatif: the same routing on other machines, with other strategies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.cli.app import Json, app, assignments, console, progress_bar, say, say_json, say_next
from runtime.cli.machines import TracePath

if TYPE_CHECKING:
    from simulator.sweep import Point
    from simulator.upgrades import Upgrade
    from trace_capture.trace import Trace

Settings = Annotated[
    list[str],
    typer.Option("--set", help="One setting, NAME=VALUE, such as gpu=rtx4090 or config.cache.policy=lfu. Repeatable."),
]
Sweeps = Annotated[
    list[str],
    typer.Option("--sweep", help="Values to try, NAME=V1,V2,..., such as vram_gb=8,12,16,24. Repeatable: a grid."),
]
_SHOWN_ROWS = 40
_EXPLAINED = 8
_WIDEST = 400
"""Columns of text that a table may take: a terminal breaks its lines, where a narrower table would lose values."""


@app.command("whatif")
def whatif_command(
    trace: TracePath,
    settings: Settings = [],  # noqa: B006 - typer reads it once
    sweeps: Sweeps = [],  # noqa: B006
    explain: Annotated[bool, typer.Option("--explain", help="What limits a point, and which upgrade helps.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes; -1 for one per core.")] = 1,
    cluster: Annotated[str | None, typer.Option(help="dask or ray, or dask:ADDRESS, instead of processes.")] = None,
    store: Annotated[Path | None, typer.Option(help="File of results, so that a stopped sweep goes on.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table as CSV.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write the table as Parquet.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of it as one HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """Ask how fast the routing of a trace would be on other machines and with other strategies.

    Any setting can be set or swept: hardware, gpu, host, link, disk, vram_gb, weights, context, strategy, prefetch,
    mode, cpu_layers, cpu_experts, cpu_threads, gamma, acceptance, ablate, budget_ratio, ...; any number of the machine
    (host.cores); any key of a configuration (config.cache.policy).

    Example: moe-studio whatif t.parquet --set gpu=rtx4090 --sweep link=pcie3x16,pcie4x16,pcie5x16 --explain
    """
    from simulator.result_store import ResultStore
    from simulator.scenario import Scenario
    from simulator.sweep import grid, sweep
    from trace_capture.errors import ConfigError
    from trace_capture.trace import Trace

    loaded = Trace.load(trace)
    scenarios = grid(Scenario().set_values(assignments(settings, "--set")), _lists(sweeps))
    known = None if store is None else ResultStore(store)
    with progress_bar(not as_json) as step:
        points = sweep(loaded, scenarios, store=known, jobs=jobs, cluster=cluster, progress=step("simulate"))
        found = _upgrades(loaded, points, step("upgrades")) if explain else {}
    _write(points, csv, parquet, plot)
    if as_json:
        rows = [point.values | point.answer | _explained(found.get(place)) for place, point in enumerate(points)]
        say_json({"points": rows, "settings": scenarios[0][1].model_dump(mode="json")})
    if all(point.error for point in points):
        raise ConfigError(f"impossible: {points[0].error}")
    if as_json:
        return
    _say_points(points, list(_lists(sweeps)))
    for place, upgrades in found.items():
        _say_explained(points[place], upgrades)
    if found and not any(upgrade.what == "CPU cores" for upgrades in found.values() for upgrade in upgrades):
        say("a faster CPU or RAM would change nothing: no expert runs on the CPU (--set cpu_experts=misses)")
    say_next(_next(trace, points))


def _lists(texts: list[str]) -> dict[str, list[str]]:
    pairs = assignments(texts, "--sweep")
    return {name: [value.strip() for value in values.split(",") if value.strip()] for name, values in pairs.items()}


def _upgrades(trace: Trace, points: list[Point], report: Any) -> dict[int, list[Upgrade]]:
    """Of the first few possible points, by place."""
    from simulator.upgrades import upgrades

    places = [place for place, point in enumerate(points) if point.error is None][:_EXPLAINED]
    found: dict[int, list[Upgrade]] = {}
    for done, place in enumerate(places, 1):
        found[place] = upgrades(trace, points[place].scenario, points[place].answer["tpot_ms"])
        report(done, len(places))
    return found


def _explained(upgrades: list[Upgrade] | None) -> dict[str, Any]:
    if upgrades is None:
        return {}
    keys = ("what", "change", "saved_ms", "speed_up")
    return {"upgrades": [{key: getattr(upgrade, key) for key in keys} for upgrade in upgrades]}


def _write(points: list[Point], csv: Path | None, parquet: Path | None, plot: Path | None) -> None:
    from simulator.answer_table import write_csv, write_parquet
    from trace_capture.files import write_text_atomic

    if csv is not None:
        write_csv(points, csv)
    if parquet is not None:
        write_parquet(points, parquet)
    if plot is not None:
        from dashboard.whatif_figures import sweep_figure

        figure = sweep_figure([point.values | point.answer for point in points], list(points[0].values))
        write_text_atomic(plot, figure.to_html(include_plotlyjs=True))


def _say_points(points: list[Point], swept: list[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in swept:
        table.add_column(name, no_wrap=True)
    for title in ("ms/token", "band", "tokens/s", "hits", "MB/token", "bound"):
        table.add_column(title, justify="right", no_wrap=True)
    for point in points[:_SHOWN_ROWS]:
        table.add_row(*point.values.values(), *_cells(point))
    console(width=_WIDEST).print(table)
    if len(points) > _SHOWN_ROWS:
        say(f"  and {len(points) - _SHOWN_ROWS} more; --csv FILE or --json has all of them")
    for why in dict.fromkeys(point.error for point in points if point.error):
        say(f"  impossible: {why}")
    for note in dict.fromkeys(note for point in points for note in point.answer.get("notes", [])):
        say(f"  {note}")


def _cells(point: Point) -> list[str]:
    answer = point.answer
    if point.error is not None:
        return ["-", "", "", "", "", ""]
    low, high, bound = answer["tpot_low_ms"], answer["tpot_high_ms"], answer["bound_ms"]
    return [
        f"{answer['tpot_ms']:.2f}",
        "no band" if low is None else f"{low:.1f} to {high:.1f}",
        f"{answer['tokens_per_s']:.1f}",
        f"{100 * answer['decode_hit_rate']:.1f} %",
        f"{answer['bytes_per_token'] / 1e6:.1f}",
        "" if bound is None else f"{bound:.2f}",
    ]


def _say_explained(point: Point, upgrades: list[Upgrade]) -> None:
    where = ", ".join(f"{name}={value}" for name, value in point.values.items()) or point.answer["hardware"]
    say(f"{where}: {point.answer['what_limits']}")
    for upgrade in upgrades:
        gain = f"{upgrade.saved_ms:+.2f} ms saved" if upgrade.saved_ms >= 0 else f"{-upgrade.saved_ms:.2f} ms lost"
        say(f"  {upgrade.what} ({upgrade.change}): {gain} per token, {upgrade.speed_up:.2f}x")


def _next(trace: Path, points: list[Point]) -> str:
    possible = [point for point in points if point.error is None]
    best = min(possible, key=lambda point: float(point.answer["tpot_ms"])).scenario
    parts = {"gpu": best.gpu, "host": best.host, "link": best.link, "disk": best.disk, "weights": best.weights}
    flags = " ".join(f"--{name} {value}" for name, value in parts.items() if value)
    return f"moe-studio tune {trace} --hardware {best.hardware} {flags} --budget-ratio 0.5 --out tuned.toml"
