"""What-if: the same routing on another machine or with another strategy, up to four set-ups side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, State, ctx, dcc, html

from dashboard import jobs, parts
from dashboard.address import Query, address_sink, keep_in_address, one_of
from dashboard.data import Snapshot, Workspace
from dashboard.setups import (
    MAX_SETUPS,
    SLIDER_DEFAULTS,
    SLIDERS,
    VRAM_LIMIT_GB,
    Choice,
    choices,
    chosen,
    parse_setups,
    scenario_of,
    setup_text,
    setups_text,
    title,
)
from dashboard.whatif_figures import setups_figure
from dashboard.whatif_view import setup_rows
from simulator.sweep import answer

TRACE = "whatif-trace"
NO_TRACE = "There is no trace in this folder. Drop one on the Overview page, or make one with 'moe-studio capture'."
_PICKERS = ("hardware", "gpu", "link", "host", "weights", "context", "strategy", "prefetch", "cpu_experts")
_VALUES = {name: (f"whatif-{name}", "value") for name in (*_PICKERS, *SLIDERS)}
_MARKS = (0, 0.25, 0.5, 0.75, 1)
_COLUMNS = (
    {"field": "setup", "headerName": "set-up", "flex": 2, "minWidth": 240, "tooltipField": "setup"},
    parts.number_column("tpot_ms", "time per token (ms)", 3),
    {"field": "band", "headerName": "90 % band (ms)", "width": 170},
    parts.number_column("tokens_per_s", "tokens per second", 1),
    parts.number_column("hit_percent", "hit rate (%)", 1),
    parts.number_column("bound_ms", "lower bound (ms)", 3),
    parts.number_column("regret_ratio", "times the bound", 2),
)


def layout(snapshot: Snapshot, query: Query) -> Any:
    """The page for the trace and the set-ups that the address names."""
    named = snapshot.named_trace(query.get("trace"))
    offered = choices(snapshot, named.trace if named else None)
    pickers = [_picker(choice, query) for choice in offered]
    pins = parse_setups(query.get("pins"), offered)
    buttons = dmc.Group(
        [
            dmc.Button("Keep for comparison", id="whatif-pin", variant="default", size="xs"),
            dmc.Button("Clear comparison", id="whatif-clear", variant="subtle", size="xs"),
        ]
    )
    return dmc.Stack(
        [
            address_sink("whatif"),
            dcc.Store(id="whatif-pins", data=setups_text(pins)),
            dcc.Store(id="whatif-known", data={}),
            parts.problems(snapshot.problems),
            dmc.Group(parts.trace_select(TRACE, snapshot, query)),
            parts.section(
                "Machine and strategy",
                dmc.SimpleGrid(pickers, cols={"base": 1, "xs": 2, "md": 3}),
                dmc.SimpleGrid(_sliders(query), cols={"base": 1, "md": 3}, mt="md"),
                controls=buttons,
            ),
            jobs.progress_panel("whatif"),
            parts.section(
                "How fast it would be",
                html.Div(id="whatif-value", className="card-value", role="status", **{"aria-live": "polite"}),
                parts.note("" if named else NO_TRACE, "whatif-note"),
                parts.graph("whatif-figure", "Time per token of each set-up by its parts, with band and bound"),
                parts.grid("whatif-table", "Set-ups in numbers", _COLUMNS, ()),
            ),
        ],
        gap="md",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Connect the controls; the simulation is a background job."""
    jobs.background(
        app,
        "whatif",
        [
            Output("whatif-value", "children"),
            Output("whatif-note", "children"),
            Output("whatif-figure", "figure"),
            Output("whatif-table", "rowData"),
            Output("whatif-known", "data"),
        ],
        [
            Input(TRACE, "value"),
            Input("whatif-pins", "data"),
            Input("scheme", "data"),
            *[Input(*place) for place in _VALUES.values()],
            State("whatif-known", "data"),
        ],
        _work(workspace.folder),
        run_on_load=True,
    )

    def keep(_pin: int | None, _clear: int | None, pins: str, trace: str | None, *values: Any) -> str:
        snapshot = workspace.read()
        named = snapshot.named_trace(trace)
        offered = choices(snapshot, named.trace if named else None)
        if ctx.triggered_id == "whatif-clear":
            return ""
        setups = [*parse_setups(pins, offered), chosen(dict(zip(_VALUES, values, strict=True)), offered)]
        distinct = list({setup_text(one): one for one in setups}.values())
        return setups_text(distinct[-(MAX_SETUPS - 1) :])

    app.callback(
        Output("whatif-pins", "data"),
        Input("whatif-pin", "n_clicks"),
        Input("whatif-clear", "n_clicks"),
        State("whatif-pins", "data"),
        State(TRACE, "value"),
        *[State(*place) for place in _VALUES.values()],
        prevent_initial_call=True,
    )(keep)
    keep_in_address(app, "whatif", {"trace": (TRACE, "value"), "pins": ("whatif-pins", "data")} | _VALUES)


def _work(folder: Path) -> Callable[..., Any]:
    """The job for a folder, which it reads by itself: it runs in a process of its own."""

    def work(report: jobs.Report, trace_name: str | None, pins: str, scheme: str | None, *rest: Any) -> Any:
        *values, known = rest
        snapshot = Workspace(folder).read(runs=False)
        named = snapshot.named_trace(trace_name)
        dark = scheme == "dark"
        if named is None:
            return "", NO_TRACE, setups_figure([], dark=dark), [], {}
        offered = choices(snapshot, named.trace)
        now = chosen(dict(zip(_VALUES, values, strict=True)), offered)
        setups = [now, *[one for one in parse_setups(pins, offered) if one != now]]
        answers: dict[str, Any] = {}
        for done, setup in enumerate(setups):
            key = f"{named.trace.digest}:{setup_text(setup)}"
            report(done, len(setups), f"simulating {title(setup)}")
            answers[key] = (known or {}).get(key) or answer(named.trace, scenario_of(setup, offered, snapshot))
        rows = setup_rows([title(one) for one in setups], list(answers.values()))
        figure = setups_figure(rows, dark=dark)
        return rows[0].headline, rows[0].sentence, figure, [row.cells for row in rows], answers

    return work


def _picker(choice: Choice, query: Query) -> Any:
    return dmc.Select(
        id=f"whatif-{choice.setting}",
        label=choice.label,
        data=list(choice.options),
        value=one_of(query.get(choice.setting), choice.options, choice.default),
        allowDeselect=False,
        searchable=True,
    )


def _sliders(query: Query) -> list[Any]:
    ranges = {
        "vram_gb": ("Device memory (GiB; 0: the card's own)", 0, VRAM_LIMIT_GB, 1),
        "gamma": ("Drafts per verify pass (0: as captured)", 0, 16, 1),
        "acceptance": ("Share of drafts that are kept", 0, 1, 0.05),
    }
    return [
        html.Div(
            [
                dmc.Text(label, size="sm", fw=500, id=f"whatif-{name}-label"),
                dmc.Slider(
                    id=f"whatif-{name}",
                    min=low,
                    max=high,
                    step=step,
                    value=_number(query.get(name), SLIDER_DEFAULTS[name], low, high),
                    marks=[
                        {"value": place, "label": f"{place:g}"} for place in (low + q * (high - low) for q in _MARKS)
                    ],
                    updatemode="mouseup",
                    thumbLabel=label,
                ),
            ],
            className="control wide",
        )
        for name, (label, low, high, step) in ranges.items()
    ]


def _number(text: str | None, default: float, low: float, high: float) -> float:
    try:
        value = float(text) if text else default
    except ValueError:
        return default
    return value if low <= value <= high else default
