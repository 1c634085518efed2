"""The figure of a tuning: its Pareto front of speed, device memory and quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from dashboard.figures import empty_figure
from dashboard.theme import BLUE, SEQUENTIAL, VERMILLION, template

_SPEEDS = {"ttft": "time to first token (ms)", "throughput": "time per output token, prompts included (ms)"}


def front_figure(front: Sequence[Mapping[str, Any]], objective: str = "tpot", *, dark: bool = False) -> go.Figure:
    """Speed over device memory of the points that nothing dominates; colour is quality where any point loses some.

    Args:
        front: the fields of `simulator.tune_front.FrontPoint`, as `tune --json` has them.
        objective: what was tuned for, which names the vertical axis.
        dark: for a dark page.
    """
    if not front:
        return empty_figure("Nothing was tuned yet.", dark=dark)
    figure = go.Figure(layout={"template": template(dark), "height": 420})
    points = sorted(front, key=lambda point: point["device_bytes"])
    divergence = [point["kl_nats"] for point in points]
    marker: dict[str, Any] = {"size": 10, "color": BLUE}
    if any(divergence):
        marker |= {"color": divergence, "colorscale": SEQUENTIAL, "colorbar": {"title": "KL (nats)"}}
    figure.add_trace(_points(points, "not dominated", marker))
    chosen = [point for point in points if point["is_chosen"]]
    if chosen:
        ring = {"size": 18, "color": VERMILLION, "symbol": "circle-open", "line": {"width": 3}}
        figure.add_trace(_points(chosen, "chosen", ring))
    figure.update_xaxes(title_text="device memory for experts (MiB)", rangemode="tozero")
    figure.update_yaxes(title_text=_SPEEDS.get(objective, "time per output token (ms)"), rangemode="tozero")
    return figure


def _points(points: Sequence[Mapping[str, Any]], name: str, marker: Mapping[str, Any]) -> go.Scatter:
    return go.Scatter(
        x=[point["device_bytes"] / 2**20 for point in points],
        y=[point["speed_ms"] for point in points],
        mode="markers",
        name=name,
        marker=marker,
        text=[escape(point["label"]) for point in points],
        customdata=[[100 * point["hit_rate"], point["kl_nats"]] for point in points],
        hovertemplate="%{text}<br>%{y:.3f} ms, %{x:,.1f} MiB<br>hit rate %{customdata[0]:.1f} %, "
        "KL %{customdata[1]:.4f} nats<extra></extra>",
    )
