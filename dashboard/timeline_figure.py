"""The figure of timelines: lanes of link, device, CPU and host over time, one run under the other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard.figures import empty_figure, label_of, time_title
from dashboard.theme import INK_ON_DARK, INK_ON_LIGHT, colour_of, template
from dashboard.timeline_view import Block, TimelineView

LANE_HEIGHT = 0.8
MAX_PASS_MARKS = 12
LANE_PIXELS = 62


def timeline(*views: TimelineView, dark: bool = False) -> go.Figure:
    """Lanes over time, of the runs that have blocks, on one axis of time.

    Args:
        views: of the same window of passes, drawn one under the other.
        dark: for a dark page.
    """
    drawn = [view for view in views if view.blocks]
    if not drawn:
        return empty_figure(next((view.empty for view in views), ""), dark=dark)
    figure = make_subplots(
        rows=len(drawn),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.12,
        row_heights=[len(view.tracks) for view in drawn],
        subplot_titles=[escape(view.title) for view in drawn] if len(drawn) > 1 else None,
    )
    lanes = sum(len(view.tracks) for view in drawn)
    figure.update_layout(
        template=template(dark),
        height=130 + LANE_PIXELS * lanes + 50 * (len(drawn) - 1),
        barmode="overlay",
        bargap=0,
        dragmode="zoom",
        margin={"t": 70 if len(drawn) > 1 else 40},
        legend={"y": 1.0 if len(drawn) == 1 else 1.06},
    )
    known: set[str] = set()
    for row, view in enumerate(drawn, start=1):
        known |= _draw(figure, view, row, known, dark)
    emulated = any(view.emulated for view in drawn)
    title = time_title("time since the window began (ms)", emulated, dark)
    zoom = next((view.zoom_ms for view in drawn if view.zoom_ms is not None), None)
    figure.update_xaxes(range=list(zoom) if zoom is not None else [0, max(view.length_ms for view in drawn)])
    figure.update_xaxes(title_text=title, row=len(drawn), col=1)
    return figure


def _draw(figure: go.Figure, view: TimelineView, row: int, known: set[str], dark: bool) -> set[str]:
    """Add a run's lanes; gives the concepts that are in the legend now."""
    floor = {track: len(view.tracks) - 1 - place for place, track in enumerate(view.tracks)}
    concepts = list(dict.fromkeys(block.concept for block in view.blocks))
    for concept in concepts:
        bars = _lane_bars(concept, [block for block in view.blocks if block.concept == concept], floor)
        bars.update(showlegend=concept not in known)
        figure.add_trace(bars, row=row, col=1)
    if view.moments:
        marks = _eviction_marks(view, floor, dark)
        marks.update(showlegend="eviction" not in known)
        figure.add_trace(marks, row=row, col=1)
        concepts.append("eviction")
    _mark_passes(figure, view, row)
    figure.update_yaxes(
        title_text="track; height is share of time" if view.is_aggregated else "track",
        tickvals=[floor[track] + LANE_HEIGHT / 2 for track in view.tracks],
        ticktext=[f"{track}  " for track in view.tracks],
        range=[-0.1, len(view.tracks) + 0.15],
        fixedrange=True,
        showgrid=False,
        zeroline=False,
        row=row,
        col=1,
    )
    return set(concepts)


def _lane_bars(concept: str, blocks: Sequence[Block], floor: dict[str, int]) -> go.Bar:
    return go.Bar(
        name=label_of(concept),
        legendgroup=concept,
        x=[(block.start_ms + block.end_ms) / 2 for block in blocks],
        width=[block.end_ms - block.start_ms for block in blocks],
        base=[floor[block.track] + LANE_HEIGHT * block.low for block in blocks],
        y=[LANE_HEIGHT * (block.high - block.low) for block in blocks],
        marker={"color": colour_of(concept), "line": {"width": 0}},
        hovertext=[escape(f"{block.track}: {block.text}").replace("\n", "<br>") for block in blocks],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _eviction_marks(view: TimelineView, floor: dict[str, int], dark: bool) -> go.Scatter:
    return go.Scatter(
        name="eviction",
        legendgroup="eviction",
        mode="markers",
        x=[moment.at_ms for moment in view.moments],
        y=[floor[moment.track] + LANE_HEIGHT for moment in view.moments],
        marker={"symbol": "triangle-down", "size": 7, "color": INK_ON_DARK if dark else INK_ON_LIGHT},
        hovertext=[escape(moment.text) for moment in view.moments],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _mark_passes(figure: go.Figure, view: TimelineView, row: int) -> None:
    """A dotted line where each pass begins, as long as there are few."""
    if len(view.pass_starts_ms) > MAX_PASS_MARKS:
        return
    for place, start_ms in view.pass_starts_ms:
        line = {"width": 1, "dash": "dot", "color": colour_of("overhead")}
        figure.add_vline(x=start_ms, line=line, row=row, col=1)
        figure.add_annotation(
            text=f"pass {place}",
            x=start_ms,
            y=len(view.tracks) + 0.15,
            xanchor="left",
            yanchor="top",
            showarrow=False,
            font={"size": 11},
            row=row,
            col=1,
        )
