"""Figures of the routing page. Each function is pure: a view in, a plotly figure out."""

from __future__ import annotations

from html import escape

import numpy as np
import plotly.graph_objects as go

from dashboard.figures import empty_figure
from dashboard.routing_view import LayersView, PairsView, ReuseView, StripView
from dashboard.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, SEQUENTIAL, SKY, VERMILLION, template

_DASHES = ("solid", "dash", "dot", "dashdot")
_MARKERS = ("circle", "square", "diamond", "cross")


def strip(view: StripView, *, dark: bool = False) -> go.Figure:
    """Expert over token: which experts one layer used, one column per token or per few of them."""
    if view.shares is None:
        return empty_figure(view.empty, dark=dark)
    experts, columns = view.shares.shape
    figure = go.Figure(
        go.Heatmap(
            z=view.shares * 100,
            x=(view.first + view.tokens_per_column * np.arange(columns)).tolist(),
            y=list(range(experts)),
            colorscale=SEQUENTIAL,
            zmin=0,
            zmax=100,
            colorbar=_colour_bar("tokens that<br>used it (%)"),
            hovertemplate="from token %{x}<br>expert %{y}: %{z:.0f} % of tokens<extra></extra>",
        ),
        layout={"template": template(dark), "height": min(460, max(260, 90 + 5 * experts)), "margin": {"t": 12}},
    )
    figure.update_xaxes(title_text="token of the trace", showgrid=False)
    figure.update_yaxes(title_text=f"expert of decoder layer {view.layer_id}", autorange="reversed", showgrid=False)
    return figure


def entropy(view: LayersView, *, dark: bool = False) -> go.Figure:
    """How even the load of each layer is, and how much neighbouring tokens share."""
    if view.entropy_ratio is None or view.overlap is None:
        return empty_figure(view.empty, dark=dark)
    lines = {"entropy of the load, of an even one": view.entropy_ratio, "shared with the token before": view.overlap}
    return _over_layers(view.layer_ids, lines, "share (%)", (BLUE, ORANGE), dark)


def predictability(view: LayersView, *, dark: bool = False) -> go.Figure:
    """Share of the true experts that each captured predictor named, per layer, beside what repeating the token before
    would name."""
    if view.overlap is None:
        return empty_figure(view.empty, dark=dark)
    if not view.recall:
        return empty_figure(view.recall_sentence, dark=dark)
    lines = {**view.recall, "repeating the token before": view.overlap}
    colours = (GREEN, BLUE, PURPLE, SKY)[: len(view.recall)] + (GREY,) * (len(lines) - min(4, len(view.recall)))
    return _over_layers(view.layer_ids, lines, "true experts named (%)", colours, dark)


def reuse(view: ReuseView, *, dark: bool = False) -> go.Figure:
    """How many other experts are asked for until one is asked for again."""
    if view.distances is None:
        return empty_figure(view.empty, dark=dark)
    share = 100 / max(1, view.num_lookups)
    figure = go.Figure(
        [
            go.Bar(
                name="asked for again",
                x=list(range(len(view.distances))),
                y=view.distances * share,
                marker_color=BLUE,
                hovertemplate="%{x} others in between<br>%{y:.2f} % of look-ups<extra></extra>",
            ),
            go.Bar(
                name="first time",
                x=[len(view.distances)],
                y=[view.first_lookups * share],
                marker_color=VERMILLION,
                hovertemplate="first time<br>%{y:.2f} % of look-ups<extra></extra>",
            ),
        ],
        layout={"template": template(dark), "height": 300, "bargap": 0.05},
    )
    title = f"other experts of decoder layer {view.layer_id} asked for in between"
    figure.update_xaxes(title_text=title, showgrid=False)
    figure.update_yaxes(title_text="look-ups (%)", rangemode="tozero")
    return figure


def hit_curves(view: ReuseView, *, dark: bool = False) -> go.Figure:
    """Hit rate of a layer's own cache over its slots: LRU, and perfect eviction, which nothing beats."""
    if view.lru_hits is None or view.perfect_hits is None:
        return empty_figure(view.empty, dark=dark)
    perfect = ("perfect eviction (Belady)", view.perfect_hits, VERMILLION, "dash")
    lines = (perfect, ("LRU", view.lru_hits, BLUE, "solid"))
    figure = go.Figure(layout={"template": template(dark), "height": 320, "hovermode": "x unified"})
    for name, rates, colour, dash in lines:
        figure.add_trace(
            go.Scatter(
                name=name,
                x=list(range(len(rates))),
                y=rates * 100,
                mode="lines",
                line={"color": colour, "dash": dash, "width": 2.5},
                hovertemplate="%{y:.1f} %",
            )
        )
    figure.update_xaxes(title_text=f"slots of decoder layer {view.layer_id} (experts)", rangemode="tozero")
    figure.update_yaxes(title_text="hit rate of all look-ups (%)", range=[0, 100])
    return figure


def pairs(view: PairsView, *, dark: bool = False) -> go.Figure:
    """Expert by expert: share of tokens that used both."""
    if view.shares is None or view.lift is None:
        return empty_figure(view.empty, dark=dark)
    figure = go.Figure(
        go.Heatmap(
            z=view.shares * 100,
            customdata=view.lift,
            colorscale=SEQUENTIAL,
            zmin=0,
            colorbar=_colour_bar("tokens that<br>used both (%)"),
            hoverongaps=False,
            hovertemplate="experts %{x} and %{y}<br>%{z:.2f} % of tokens, "
            "%{customdata:.2f} times as often as independently<extra></extra>",
        ),
        layout={"template": template(dark), "height": 420, "margin": {"t": 12}},
    )
    figure.update_xaxes(title_text=f"expert of decoder layer {view.layer_id}", showgrid=False)
    figure.update_yaxes(title_text="expert", autorange="reversed", showgrid=False)
    return figure


def _over_layers(
    layer_ids: tuple[int, ...], lines: dict[str, np.ndarray], title: str, colours: tuple[str, ...], dark: bool
) -> go.Figure:
    figure = go.Figure(layout={"template": template(dark), "height": 300, "hovermode": "x unified"})
    for place, (name, values) in enumerate(lines.items()):
        figure.add_trace(
            go.Scatter(
                name=escape(name),
                x=[str(layer) for layer in layer_ids],
                y=values * 100,
                mode="lines+markers",
                line={"color": colours[place], "dash": _DASHES[place % len(_DASHES)]},
                marker={"symbol": _MARKERS[place % len(_MARKERS)], "size": 7},
                hovertemplate="%{y:.1f} %",
            )
        )
    figure.update_xaxes(title_text="decoder layer", type="category", showgrid=False)
    figure.update_yaxes(title_text=title, range=[0, 102])
    return figure


def _colour_bar(title: str) -> dict[str, object]:
    return {"title": {"text": title, "side": "right", "font": {"size": 13}}, "thickness": 12, "len": 1.0}
