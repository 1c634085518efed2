"""Figures of what-if sweeps: time per token over one swept setting, a line per combination of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from dashboard.figures import empty_figure
from dashboard.theme import template

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")
_MAX_LINES = 12


def sweep_figure(rows: Sequence[Mapping[str, Any]], swept: Sequence[str], *, dark: bool = False) -> go.Figure:
    """Time per output token of every possible point, with its band and bound.

    Args:
        rows: swept values and answers, as `simulator.sweep.Point` has them.
        swept: names of the settings that vary; the last one is the horizontal axis, the others tell lines apart.
        dark: for a dark page.
    """
    possible = [row for row in rows if row.get("tpot_ms") is not None]
    if not possible:
        why = next((str(row["error"]) for row in rows if row.get("error")), "Nothing was simulated.")
        return empty_figure(f"No point of this sweep is possible. {why}", dark=dark)
    across = swept[-1] if swept else "scenario"
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in possible:
        name = ", ".join(f"{other} {row[other]}" for other in swept[:-1]) or "time per token"
        lines.setdefault(name, []).append(row)
    figure = go.Figure(layout={"template": template(dark), "height": 420})
    for number, (name, members) in enumerate(list(lines.items())[:_MAX_LINES]):
        _add_line(figure, name, members, across, number)
    order = list(dict.fromkeys(str(row.get(across, "now")) for row in rows))
    figure.update_xaxes(title_text=escape(across), type="category", categoryorder="array", categoryarray=order)
    emulated = " (emulated device)" if any(row.get("emulated") for row in possible) else ""
    figure.update_yaxes(title_text=f"time per output token (ms){emulated}", rangemode="tozero")
    return figure


def _add_line(figure: go.Figure, name: str, rows: Sequence[Mapping[str, Any]], across: str, number: int) -> None:
    places = [str(row.get(across, "now")) for row in rows]
    values = [row["tpot_ms"] for row in rows]
    has_band = all(row.get("tpot_high_ms") is not None for row in rows)
    band = {
        "type": "data",
        "array": [row["tpot_high_ms"] - row["tpot_ms"] for row in rows] if has_band else [],
        "arrayminus": [row["tpot_ms"] - row["tpot_low_ms"] for row in rows] if has_band else [],
        "visible": has_band,
        "thickness": 1,
    }
    figure.add_trace(
        go.Scatter(
            x=places,
            y=values,
            name=escape(name),
            mode="lines+markers",
            error_y=band,
            line={"dash": _DASHES[number % len(_DASHES)]},
            marker={"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 9},
            text=[escape(str(row.get("what_limits", ""))) for row in rows],
            hovertemplate="%{x}: %{y:.2f} ms per token<br>%{text}<extra></extra>",
        )
    )
    bounds = [row.get("bound_ms") for row in rows]
    if any(bound is not None for bound in bounds):
        ticks = {"symbol": "line-ew-open", "size": 16, "line": {"width": 2}}
        figure.add_trace(
            go.Scatter(x=places, y=bounds, mode="markers", name="lower bound", marker=ticks, showlegend=number == 0)
        )
