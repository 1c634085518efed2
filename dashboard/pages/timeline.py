"""Timeline: what link, device, CPU and host did in a window of tokens, simulated and live under each other."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html

from dashboard import parts, timeline_figure, views
from dashboard.address import Query, address_sink, keep_in_address, number_pair, one_of
from dashboard.data import NamedRun, Snapshot, Workspace
from dashboard.timeline_view import counterpart, default_window, pass_ids, runs_with_spans, timeline

RUN, BELOW, PASSES = "timeline-run", "timeline-below", "timeline-passes"
ZOOM, LENGTH, GRAPH = "timeline-zoom", "timeline-length", "timeline-figure"
COUNTERPART, NOTHING = "counterpart", "nothing"
"""What may be shown below, beside the name of a run."""
BUTTONS = (("in", "Zoom in"), ("out", "Zoom out"), ("earlier", "Earlier"), ("later", "Later"), ("all", "Whole window"))


def layout(snapshot: Snapshot, query: Query) -> Any:
    """The page for the runs that the address names: `run`, `below`, `passes`, and `zoom` in ms from the window's
    begin."""
    zoom = number_pair(query.get("zoom"))
    buttons = [dmc.Button(text, id=f"{ZOOM}-{name}", variant="default", size="xs") for name, text in BUTTONS]
    return dmc.Stack(
        [
            address_sink("timeline"),
            dcc.Store(id=ZOOM, data=list(zoom or ())),
            dcc.Store(id=LENGTH),
            parts.problems(snapshot.problems),
            parts.section(
                "What link, device, CPU and host did",
                _controls(snapshot, query),
                dmc.Group(buttons, gap="xs"),
                parts.graph(GRAPH, "What link, device, CPU and host did over time", zoomable=True),
                html.Div(id="timeline-note", className="note"),
            ),
        ],
        gap="md",
    )


def _controls(snapshot: Snapshot, query: Query) -> Any:
    """Which runs, and which of their passes."""
    choices = [{"value": item.name, "label": views.run_title(item)} for item in runs_with_spans(snapshot.runs)]
    names = [choice["value"] for choice in choices]
    name = one_of(query.get("run"), names)
    below = one_of(query.get("below"), [COUNTERPART, NOTHING, *names])
    below_choices = [
        {"value": COUNTERPART, "label": "its counterpart (predicted or measured)"},
        {"value": NOTHING, "label": "nothing"},
        *choices,
    ]
    shared = {"allowDeselect": False, "disabled": not choices, "className": "control"}
    last, window, disabled = _slider(snapshot.run(name), query)
    thumbs = ("First pass", "Last pass")
    return dmc.Group(
        [
            dmc.Select(id=RUN, label="Run", data=choices, value=name, placeholder="no run with a timeline", **shared),
            dmc.Select(id=BELOW, label="Below it", data=below_choices, value=below, **shared),
            parts.range_slider(PASSES, "Passes (first and last)", last, window, thumbs, disabled=disabled),
        ],
        className="controls",
        align="flex-start",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Connect pickers, slider and zoom. What is drawn is made anew for each zoom, so that it stays small."""

    def fit_passes(name: str | None) -> tuple[int, list[int], bool]:
        return _slider(workspace.read().run(name), {})

    def draw(
        name: str | None, below: str | None, passes: list[int], zoom: list[float] | None, scheme: str | None
    ) -> tuple[Any, list[Any], float]:
        snapshot = workspace.read()
        chosen = [snapshot.run(name), _below(snapshot, name, below)]
        zoom_ms = (zoom[0], zoom[1]) if zoom else None
        shown = [timeline(item, passes[0], passes[1], zoom_ms) for item in chosen if item is not None]
        shown = shown or [timeline(None, 0, 0)]
        notes = [parts.note(f"{view.title}. {view.sentence or view.empty}") for view in shown if view.title]
        length_ms = max(view.length_ms for view in shown)
        return timeline_figure.timeline(*shown, dark=scheme == "dark"), notes, length_ms

    app.callback(
        Output(PASSES, "max"),
        Output(PASSES, "value"),
        Output(PASSES, "disabled"),
        Input(RUN, "value"),
        prevent_initial_call=True,
    )(fit_passes)
    app.callback(
        Output(GRAPH, "figure"),
        Output("timeline-note", "children"),
        Output(LENGTH, "data"),
        Input(RUN, "value"),
        Input(BELOW, "value"),
        Input(PASSES, "value"),
        Input(ZOOM, "data"),
        Input("scheme", "data"),
    )(draw)
    _register_zoom(app)
    keep_in_address(
        app,
        "timeline",
        {
            "run": (RUN, "value"),
            "below": (BELOW, "value"),
            "passes": (PASSES, "value"),
            "zoom": (ZOOM, "data"),
        },
    )


def _register_zoom(app: Dash) -> None:
    """A range drawn with the mouse, and the buttons, which the keyboard reaches."""
    app.clientside_callback(
        ClientsideFunction("studio", "zoom"),
        Output(ZOOM, "data"),
        Input(GRAPH, "relayoutData"),
        *[Input(f"{ZOOM}-{name}", "n_clicks") for name, _ in BUTTONS],
        Input(RUN, "value"),
        Input(PASSES, "value"),
        State(ZOOM, "data"),
        State(LENGTH, "data"),
        prevent_initial_call=True,
    )


def _below(snapshot: Snapshot, name: str | None, below: str | None) -> NamedRun | None:
    """The second run, unless it is the first one."""
    if below == NOTHING:
        return None
    if below == COUNTERPART:
        return counterpart(snapshot.run(name), snapshot.runs)
    return snapshot.run(below) if below != name else None


def _slider(item: NamedRun | None, query: Query) -> tuple[int, list[int], bool]:
    """Last place, chosen window and whether there is nothing to choose, of the pass slider."""
    if item is None:
        return 1, [0, 0], True
    last = max(0, len(pass_ids(item)) - 1)
    first, end = number_pair(query.get("passes"), allow_equal=True) or default_window(item)
    first = min(last, max(0, int(first)))
    return max(1, last), [first, min(last, max(first, int(end)))], last == 0
