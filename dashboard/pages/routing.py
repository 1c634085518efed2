"""Routing: which experts the tokens went to."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output

from dashboard import figures, parts, views
from dashboard.address import Query, address_sink, keep_in_address, one_of, whole_number
from dashboard.data import Snapshot, Workspace

TRACE, PHASE, LAYER = "routing-trace", "routing-phase", "routing-layer"


def layout(snapshot: Snapshot, query: Query) -> Any:
    """The page for the trace that the address names: `trace`, `phase`, `layer`."""
    chosen = snapshot.named_trace(query.get("trace"))
    layer_ids = chosen.trace.shape.moe_layer_ids if chosen is not None else ()
    layer = whole_number(query.get("layer"), 0)
    phase_control = dmc.SegmentedControl(
        id=PHASE,
        data=[{"value": name, "label": name} for name in views.PHASES],
        value=one_of(query.get("phase"), views.PHASES),
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
    return dmc.Stack(
        [
            address_sink("routing"),
            parts.problems(snapshot.problems),
            parts.trace_select(TRACE, snapshot, query),
            parts.section(
                "Which experts the tokens went to",
                parts.note("", "routing-load-note"),
                parts.graph("routing-load", "Heat map of layer by expert: share of tokens"),
                layer_select,
                parts.graph("routing-layer-load", "Share of tokens of each expert of one layer"),
                controls=phase_control,
            ),
        ],
        gap="md",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Connect the controls."""

    def draw_load(name: str | None, phase: str, layer: str | None, scheme: str | None) -> tuple[Any, Any, str]:
        chosen = workspace.read().named_trace(name)
        view = views.expert_load(chosen.trace if chosen is not None else None, phase)
        dark = scheme == "dark"
        detail = figures.layer_load(view, whole_number(layer, 0), dark=dark)
        return figures.load_heat_map(view, dark=dark), detail, view.sentence

    app.callback(
        Output("routing-load", "figure"),
        Output("routing-layer-load", "figure"),
        Output("routing-load-note", "children"),
        Input(TRACE, "value"),
        Input(PHASE, "value"),
        Input(LAYER, "value"),
        Input("scheme", "data"),
    )(draw_load)
    keep_in_address(app, "routing", {"trace": (TRACE, "value"), "phase": (PHASE, "value"), "layer": (LAYER, "value")})
