"""Figures of what-if questions: a sweep over one setting, and set-ups side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from dashboard.figures import empty_figure
from dashboard.theme import INK_ON_DARK, INK_ON_LIGHT, colour_of, template
from dashboard.whatif_view import SetupRow
from simulator.critical_path import TEXT_OF_PART

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


def setups_figure(rows: Sequence[SetupRow], *, dark: bool = False) -> go.Figure:
    """Set-ups side by side: bars of the critical path's parts, which add up to the time per token; band and bound."""
    possible = [row for row in rows if row.tpot_ms is not None]
    if not possible:
        why = rows[0].sentence if rows else "There is no trace to simulate; drop one on the Overview page."
        return empty_figure(why, dark=dark)
    labels = ["<br>".join(escape(line) for line in textwrap.wrap(row.title, 32)) for row in possible]
    figure = go.Figure(layout={"template": template(dark), "barmode": "stack", "height": 190 + 62 * len(possible)})
    for part in dict.fromkeys(name for row in possible for name in row.parts_ms):
        figure.add_trace(
            go.Bar(
                name=escape(TEXT_OF_PART.get(part, part.replace("_", " "))),
                orientation="h",
                y=labels,
                x=[row.parts_ms.get(part, 0.0) for row in possible],
                marker={"color": colour_of(part.partition(".")[0]), "pattern": {"shape": _pattern(part)}},
                hovertemplate="%{y}<br>%{fullData.name} %{x:.4g} ms<extra></extra>",
            )
        )
    figure.add_trace(_band_marks(possible, labels, dark))
    if any(row.bound_ms is not None for row in possible):
        ink = INK_ON_DARK if dark else INK_ON_LIGHT
        figure.add_trace(
            go.Scatter(
                name="lower bound",
                x=[row.bound_ms for row in possible],
                y=labels,
                mode="markers",
                marker={"symbol": "line-ns-open", "size": 22, "line": {"width": 3}, "color": ink},
                hovertemplate="%{y}<br>no policy could be below %{x:.4g} ms<extra></extra>",
            )
        )
    emulated = " (emulated device)" if any(row.emulated for row in possible) else ""
    figure.update_xaxes(title_text=f"time per output token (ms){emulated}", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure


def _band_marks(rows: Sequence[SetupRow], labels: Sequence[str], dark: bool) -> go.Scatter:
    """The whole time as a point with its band, where there is one."""
    ink = INK_ON_DARK if dark else INK_ON_LIGHT
    values = [row.tpot_ms or 0.0 for row in rows]
    return go.Scatter(
        name="time per token, 90 % band",
        x=values,
        y=list(labels),
        mode="markers",
        marker={"symbol": "diamond", "size": 8, "color": ink},
        error_x={
            "type": "data",
            "array": [(row.high_ms or value) - value for row, value in zip(rows, values, strict=True)],
            "arrayminus": [value - (row.low_ms or value) for row, value in zip(rows, values, strict=True)],
            "color": ink,
            "thickness": 1.5,
        },
        hovertemplate="%{y}<br>%{x:.4g} ms per token<extra></extra>",
    )


def _pattern(part: str) -> str:
    """Parts of one term share its colour and differ by pattern."""
    detail = part.partition(".")[2]
    return ("", "/", ".", "x", "-", "|")[sum(detail.encode()) % 6] if detail else ""
