"""Figures of a tuned configuration by layer. Each function is pure: a layer map in, a plotly figure out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from dashboard.figures import empty_figure
from dashboard.texts import format_bytes
from dashboard.theme import BLUE, GREY, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, template
from dashboard.tune_view import MODES, NATIVE, ON_CPU

_COLOURS = {NATIVE: GREY, "hint": SKY, "verify": BLUE, "commit": VERMILLION, ON_CPU: YELLOW}
_PATTERNS = {NATIVE: "", "hint": "", "verify": "/", "commit": "x", ON_CPU: "."}


def slots_figure(layers: Mapping[str, Any], *, dark: bool = False) -> go.Figure:
    """Expert slots of each layer, beside those of an even split.

    Args:
        layers: of `dashboard.tune_view.layer_map`.
        dark: for a dark page.
    """
    if layers["slots"] is None:
        size = format_bytes(layers["pool_bytes"])
        return empty_figure(f"All layers share one pool of {size}, so that no layer has slots of its own.", dark=dark)
    names = [str(layer) for layer in layers["ids"]]
    figure = go.Figure(
        [
            go.Bar(
                name="chosen",
                x=names,
                y=layers["slots"],
                marker_color=PURPLE,
                hovertemplate="layer %{x}: %{y} slots<extra></extra>",
            ),
            go.Scatter(
                name="even split",
                x=names,
                y=layers["even"],
                mode="markers",
                marker={"symbol": "line-ew", "size": 12, "line": {"width": 3, "color": ORANGE}, "color": ORANGE},
                hovertemplate="layer %{x}: %{y} slots if split evenly<extra></extra>",
            ),
        ],
        layout={"template": template(dark), "height": 300},
    )
    figure.update_xaxes(title_text="decoder layer", type="category", showgrid=False)
    figure.update_yaxes(title_text=f"slots (of {layers['experts']} experts)", rangemode="tozero")
    return figure


def modes_figure(layers: Mapping[str, Any], *, dark: bool = False) -> go.Figure:
    """What each layer does with predictions of its experts, or that the CPU runs it: a coloured cell per layer.

    Args:
        layers: of `dashboard.tune_view.layer_map`.
        dark: for a dark page.
    """
    figure = go.Figure(layout={"template": template(dark), "height": 150, "barmode": "stack", "bargap": 0.08})
    pairs = list(zip(layers["ids"], layers["modes"], strict=True))
    for mode in MODES:
        names = [str(layer) for layer, own in pairs if own == mode]
        if names:
            figure.add_trace(
                go.Bar(
                    name=mode,
                    x=names,
                    y=[1] * len(names),
                    marker={"color": _COLOURS[mode], "pattern": {"shape": _PATTERNS[mode]}},
                    hovertemplate=f"layer %{{x}}: {mode}<extra></extra>",
                )
            )
    order = [str(layer) for layer, _ in pairs]
    figure.update_xaxes(
        title_text="decoder layer", type="category", categoryorder="array", categoryarray=order, showgrid=False
    )
    figure.update_yaxes(visible=False, fixedrange=True)
    figure.update_layout(showlegend=True)
    return figure
