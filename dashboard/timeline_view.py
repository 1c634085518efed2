"""A window of a run's timeline as blocks to draw. Pure: no files, no Dash, no plotly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dashboard.data import NamedRun
from dashboard.span_columns import SpanColumns, concept_of
from dashboard.texts import format_bytes, format_ms, format_percent, plural
from dashboard.views import NO_RUNS, run_title
from trace_capture.run import TRACKS, Span

MAX_SPANS = 1_500
"""Above so many spans in what is shown, shares of time are drawn instead of single spans; zooming in brings them."""
WAITS = ("stall", "cpu_experts")
"""Concepts in which a track waits for another."""
NUM_BINS = 240
DEFAULT_PASSES = 3
MARGIN = 0.5
"""Of a zoomed range, drawn on either side of it, so that moving it a little shows no hole."""

Milliseconds = tuple[float, float]


@dataclass(frozen=True)
class Block:
    """A rectangle in the lane of a track: from `start_ms` to `end_ms`, and from `low` to `high` of the lane's height.

    Times count from the start of the window. `concept` is what its colour stands for.
    """

    track: str
    concept: str
    start_ms: float
    end_ms: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Moment:
    """Something without length: an expert's place was given up."""

    track: str
    at_ms: float
    text: str


@dataclass(frozen=True)
class TimelineView:
    """Blocks of the passes `first` to `last` (places in the run, from 0) of a run that has `num_passes`.

    `length_ms` is that of the whole window, `zoom_ms` the part of it that is shown (None: all), `num_spans` counts
    those in the blocks.
    """

    title: str = ""
    tracks: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    moments: tuple[Moment, ...] = ()
    pass_starts_ms: tuple[tuple[int, float], ...] = ()
    first: int = 0
    last: int = 0
    num_passes: int = 0
    num_spans: int = 0
    length_ms: float = 0.0
    zoom_ms: Milliseconds | None = None
    is_aggregated: bool = False
    emulated: bool = False
    sentence: str = ""
    empty: str = ""


def pass_ids(item: NamedRun) -> list[int]:
    """The passes of a run's timeline in order of their start."""
    found: list[int] = item.columns.pass_ids.tolist()
    return found


def default_window(item: NamedRun) -> tuple[int, int]:
    """The passes after the first one, which is the first prompt's prefill and much longer than the others."""
    last = max(0, len(pass_ids(item)) - 1)
    return min(1, last), min(DEFAULT_PASSES, last)


def runs_with_spans(runs: Sequence[NamedRun]) -> list[NamedRun]:
    """Runs that have a timeline: measured before predicted, the fastest of each first."""
    found = [item for item in runs if item.run.spans]
    return sorted(found, key=lambda item: (item.run.info.kind != "measured", item.run.metrics.tpot_ms, item.name))


def counterpart(item: NamedRun | None, runs: Sequence[NamedRun]) -> NamedRun | None:
    """The run of the same label and the other kind that has a timeline: measured for predicted, and the reverse."""
    if item is None:
        return None
    info = item.run.info
    others = [one for one in runs_with_spans(runs) if one.run.info.label == info.label]
    return next((one for one in others if one.run.info.kind != info.kind), None)


