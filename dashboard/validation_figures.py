"""Figures of the validation page. Each function is pure: a view in, a plotly figure out."""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go

from dashboard.figures import empty_figure, label_of, time_title
from dashboard.theme import (
    BLUE,
    GREEN,
    GREY,
    INK_ON_DARK,
    INK_ON_LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    template,
)
from dashboard.validation_view import PairRow, ValidationView

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY, YELLOW, GREY)
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x", "hexagon")


def scatter(view: ValidationView, *, dark: bool = False) -> go.Figure:
    """Measured over predicted time per token on equal logarithmic axes, with the line of equality and the band. Where
    only errors are known: the share of pairs that are off by no more than so much."""
    if not view.pairs:
        return empty_figure(view.empty, dark=dark)
    if view.is_relative:
        return _cumulative(view, dark)
    figure = go.Figure(layout={"template": template(dark), "height": 460})
    times = [time for row in view.pairs for time in (row.predicted_ms, row.measured_ms)]
    ends = np.array([min(times) / 1.3, max(times) * 1.3])
    band = view.overall
    figure.add_trace(
        go.Scatter(
            name=f"band of nine in ten, n = {band.num_pairs}",
            x=[*ends, *ends[::-1]],
            y=[*(ends * band.high_ratio), *(ends[::-1] * band.low_ratio)],
            mode="lines",
            fill="toself",
            fillcolor="rgba(86,180,233,0.22)",
            line={"width": 0},
            hoverinfo="skip",
        )
    )
    ink = INK_ON_DARK if dark else INK_ON_LIGHT
    equal = go.Scatter(name="predicted = measured", x=ends, y=ends, mode="lines", line={"color": ink, "dash": "dash"})
    figure.add_trace(equal.update(hoverinfo="skip"))
    for name, rows, colour, symbol in _by_family(view):
        figure.add_trace(
            go.Scatter(
                name=name,
                x=[row.predicted_ms for row in rows],
                y=[row.measured_ms for row in rows],
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 10, "line": {"width": 1, "color": ink}},
                hovertext=[label_of(row.id) for row in rows],
                customdata=[100 * row.error_ratio for row in rows],
                hovertemplate="%{hovertext}<br>predicted %{x:.4g} ms, measured %{y:.4g} ms<br>"
                "error %{customdata:+.1f} %<extra></extra>",
            )
        )
    title = time_title("predicted time per output token (ms)", view.emulated, dark)
    figure.update_xaxes(title_text=title, type="log", range=np.log10(ends).tolist())
    figure.update_yaxes(title_text="measured (ms)", type="log", range=np.log10(ends).tolist())
    return figure


def errors(view: ValidationView, *, dark: bool = False) -> go.Figure:
    """Predicted over measured of every pair on a logarithmic axis, by strategy family, where twice too fast and twice
    too slow lie equally far from 1; bars show the band."""
    if not view.pairs:
        return empty_figure(view.empty, dark=dark)
    bands = {row.family: row for row in view.families}
    groups = _by_family(view)
    figure = go.Figure(layout={"template": template(dark), "height": 150 + 44 * len(groups), "showlegend": False})
    for name, rows, colour, symbol in groups:
        band = bands[rows[0].family]
        low, high = 1 / band.high_ratio, 1 / band.low_ratio
        label = f"{name} ({len(rows)})"
        figure.add_trace(
            go.Bar(
                y=[label],
                x=[high - low],
                base=[low],
                orientation="h",
                width=0.7,
                marker={"color": "rgba(86,180,233,0.3)"},
                hovertemplate=f"band {low:.2f} to {high:.2f}<extra></extra>",
            )
        )
        figure.add_trace(
            go.Scatter(
                y=[label] * len(rows),
                x=[row.error_ratio + 1 for row in rows],
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 8, "opacity": 0.85},
                hovertext=[label_of(row.id) for row in rows],
                customdata=[100 * row.error_ratio for row in rows],
                hovertemplate="%{hovertext}<br>predicted is %{x:.3g} times measured, error %{customdata:+.1f} %"
                "<extra></extra>",
            )
        )
    ink = INK_ON_DARK if dark else INK_ON_LIGHT
    figure.add_vline(x=1, line={"color": ink, "dash": "dash", "width": 1})
    title = time_title("predicted over measured (times)", view.emulated, dark)
    ratios = [row.error_ratio + 1 for row in view.pairs] + [1 / row.high_ratio for row in view.families]
    ratios += [1 / row.low_ratio for row in view.families]
    ends = [math.log10(min(ratios)) - 0.03, math.log10(max(ratios)) + 0.03]
    figure.update_xaxes(title_text=title, zeroline=False, type="log", range=ends)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False, ticksuffix="  ")
    return figure


def _cumulative(view: ValidationView, dark: bool) -> go.Figure:
    figure = go.Figure(layout={"template": template(dark), "height": 460})
    everything = ("all", list(view.pairs), INK_ON_DARK if dark else INK_ON_LIGHT, "")
    for name, rows, colour, _ in [everything, *_by_family(view)]:
        off = sorted(100 * math.expm1(abs(math.log1p(row.error_ratio))) for row in rows)
        figure.add_trace(
            go.Scatter(
                name=f"{name} ({len(rows)})",
                x=off,
                y=[100 * (place + 1) / len(off) for place in range(len(off))],
                mode="lines",
                line={"shape": "hv", "color": colour, "width": 3 if name == "all" else 1.5},
                hovertemplate="%{y:.0f} % of pairs are off by at most %{x:.1f} %<extra>%{fullData.name}</extra>",
            )
        )
    figure.update_xaxes(title_text="off by at most (%)", type="log", range=[0, None])
    figure.update_yaxes(title_text="pairs (%)", range=[0, 101])
    return figure


def _by_family(view: ValidationView) -> list[tuple[str, list[PairRow], str, str]]:
    """(family, its pairs, colour, symbol) in order of appearance."""
    families = list(dict.fromkeys(row.family for row in view.pairs))
    return [
        (
            "all strategies" if family == "any" else family.replace("_", " "),
            [row for row in view.pairs if row.family == family],
            _COLOURS[place % len(_COLOURS)],
            _SYMBOLS[place % len(_SYMBOLS)],
        )
        for place, family in enumerate(families)
    ]
