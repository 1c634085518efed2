"""Tune: search for the fastest configuration, see what was found, and keep it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from dashboard import figures, jobs, parts
from dashboard.address import Query, address_sink, keep_in_address, one_of, whole_number
from dashboard.data import Snapshot, Workspace
from dashboard.machines import machine_named, machine_select
from dashboard.pages.whatif import NO_TRACE
from dashboard.saving import free_name, save_new_config
from dashboard.tune_figures import front_figure
from dashboard.tune_maps import modes_figure, slots_figure
from dashboard.tune_view import (
    Pace,
    TuneRecord,
    budget_bytes,
    budget_sentence,
    front_sentence,
    held_out_comparison,
    held_out_sentence,
    tune_record,
)
from simulator.policies.config import DeviceConfig
from simulator.tune import TuneOptions, tune
from simulator.tune_goal import OBJECTIVES
from trace_capture.errors import ConfigError, StudioError

_NAMES = ("trace", "hardware", "budget", "objective", "trials", "pools", "drafts")
_CONTROLS = {name: (f"tune-{name}", "value") for name in _NAMES}
_OBJECTIVES = {
    "tpot": "time per output token",
    "ttft": "time to first token",
    "throughput": "throughput, prompts included",
    "memory": "least device memory that is fast enough",
}
_POOLS = {"layer": "slots of each layer's own", "both": "also one pool for all layers"}
_MOST_DRAFTS = 16
_COLUMNS = (
    parts.number_column("place", "rank", 0) | {"width": 90},
    parts.number_column("tpot_ms", "time per token (ms)", 3) | {"width": 130},
    {"field": "label", "headerName": "configuration", "flex": 2, "minWidth": 260, "tooltipField": "label"},
    parts.number_column("ttft_ms", "time to first token (ms)", 1),
    parts.number_column("hit_percent", "hit rate (%)", 1),
    parts.number_column("device_mib", "device memory (MiB)", 1),
)
_GRAPHS = {
    "tune-held-out": "Time per token of the chosen configuration and of plain LRU on held-out tokens",
    "tune-front": "Speed over device memory of the configurations that no other beats",
    "tune-slots": "Expert slots of each layer",
    "tune-modes": "What each layer does with predictions",
}
NOTHING_YET = "Nothing was tuned yet. Choose a machine and a budget, and press Start."


def layout(snapshot: Snapshot, query: Query) -> Any:
    """The page for the choices that the address names. The result stays in the browser's tab; a search that is left
    behind ends, and goes on from there when it is started again."""
    return dmc.Stack(
        [
            address_sink("tune"),
            dcc.Store(id="tune-result", storage_type="session"),
            parts.problems(snapshot.problems),
            parts.section("What to tune for", _controls(snapshot, query), *_start(snapshot)),
            jobs.progress_panel("tune"),
            html.Div(id="tune-status", className="note", role="status"),
            html.Div(id="tune-view"),
        ],
        gap="md",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Connect the search, which is a background job, and what is shown and saved of it."""
    kept = Path(tempfile.mkdtemp(prefix="moe-studio-tune-"))
    atexit.register(shutil.rmtree, kept, ignore_errors=True)
    jobs.background(
        app,
        "tune",
        [Output("tune-result", "data")],
        [Input("tune-start", "n_clicks"), *[State(*place) for place in _CONTROLS.values()]],
        _work(workspace.folder, kept / "study.sqlite"),
        disabled_while_running=["tune-start"],
        stops_on_leaving=True,
    )

    def show(result: TuneRecord | None) -> Any:
        return _view(result, workspace.folder)

    def draw(scheme: str | None, result: TuneRecord | None) -> list[Any]:
        return _figures(result, dark=scheme == "dark")

    app.callback(Output("tune-view", "children"), Input("tune-result", "data"))(show)
    app.callback([Output(name, "figure") for name in _GRAPHS], Input("scheme", "data"), State("tune-result", "data"))(
        draw
    )
    _register_notes(app, workspace)
    keep_in_address(app, "tune", _CONTROLS)