def timeline(item: NamedRun | None, first: int, last: int, zoom_ms: Milliseconds | None = None) -> TimelineView:
    """The spans of passes `first` to `last`; a window beyond the run is moved into it.

    Args:
        item: the run.
        first, last: places of passes, from 0.
        zoom_ms: the part of the window that is shown, counted from its begin. What is drawn stays bounded at any
            zoom: single spans where there are few, else shares of time in `NUM_BINS` bins of what is shown.
    """
    if item is None:
        return TimelineView(empty=NO_RUNS)
    title, columns = run_title(item), item.columns
    num_passes = len(columns.pass_ids)
    if not item.run.spans:
        return TimelineView(title, empty=f"{title} was recorded without spans; run it again with the timeline kept.")
    first = max(0, min(first, num_passes - 1))
    last = max(first, min(last, num_passes - 1))
    in_window = np.isin(columns.pass_id, columns.pass_ids[first : last + 1])
    work = np.flatnonzero(in_window & ~columns.is_moment)
    if not len(work):
        return TimelineView(title, empty="These passes have no spans on a track that is known here.")
    begin_ns, end_ns = int(columns.start_ns[work].min()), int(columns.end_ns[work].max())
    shown = _Shown(columns, in_window, begin_ns, end_ns, zoom_ms)
    tracks = tuple(name for place, name in enumerate(TRACKS) if (columns.track == place).any())
    is_aggregated = len(shown.work) > MAX_SPANS
    spans = item.run.spans
    blocks = (
        _binned(shown, tracks)
        if is_aggregated
        else [_block(spans[place], begin_ns) for place in columns.order[shown.work].tolist()]
    )
    evictions = columns.order[shown.moments].tolist()
    return TimelineView(
        title=title,
        tracks=tracks,
        blocks=tuple(blocks),
        moments=() if is_aggregated else tuple(_moment(spans[place], begin_ns) for place in evictions),
        pass_starts_ms=_pass_starts(columns, work, first, last, begin_ns),
        first=first,
        last=last,
        num_passes=num_passes,
        num_spans=len(shown.work),
        length_ms=(end_ns - begin_ns) / 1e6,
        zoom_ms=shown.zoom_ms,
        is_aggregated=is_aggregated,
        emulated=item.run.info.emulated,
        sentence=f"Passes {first} to {last} of 0 to {num_passes - 1}: "
        + _sentence(shown, tracks, is_aggregated)
        + (f" {plural(len(evictions), 'eviction')}." if evictions else ""),
    )


class _Shown:
    """What of a window is shown, with a margin: places of its work and of its moments."""

    def __init__(
        self,
        columns: SpanColumns,
        in_window: npt.NDArray[np.bool_],
        begin_ns: int,
        end_ns: int,
        zoom_ms: Milliseconds | None,
    ) -> None:
        self.columns, self.begin_ns = columns, begin_ns
        length_ms = (end_ns - begin_ns) / 1e6
        self.zoom_ms = None
        self.low_ns, self.high_ns = begin_ns, end_ns
        self.draw_low_ns, self.draw_high_ns = begin_ns, end_ns
        if zoom_ms is not None and zoom_ms[0] < length_ms and zoom_ms[1] > 0:
            self.zoom_ms = zoom_ms
            self.low_ns, self.high_ns = (begin_ns + round(value * 1e6) for value in zoom_ms)
            margin_ns = round(MARGIN * (self.high_ns - self.low_ns))
            self.draw_low_ns = max(begin_ns, self.low_ns - margin_ns)
            self.draw_high_ns = min(end_ns, self.high_ns + margin_ns)
        near = in_window & (columns.end_ns >= self.draw_low_ns) & (columns.start_ns <= self.draw_high_ns)
        self.work = np.flatnonzero(near & ~columns.is_moment)
        self.moments = np.flatnonzero(near & columns.is_moment)

    def inside_ns(self, chosen: npt.NDArray[np.bool_]) -> int:
        """Nanoseconds of the chosen work that lie in the zoomed range."""
        places = self.work[chosen]
        starts = np.maximum(self.columns.start_ns[places], self.low_ns)
        return int(np.maximum(0, np.minimum(self.columns.end_ns[places], self.high_ns) - starts).sum())


def _pass_starts(
    columns: SpanColumns, work: npt.NDArray[np.intp], first: int, last: int, begin_ns: int
) -> tuple[tuple[int, float], ...]:
    """Where each pass begins that has work."""
    ids, starts = columns.pass_ids[first : last + 1], columns.pass_starts_ns[first : last + 1]
    has_work = np.isin(ids, columns.pass_id[work])
    places = np.flatnonzero(has_work).tolist()
    return tuple((first + place, max(0, int(starts[place]) - begin_ns) / 1e6) for place in places)


