"""Overview: everything a folder holds on one page."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, html

from dashboard import figures, parts, views
from dashboard.data import OTHER_NAMES, Snapshot, Workspace
from dashboard.summary import summary_cards
from dashboard.timeline_view import default_window, pass_ids, runs_with_spans, timeline

RUN, PASSES, PHASE, LAYER = "overview-run", "overview-passes", "overview-phase", "overview-layer"
"""Ids of the controls."""

_KEEP_IN_URL = """
(run, passes, phase, layer) => {
  const query = new URLSearchParams(window.location.search);
  const values = {run, from: passes && passes[0], to: passes && passes[1], phase, layer};
  for (const [key, value] of Object.entries(values)) {
    if (value === null || value === undefined) query.delete(key); else query.set(key, value);
  }
  window.history.replaceState(window.history.state, "", `${window.location.pathname}?${query}`);
  return "";
}
"""


def layout(snapshot: Snapshot, query: dict[str, str]) -> Any:
    """The page for a folder.

    Args:
        snapshot: what the folder holds.
        query: control values from the address: `run`, `from`, `to`, `phase`, `layer`.
    """
    comparison = views.compare(snapshot.runs)
    return dmc.Stack(
        [
            parts.problems(snapshot.problems),
            dmc.SimpleGrid([parts.card(card) for card in summary_cards(snapshot)], cols={"base": 1, "sm": 2, "lg": 4}),
            parts.section(
                "Predicted against measured",
                *[parts.note(text) for text in comparison.sentences],
                parts.graph("overview-comparison", "Predicted and measured time per token of each strategy"),
                parts.comparison_table(comparison, "overview-table"),
            ),
            _timeline_section(snapshot, query),
            dmc.SimpleGrid(
                [
                    dmc.Stack([_terms_section(snapshot), _files_section(snapshot)], gap="md"),
                    _routing_section(snapshot, query),
                ],
                cols={"base": 1, "lg": 2},
            ),
            html.Div(id="overview-url", hidden=True),
        ],
        gap="md",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Connect the controls. Every callback reads the folder through the cache of `workspace`."""

    def draw_comparison(scheme: str | None) -> tuple[Any, Any]:
        runs = workspace.read().runs
        dark = scheme == "dark"
        return (
            figures.predicted_against_measured(views.compare(runs), dark=dark),
            figures.tpot_terms(views.tpot_terms(runs), dark=dark),
        )

    def draw_load(phase: str, layer: str | None, scheme: str | None) -> tuple[Any, Any, str]:
        view = views.expert_load(workspace.read().trace, phase)
        dark = scheme == "dark"
        detail = figures.layer_load(view, _whole_number(layer, 0), dark=dark)
        return figures.load_heat_map(view, dark=dark), detail, view.sentence

    scheme = Input("scheme", "data")
    app.callback(Output("overview-comparison", "figure"), Output("overview-terms", "figure"), scheme)(draw_comparison)
    app.callback(
        Output("overview-load", "figure"),
        Output("overview-layer-load", "figure"),
        Output("overview-load-note", "children"),
        Input(PHASE, "value"),
        Input(LAYER, "value"),
        scheme,
    )(draw_load)
    _register_timeline(app, workspace)
    app.clientside_callback(
        _KEEP_IN_URL,
        Output("overview-url", "children"),
        Input(RUN, "value"),
        Input(PASSES, "value"),
        Input(PHASE, "value"),
        Input(LAYER, "value"),
        prevent_initial_call=True,
    )


def _register_timeline(app: Dash, workspace: Workspace) -> None:
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
        Output("overview-timeline", "figure"),
        Output("overview-timeline-note", "children"),
        Input(RUN, "value"),
        Input(PASSES, "value"),
        Input("scheme", "data"),
    )(draw_timeline)


def _terms_section(snapshot: Snapshot) -> Any:
    return parts.section(
        "What a token's time is made of",
        parts.note(views.tpot_terms(snapshot.runs).sentence),
        parts.graph("overview-terms", "Parts of the time per token of each run"),
    )


def _timeline_section(snapshot: Snapshot, query: dict[str, str]) -> Any:
    choices = [{"value": item.name, "label": views.run_title(item)} for item in runs_with_spans(snapshot.runs)]
    names = [choice["value"] for choice in choices]
    name = query.get("run") if query.get("run") in names else next(iter(names), None)
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
    return parts.section(
        "Timeline",
        dmc.Group([run_select, passes], className="controls", align="flex-start"),
        parts.graph("overview-timeline", "What link, device, CPU and host did over time"),
        parts.note("", "overview-timeline-note"),
    )


def _routing_section(snapshot: Snapshot, query: dict[str, str]) -> Any:
    layer_ids = snapshot.trace.shape.moe_layer_ids if snapshot.trace is not None else ()
    layer = _whole_number(query.get("layer"), 0)
    phase = query.get("phase", views.PHASES[0])
    phase_control = dmc.SegmentedControl(
        id=PHASE,
        data=[{"value": name, "label": name} for name in views.PHASES],
        value=phase if phase in views.PHASES else views.PHASES[0],
        size="xs",
        **{"aria-label": "Phase of the tokens"},
    )
    layer_select = dmc.Select(
        id=LAYER,
        label="One layer in detail",
        data=[{"value": str(place), "label": f"layer {layer_id}"} for place, layer_id in enumerate(layer_ids)],
        value=str(layer if layer < len(layer_ids) else 0) if layer_ids else None,
        allowDeselect=False,
        disabled=not layer_ids,
        className="control",
    )
    return parts.section(
        "Which experts the tokens went to",
        parts.note("", "overview-load-note"),
        parts.graph("overview-load", "Heat map of layer by expert: share of tokens"),
        layer_select,
        parts.graph("overview-layer-load", "Share of tokens of each expert of one layer"),
        controls=phase_control,
    )


def _files_section(snapshot: Snapshot) -> Any:
    """The tuned configuration, and what else lies in the folder."""
    tuned = html.Pre(html.Code(snapshot.tuned), tabIndex=0) if snapshot.tuned else parts.note(views.NO_TUNED)
    uses = dict(zip(OTHER_NAMES, ("open it in any browser", "open it in ui.perfetto.dev"), strict=True))
    others = [parts.note(f"{snapshot.folder / name}: {uses[name]}") for name in snapshot.other_files]
    return parts.section("Tuned configuration", tuned, *others)


def _slider(snapshot: Snapshot, name: str | None, query: dict[str, str]) -> tuple[int, list[int], bool]:
    """Last place, chosen window and whether there is nothing to choose, of the pass slider."""
    item = snapshot.run(name)
    if item is None:
        return 1, [0, 0], True
    last = max(0, len(pass_ids(item.run)) - 1)
    first_default, last_default = default_window(item.run)
    first = min(last, _whole_number(query.get("from"), first_default))
    end = min(last, max(first, _whole_number(query.get("to"), last_default)))
    return max(1, last), [first, end], last == 0


def _whole_number(text: str | None, default: int) -> int:
    """The number in an address; the default where there is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else default
