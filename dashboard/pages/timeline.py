"""Timeline: what link, device, CPU and host did in a window of tokens."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, html

from dashboard import figures, parts, views
from dashboard.address import Query, address_sink, keep_in_address, one_of, whole_number
from dashboard.data import Snapshot, Workspace
from dashboard.timeline_view import default_window, pass_ids, runs_with_spans, timeline

RUN, PASSES = "timeline-run", "timeline-passes"


def layout(snapshot: Snapshot, query: Query) -> Any:
    """The page for the run that the address names: `run`, `passes`."""
    choices = [{"value": item.name, "label": views.run_title(item)} for item in runs_with_spans(snapshot.runs)]
    name = one_of(query.get("run"), [choice["value"] for choice in choices])
    last, window, disabled = _slider(snapshot, name, query)
    run_select = dmc.Select(
        id=RUN,
        label="Run",
        data=choices,
        value=name,
        allowDeselect=False,
        disabled=not choices,
        placeholder="no run with a timeline",
        className="control",
    )
    slider = dmc.RangeSlider(
        id=PASSES,
        min=0,
        max=last,
        minRange=0,
        step=1,
        value=window,
        disabled=disabled,
        thumbFromLabel="First pass",
        thumbToLabel="Last pass",
    )
    passes = html.Div([dmc.Text("Passes (first and last)", size="sm", fw=500), slider], className="control wide")
    return dmc.Stack(
        [
            address_sink("timeline"),
            parts.problems(snapshot.problems),
            parts.section(
                "Timeline",
                dmc.Group([run_select, passes], className="controls", align="flex-start"),
                parts.graph("timeline-figure", "What link, device, CPU and host did over time"),
                parts.note("", "timeline-note"),
            ),
        ],
        gap="md",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Connect the run picker and the pass slider to the timeline."""

    def fit_passes(name: str | None) -> tuple[int, list[int], bool]:
        return _slider(workspace.read(), name, {})

    def draw_timeline(name: str | None, passes: list[int], scheme: str | None) -> tuple[Any, str]:
        view = timeline(workspace.read().run(name), passes[0], passes[1])
        return figures.timeline(view, dark=scheme == "dark"), view.sentence

    app.callback(
        Output(PASSES, "max"),
        Output(PASSES, "value"),
        Output(PASSES, "disabled"),
        Input(RUN, "value"),
        prevent_initial_call=True,
    )(fit_passes)
    app.callback(
        Output("timeline-figure", "figure"),
        Output("timeline-note", "children"),
        Input(RUN, "value"),
        Input(PASSES, "value"),
        Input("scheme", "data"),
    )(draw_timeline)
    keep_in_address(app, "timeline", {"run": (RUN, "value"), "passes": (PASSES, "value")})


def _slider(snapshot: Snapshot, name: str | None, query: Query) -> tuple[int, list[int], bool]:
    """Last place, chosen window and whether there is nothing to choose, of the pass slider."""
    item = snapshot.run(name)
    if item is None:
        return 1, [0, 0], True
    last = max(0, len(pass_ids(item.run)) - 1)
    defaults = default_window(item.run)
    named = [whole_number(part, -1) for part in query.get("passes", "").split(",")]
    first, end = named if len(named) == 2 and min(named) >= 0 else defaults
    first = min(last, first)
    return max(1, last), [first, min(last, max(first, end))], last == 0
