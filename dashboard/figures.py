"""Figures. Each function is pure: a view in, a plotly figure out; a view without numbers gives a figure that says why.

Texts that come from files are escaped, because plotly reads a part of HTML in labels.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go

from dashboard.texts import EMULATED, MISSING, format_ms, format_percent
from dashboard.theme import (
    INK_ON_DARK,
    INK_ON_LIGHT,
    SEQUENTIAL,
    VERMILLION,
    WARNING_ON_DARK,
    WARNING_ON_LIGHT,
    colour_of,
    template,
)
from dashboard.views import Comparison, ComparisonRow, LoadView, TermsView


def empty_figure(reason: str, *, dark: bool = False) -> go.Figure:
    """A figure without axes that says why there is nothing to see and what to do."""
    figure = go.Figure(layout={"template": template(dark), "height": 180})
    figure.update_xaxes(visible=False, fixedrange=True)
    figure.update_yaxes(visible=False, fixedrange=True)
    if reason:
        lines = "<br>".join(escape(line) for line in textwrap.wrap(reason, 48))
        figure.add_annotation(text=lines, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    return figure


def predicted_against_measured(view: Comparison, *, dark: bool = False) -> go.Figure:
    """TPOT per strategy: a predicted bar with its band, a measured bar, and the lower bound as a tick."""
    rows = [row for row in view.rows if row.tpot_ms is not None]
    if not rows:
        return empty_figure(view.empty or "No run here has decode tokens, so there is no time per token.", dark=dark)
    labels = [_wrapped(row.label) for row in rows]
    figure = _bars(height=140 + 56 * len(rows), dark=dark)
    figure.update_layout(barmode="group")
    figure.add_trace(_predicted_bars(rows, labels, dark))
    if any(row.measured_tpot_ms is not None for row in rows):
        figure.add_trace(_measured_bars(rows, labels))
    if any(row.bound_ms is not None for row in rows):
        figure.add_trace(_bound_ticks(rows, labels))
    figure.update_xaxes(title_text=time_title("time per output token (ms)", view.emulated, dark), rangemode="tozero")
    return figure


def tpot_terms(view: TermsView, *, dark: bool = False) -> go.Figure:
    """What the time per token is made of: one stacked bar per run, the same order as the comparison."""
    if view.parts_ms is None:
        return empty_figure(view.empty, dark=dark)
    figure = _bars(height=170 + 36 * len(view.labels), dark=dark)
    figure.update_layout(barmode="stack")
    for name, values in view.parts_ms.items():
        figure.add_trace(
            go.Bar(
                name=label_of(name),
                orientation="h",
                y=[_wrapped(label) for label in view.labels],
                x=list(values),
                marker_color=colour_of(name),
                hovertemplate="%{y}<br>%{fullData.name} %{x:.4g} ms<extra></extra>",
            )
        )
    figure.update_xaxes(title_text=time_title("time per output token (ms)", view.emulated, dark))
    return figure


def load_heat_map(view: LoadView, *, dark: bool = False) -> go.Figure:
    """Layer by expert, coloured by the share of tokens."""
    if view.shares is None:
        return empty_figure(view.empty, dark=dark)
    layers, experts = view.shares.shape
    figure = go.Figure(
        go.Heatmap(
            z=view.shares * 100,
            x=list(range(experts)),
            y=[str(layer) for layer in view.layer_ids],
            colorscale=SEQUENTIAL,
            zmin=0,
            xgap=1 if experts <= 64 else 0,
            ygap=1 if layers <= 32 else 0,
            colorbar={
                "title": {"text": "tokens (%)", "side": "right", "font": {"size": 13}},
                "thickness": 12,
                "len": 1.0,
            },
            hovertemplate="layer %{y}, expert %{x}<br>%{z:.2f} % of tokens<extra></extra>",
        ),
        layout={"template": template(dark), "height": min(560, max(240, 90 + 26 * layers)), "margin": {"t": 12}},
    )
    figure.update_xaxes(title_text="expert", showgrid=False)
    figure.update_yaxes(title_text="decoder layer", type="category", autorange="reversed", showgrid=False)
    return figure


def layer_load(view: LoadView, layer: int, *, dark: bool = False) -> go.Figure:
    """One layer of the heat map: experts from the busiest to the idlest, beside an even load.

    Args:
        view: loads of all layers.
        layer: MoE layer index, from 0; one beyond the model is moved into it.
    """
    if view.shares is None:
        return empty_figure(view.empty, dark=dark)
    layer = max(0, min(layer, len(view.shares) - 1))
    shares = view.shares[layer]
    order = np.argsort(-shares, kind="stable")
    figure = go.Figure(
        go.Bar(
            x=[str(expert) for expert in order.tolist()],
            y=shares[order] * 100,
            marker_color=colour_of("experts"),
            hovertemplate="expert %{x}<br>%{y:.2f} % of tokens<extra></extra>",
        ),
        layout={"template": template(dark), "height": 300, "margin": {"t": 28}},
    )
    figure.add_hline(
        y=view.uniform_share * 100,
        line={"dash": "dash", "color": VERMILLION, "width": 1.5},
        annotation={"text": f"even load, {format_percent(view.uniform_share)}", "font": {"size": 12}},
        annotation_position="top right",
    )
    figure.update_xaxes(title_text=f"expert of decoder layer {view.layer_ids[layer]}", type="category", showgrid=False)
    figure.update_yaxes(title_text="tokens (%)", rangemode="tozero")
    return figure


def _bars(height: int, dark: bool) -> go.Figure:
    """An empty figure for horizontal bars, the first one on top."""
    figure = go.Figure(layout={"template": template(dark), "height": height, "legend": {"traceorder": "normal"}})
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False, ticksuffix="  ")
    return figure


def time_title(title: str, emulated: bool, dark: bool) -> str:
    """The title of a time axis. It carries the label of an emulated link, so that no crop or export loses it."""
    colour = WARNING_ON_DARK if dark else WARNING_ON_LIGHT
    return f'{title}<br><span style="color:{colour}">{EMULATED}</span>' if emulated else title


def _predicted_bars(rows: Sequence[ComparisonRow], labels: Sequence[str], dark: bool) -> go.Bar:
    bars = go.Bar(
        name="predicted",
        orientation="h",
        y=list(labels),
        x=[row.predicted_tpot_ms for row in rows],
        marker_color=colour_of("predicted"),
        customdata=[_band_text(row) for row in rows],
        hovertemplate="%{y}<br>predicted %{x:.4g} ms %{customdata}<extra></extra>",
    )
    ends = [_band_ms(row) for row in rows]
    if any(end is not None for end in ends):
        ink = INK_ON_DARK if dark else INK_ON_LIGHT
        above = [end and end[1] - (row.predicted_tpot_ms or 0) for end, row in zip(ends, rows, strict=True)]
        below = [end and (row.predicted_tpot_ms or 0) - end[0] for end, row in zip(ends, rows, strict=True)]
        look = {"color": ink, "thickness": 2, "width": 6}
        bars.error_x = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, **look}
    return bars


def _measured_bars(rows: Sequence[ComparisonRow], labels: Sequence[str]) -> go.Bar:
    return go.Bar(
        name="measured",
        orientation="h",
        y=list(labels),
        x=[row.measured_tpot_ms for row in rows],
        marker_color=colour_of("measured"),
        customdata=[format_percent(row.error_ratio, signed=True) for row in rows],
        hovertemplate="%{y}<br>measured %{x:.4g} ms<br>prediction off by %{customdata}<extra></extra>",
    )


def _bound_ticks(rows: Sequence[ComparisonRow], labels: Sequence[str]) -> go.Scatter:
    return go.Scatter(
        name="lower bound",
        mode="markers",
        x=[row.bound_ms for row in rows],
        y=list(labels),
        marker={"symbol": "line-ns", "size": 26, "line": {"width": 3, "color": VERMILLION}, "color": VERMILLION},
        hovertemplate="%{y}<br>lower bound %{x:.4g} ms: the larger of compute<br>"
        "and of copies under perfect eviction<extra></extra>",
    )


def _band_ms(row: ComparisonRow) -> tuple[float, float] | None:
    """Lower and upper end of the band around the predicted time."""
    if row.band is None or row.predicted_tpot_ms is None:
        return None
    return row.band.low_ratio * row.predicted_tpot_ms, row.band.high_ratio * row.predicted_tpot_ms


def _band_text(row: ComparisonRow) -> str:
    ends = _band_ms(row)
    if ends is None or row.band is None:
        return "(no validated band)"
    return f"({format_ms(ends[0])} to {format_ms(ends[1])}: {row.band.text()})"


def label_of(text: str) -> str:
    """A text from a file as plotly may show it."""
    return escape(text) or MISSING


def _wrapped(text: str) -> str:
    """A long label on several lines, so that bars keep their room on a narrow screen."""
    return "<br>".join(escape(line) for line in textwrap.wrap(text, 20)) or MISSING
