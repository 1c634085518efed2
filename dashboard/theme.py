"""One look for all figures: Okabe-Ito colours by concept, one template in light and dark."""

from __future__ import annotations

import plotly.graph_objects as go

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
"""Okabe and Ito's colours, which people with any common colour blindness can tell apart; grey in black's place."""
BROWN = "#6B4A1F"
"""Of a ninth thing beside these; darker than all of them."""

CONCEPT_COLOURS = {
    "predicted": SKY,
    "measured": ORANGE,
    "dense": BLUE,
    "experts": GREEN,
    "cpu_experts": YELLOW,
    "stall": VERMILLION,
    "demand load": ORANGE,
    "issue": ORANGE,
    "prefetch load": SKY,
    "predict": SKY,
    "utility load": PURPLE,
    "drafting": PURPLE,
    "decide": BROWN,
    "overhead": GREY,
    "unexplained": "#444444",
}
WARNING_ON_LIGHT, WARNING_ON_DARK = "#9c4400", "#ffb27a"
"""Vermillion, dark or light enough to be read as text."""
INK_ON_LIGHT, INK_ON_DARK = "#1f2933", "#d5d9e0"
SEQUENTIAL = "Cividis"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def colour_of(concept: str) -> str:
    """The colour that stands for a concept in every figure; grey for one that has none yet."""
    return CONCEPT_COLOURS.get(concept, GREY)


def template(dark: bool = False) -> go.layout.Template:
    """Fonts, grid and spacing of all figures; transparent, so that they lie on the page's own background."""
    text, grid = (INK_ON_DARK, "#3a404b") if dark else (INK_ON_LIGHT, "#dde2e8")
    axis = {
        "gridcolor": grid,
        "linecolor": grid,
        "zerolinecolor": grid,
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 13}},
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 13, "color": text},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": [BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, GREY],
            "xaxis": axis,
            "yaxis": axis,
            "margin": {"l": 8, "r": 12, "t": 40, "b": 8},
            "legend": {
                "orientation": "h",
                "yanchor": "bottom",
                "y": 1.0,
                "xanchor": "left",
                "x": 0.0,
                "font": {"size": 12},
            },
            "hoverlabel": {"font": {"family": FONT, "size": 13}, "align": "left"},
            "bargap": 0.25,
        }
    )