def _register_notes(app: Dash, workspace: Workspace) -> None:
    """Connect what is said about the budget, about a stop and about saving."""

    def budget(trace: str | None, percent: float | str | None) -> str:
        named = workspace.read().named_trace(trace)
        return "" if named is None or not percent else budget_sentence(named.trace.shape, float(percent))

    def stopped(stops: int | None, progress: str | None) -> str:
        return f"Stopped at {(progress or '').partition(', about')[0]}. Start goes on from there." if stops else ""

    def save(clicks: int | None, name: str | None, result: TuneRecord | None) -> Any:
        if not clicks or not result:
            raise PreventUpdate
        try:
            path = save_new_config(workspace.folder, name or "", result["config"])
        except StudioError as error:
            return dmc.Alert(str(error), title="Not saved", color="orange", className="problem")
        link = dcc.Link("Export it", href=f"/export?config={path.name}")
        return dmc.Alert([f"{path.name} is in the folder now. ", link], title="Saved", color="green")

    app.callback(Output("tune-budget-note", "children"), Input("tune-trace", "value"), Input("tune-budget", "value"))(
        budget
    )
    app.callback(
        Output("tune-status", "children"),
        Input("tune-stop", "n_clicks"),
        State("tune-progress-text", "children"),
        prevent_initial_call=True,
    )(stopped)
    app.clientside_callback(
        "() => ''",
        Output("tune-status", "children", allow_duplicate=True),
        Input("tune-start", "n_clicks"),
        prevent_initial_call=True,
    )
    app.callback(
        Output("tune-saved", "children"),
        Input("tune-save", "n_clicks"),
        State("tune-save-name", "value"),
        State("tune-result", "data"),
        prevent_initial_call=True,
    )(save)


def _work(folder: Path, study: Path) -> Callable[..., Any]:
    """The job for a folder. The study keeps what was simulated, so that a search that was stopped goes on."""

    def search(report: jobs.Report, trace: str | None, hardware: str | None, budget: Any, *rest: Any) -> Any:
        snapshot = Workspace(folder).read(runs=False)
        named, machine = snapshot.named_trace(trace), machine_named(snapshot, hardware)
        if named is None or machine is None:
            raise ConfigError(NO_TRACE if named is None else f"there is no machine '{hardware}'; choose one")
        pace, (objective, trials, pools, drafts) = Pace(), rest
        result = tune(
            named.trace,
            machine,
            budget_bytes=budget_bytes(named.trace.shape, float(budget or 0)),
            device=DeviceConfig.for_machine(machine),
            scopes=("layer", "global") if pools == "both" else ("layer",),
            options=TuneOptions(
                objective=objective, trials=int(trials or 0), study=study, drafts=int(drafts) if drafts else None
            ),
            progress=lambda done, total: report(done, total, pace.text(done, total, time.monotonic())),
        )
        where = {"folder": str(folder), "trace": named.name, "hardware": machine.name}
        return tune_record(result, named.trace.shape, emulated=machine.emulated) | where

    def work(report: jobs.Report, clicks: int | None, *values: Any) -> list[Any]:
        if not clicks:
            raise PreventUpdate
        try:
            return [search(report, *values)]
        except StudioError as error:
            return [{"folder": str(folder), "error": str(error)}]

    return work


def _controls(snapshot: Snapshot, query: Query) -> Any:
    number = {"hideControls": True, "allowNegative": False, "debounce": 300}
    budget = dmc.NumberInput(
        id="tune-budget",
        label="Device memory for experts (% of them all)",
        value=_percent(query.get("budget")),
        min=0.1,
        max=100,
        decimalScale=1,
        **number,
    )
    objective = dmc.Select(
        id="tune-objective",
        label="Look for",
        data=[{"value": name, "label": _OBJECTIVES.get(name, name)} for name in OBJECTIVES],
        value=one_of(query.get("objective"), OBJECTIVES),
        allowDeselect=False,
    )
    trials = dmc.NumberInput(
        id="tune-trials",
        label="Proposals beyond the grid (0: the grid alone)",
        value=min(10_000, whole_number(query.get("trials"), 40)),
        min=0,
        max=10_000,
        allowDecimal=False,
        **number,
    )
    pickers = [parts.trace_select("tune-trace", snapshot, query), machine_select("tune-hardware", snapshot, query)]
    return html.Div(
        [
            dmc.SimpleGrid(pickers, cols={"base": 1, "sm": 2}),
            dmc.SimpleGrid([budget, objective, trials], cols={"base": 1, "sm": 3}, my="sm"),
            dmc.SimpleGrid(_wider(query, number), cols={"base": 1, "sm": 2}, my="sm"),
            parts.note("", "tune-budget-note"),
        ]
    )