def _block(span: Span, begin_ns: int) -> Block:
    start_ms, end_ms = (span.start_ns - begin_ns) / 1e6, (span.end_ns - begin_ns) / 1e6
    parts = []
    if span.layer >= 0:
        parts.append(f"layer {span.layer}")
    if span.expert >= 0:
        parts.append(f"expert {span.expert}")
    if span.reason:
        parts.append(f"reason: {span.reason}")
    if span.num_bytes:
        parts.append(format_bytes(span.num_bytes))
    text = f"{span.kind}, {format_ms(end_ms - start_ms)}\n{', '.join(parts) or 'whole pass'}"
    return Block(span.track, concept_of(span), start_ms, end_ms, 0.0, 1.0, text)


def _moment(span: Span, begin_ns: int) -> Moment:
    text = f"eviction: layer {span.layer}, expert {span.expert}, {format_bytes(span.num_bytes)}"
    return Moment(span.track, (span.start_ns - begin_ns) / 1e6, text)


def _binned(shown: _Shown, tracks: Sequence[str]) -> list[Block]:
    """Share of each bin's time by track and concept, stacked within the lane."""
    columns, begin_ns = shown.columns, shown.begin_ns
    edges = np.linspace(shown.draw_low_ns, shown.draw_high_ns, NUM_BINS + 1)
    width_ns = max(1e-9, (shown.draw_high_ns - shown.draw_low_ns) / NUM_BINS)
    blocks = []
    for track in tracks:
        on_track = shown.work[columns.track[shown.work] == TRACKS.index(track)]
        low = np.zeros(NUM_BINS)
        for concept in dict.fromkeys(columns.concept[on_track].tolist()):
            places = on_track[columns.concept[on_track] == concept]
            shares = _busy_ns(columns.start_ns[places], columns.end_ns[places], edges) / width_ns
            high = np.minimum(1.0, low + shares)
            name = columns.concepts[concept]
            for place in np.flatnonzero(high - low > 1e-4).tolist():
                text = f"{name}: {format_percent(float(shares[place]))} of {format_ms(width_ns / 1e6)}"
                start_ms, end_ms = (edges[place] - begin_ns) / 1e6, (edges[place + 1] - begin_ns) / 1e6
                blocks.append(
                    Block(track, name, float(start_ms), float(end_ms), float(low[place]), float(high[place]), text)
                )
            low = high
    return blocks


def _busy_ns(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Nanoseconds of work between neighbouring edges. Spans of one track do not overlap, so the work done until
    any time is a line through their starts and ends."""
    times = np.stack([starts, ends], axis=1).ravel().astype(np.float64)
    done = np.concatenate([[0.0], np.repeat(np.cumsum((ends - starts).astype(np.float64)), 2)])[:-1]
    return np.diff(np.interp(edges, np.maximum.accumulate(times), done))


def _sentence(shown: _Shown, tracks: Sequence[str], is_aggregated: bool) -> str:
    columns, span_ns = shown.columns, max(1, shown.high_ns - shown.low_ns)
    track = columns.track[shown.work]
    concepts = np.array(columns.concepts)[columns.concept[shown.work]]
    waits = np.isin(concepts, WAITS)
    shares = []
    for name in tracks:
        busy_ns = shown.inside_ns((track == TRACKS.index(name)) & ~waits)
        shares.append(f"{name} {format_percent(busy_ns / span_ns, digits=0)}")
    stall_ns = shown.inside_ns(concepts == "stall")
    visible = (columns.end_ns[shown.work] > shown.low_ns) & (columns.start_ns[shown.work] < shown.high_ns)
    loads = visible & (columns.num_bytes[shown.work] > 0) & (track == TRACKS.index("link"))
    where = "" if shown.zoom_ms is None else f", from {format_ms(shown.zoom_ms[0])} on"
    text = (
        f"{plural(int(visible.sum()), 'span')} in {format_ms(span_ns / 1e6)}{where}. Busy: {', '.join(shares)}; "
        f"{format_percent(stall_ns / span_ns, digits=0)} of the time the device waits for the link. "
        f"{format_bytes(int(columns.num_bytes[shown.work][loads].sum()))} were copied."
    )
    if is_aggregated:
        text += f" More than {MAX_SPANS:,} spans, so heights show shares of time; zoom in or choose fewer passes."
    return text