def _wider(query: Query, number: dict[str, Any]) -> list[Any]:
    """Controls of what is searched besides."""
    pools = dmc.Select(
        id="tune-pools",
        label="Split of the memory",
        data=[{"value": name, "label": label} for name, label in _POOLS.items()],
        value=one_of(query.get("pools"), tuple(_POOLS)),
        allowDeselect=False,
    )
    drafts = dmc.NumberInput(
        id="tune-drafts",
        label="Try up to so many drafts per pass (0: passes as captured)",
        value=min(_MOST_DRAFTS, whole_number(query.get("drafts"), 0)),
        min=0,
        max=_MOST_DRAFTS,
        allowDecimal=False,
        **number,
    )
    return [pools, drafts]


def _start(snapshot: Snapshot) -> list[Any]:
    start = dmc.Button("Start", id="tune-start", disabled=not snapshot.traces)
    return [start] if snapshot.traces else [start, parts.note(NO_TRACE)]


def _percent(text: str | None) -> float:
    try:
        value = float(text or 50)
    except ValueError:
        return 50
    return value if 0 < value <= 100 else 50


def _view(result: TuneRecord | None, folder: Path) -> Any:
    """All there is to see of a tuning."""
    if result is None or result["folder"] != str(folder):
        return parts.note(NOTHING_YET)
    if "error" in result:
        return dmc.Alert(result["error"], title="Not tuned", color="orange", className="problem")
    tried = f"Best for {_OBJECTIVES.get(result['objective'], result['objective'])} of {len(result['candidates']):,} "
    tried += f"configurations, after {result['trials']:,} proposals beyond the grid; {result['trace']} on "
    number = {"data-value": repr(result["chosen"]["tpot_ms"])}
    chosen = [
        html.Div(result["title"], id="tune-chosen", className="card-value", **number),
        parts.note(f"{tried}{result['hardware']}."),
        parts.note(held_out_sentence(result), "tune-sentence"),
        _graph("tune-held-out"),
        *[parts.note(note) for note in result["notes"]],
    ]
    front = parts.note(front_sentence(result))
    return dmc.Stack(
        [
            parts.section("Chosen configuration", *chosen),
            parts.section("Keep it", *_saving(folder)),
            parts.section("Speed against device memory", front, _graph("tune-front")),
            parts.section("Layers", _graph("tune-slots"), _graph("tune-modes"), *_tau(result["tau"])),
            parts.section(
                "Configurations that were tried, on the training part",
                parts.grid("tune-candidates", "Candidates", _COLUMNS, result["candidates"]),
            ),
        ],
        gap="md",
    )


def _graph(name: str) -> Any:
    return parts.graph(name, _GRAPHS[name])


def _saving(folder: Path) -> list[Any]:
    name = dmc.TextInput(id="tune-save-name", label="Save as (a new file of the folder)", value=free_name(folder))
    row = dmc.Group([name, dmc.Button("Save", id="tune-save", variant="default")], align="flex-end")
    return [row, html.Div(id="tune-saved", role="status")]


def _tau(rows: list[list[str]]) -> list[Any]:
    """What is decided by utility, as a table; nothing where nothing is."""
    if not rows:
        return []
    cells = [html.Tr([html.Th(what, scope="row"), html.Td(how)]) for what, how in rows]
    table = html.Table(html.Tbody(cells), id="tune-tau")
    return [html.Div(table, className="table-scroll", tabIndex=0, role="region", **{"aria-label": "Utility and tau"})]


def _figures(result: TuneRecord | None, *, dark: bool) -> list[Any]:
    """The figures in the order of `_GRAPHS`."""
    if not result or "layers" not in result:
        return [figures.empty_figure(NOTHING_YET, dark=dark)] * len(_GRAPHS)
    return [
        figures.predicted_against_measured(held_out_comparison(result), dark=dark),
        front_figure(result["front"], result["objective"], dark=dark),
        slots_figure(result["layers"], dark=dark),
        modes_figure(result["layers"], dark=dark),
    ]
