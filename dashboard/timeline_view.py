"""A window of a run's timeline as blocks to draw. Pure: no files, no Dash, no plotly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dashboard.data import NamedRun
from dashboard.texts import format_bytes, format_ms, format_percent, plural
from dashboard.views import NO_RUNS, run_title
from trace_capture.run import TRACKS, Run, Span

MAX_SPANS = 5_000
"""Above so many spans in a window, shares of time are drawn instead of single spans."""
WAITS = ("stall", "cpu_experts")
"""Kinds of spans in which a track waits for another."""
NUM_BINS = 400
DEFAULT_PASSES = 3


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
    """Blocks of the passes `first` to `last` (places in the run, from 0) of a run that has `num_passes`."""

    title: str = ""
    tracks: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    moments: tuple[Moment, ...] = ()
    pass_starts_ms: tuple[tuple[int, float], ...] = ()
    first: int = 0
    last: int = 0
    num_passes: int = 0
    num_spans: int = 0
    is_aggregated: bool = False
    emulated: bool = False
    sentence: str = ""
    empty: str = ""


def pass_ids(run: Run) -> list[int]:
    """The passes of a run's timeline in order of their start."""
    starts: dict[int, int] = {}
    for span in run.spans:
        starts[span.pass_id] = min(span.start_ns, starts.get(span.pass_id, span.start_ns))
    return sorted(starts, key=lambda pass_id: starts[pass_id])


def default_window(run: Run) -> tuple[int, int]:
    """The passes after the first one, which is the first prompt's prefill and much longer than the others."""
    last = max(0, len(pass_ids(run)) - 1)
    return min(1, last), min(DEFAULT_PASSES, last)


def runs_with_spans(runs: Sequence[NamedRun]) -> list[NamedRun]:
    """Runs that have a timeline: measured before predicted, the fastest of each first."""
    found = [item for item in runs if item.run.spans]
    return sorted(found, key=lambda item: (item.run.info.kind != "measured", item.run.metrics.tpot_ms, item.name))


def timeline(item: NamedRun | None, first: int, last: int) -> TimelineView:
    """The spans of passes `first` to `last`; a window beyond the run is moved into it."""
    if item is None:
        return TimelineView(empty=NO_RUNS)
    title = run_title(item)
    ids = pass_ids(item.run)
    if not ids:
        return TimelineView(title, empty=f"{title} was recorded without spans; run it again with the timeline kept.")
    first = max(0, min(first, len(ids) - 1))
    last = max(first, min(last, len(ids) - 1))
    chosen = set(ids[first : last + 1])
    in_window = [span for span in item.run.spans if span.pass_id in chosen and span.track in TRACKS]
    spans = [span for span in in_window if span.kind != "evict"]
    evictions = [span for span in in_window if span.kind == "evict"]
    if not spans:
        return TimelineView(title, empty="These passes have no spans on a track that is known here.")
    begin_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    tracks = tuple(name for name in TRACKS if any(span.track == name for span in item.run.spans))
    is_aggregated = len(spans) > MAX_SPANS
    blocks = _binned(spans, tracks, begin_ns, end_ns) if is_aggregated else [_block(span, begin_ns) for span in spans]
    starts: dict[int, int] = {}
    for span in spans:
        starts[span.pass_id] = min(span.start_ns, starts.get(span.pass_id, span.start_ns))
    return TimelineView(
        title=title,
        tracks=tracks,
        blocks=tuple(blocks),
        moments=() if is_aggregated else tuple(_moment(span, begin_ns) for span in evictions),
        pass_starts_ms=tuple(
            (place, (starts[ids[place]] - begin_ns) / 1e6) for place in range(first, last + 1) if ids[place] in starts
        ),
        first=first,
        last=last,
        num_passes=len(ids),
        num_spans=len(spans),
        is_aggregated=is_aggregated,
        emulated=item.run.info.emulated,
        sentence=f"Passes {first} to {last} of 0 to {len(ids) - 1}: "
        + _sentence(spans, tracks, begin_ns, end_ns, is_aggregated)
        + (f" {plural(len(evictions), 'eviction')}." if evictions else ""),
    )


def concept_of(span: Span) -> str:
    """What a span's colour stands for: a load's reason, or the kind of work."""
    return f"{span.reason or 'demand'} load" if span.kind == "load" else span.kind


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


def _binned(spans: Sequence[Span], tracks: Sequence[str], begin_ns: int, end_ns: int) -> list[Block]:
    """Share of each bin's time by track and concept, stacked within the lane."""
    edges = np.linspace(begin_ns, end_ns, NUM_BINS + 1)
    width_ns = max(1e-9, (end_ns - begin_ns) / NUM_BINS)
    blocks = []
    for track in tracks:
        on_track = [span for span in spans if span.track == track]
        low = np.zeros(NUM_BINS)
        for concept in dict.fromkeys(concept_of(span) for span in on_track):
            shares = _busy_ns([span for span in on_track if concept_of(span) == concept], edges) / width_ns
            high = np.minimum(1.0, low + shares)
            for place in np.flatnonzero(high - low > 1e-4).tolist():
                text = f"{concept}: {format_percent(float(shares[place]))} of {format_ms(width_ns / 1e6)}"
                start_ms, end_ms = (edges[place] - begin_ns) / 1e6, (edges[place + 1] - begin_ns) / 1e6
                blocks.append(
                    Block(track, concept, float(start_ms), float(end_ms), float(low[place]), float(high[place]), text)
                )
            low = high
    return blocks


def _busy_ns(spans: Sequence[Span], edges: np.ndarray) -> np.ndarray:
    """Nanoseconds of work between neighbouring edges. Spans of one track do not overlap, so the work done until
    any time is a line through their starts and ends."""
    ordered = sorted(spans, key=lambda span: span.start_ns)
    times = np.array([time for span in ordered for time in (span.start_ns, span.end_ns)], dtype=np.float64)
    lengths = np.array([span.end_ns - span.start_ns for span in ordered], dtype=np.float64)
    done = np.concatenate([[0.0], np.repeat(np.cumsum(lengths), 2)])[:-1]
    return np.diff(np.interp(edges, np.maximum.accumulate(times), done))


def _sentence(spans: Sequence[Span], tracks: Sequence[str], begin_ns: int, end_ns: int, is_aggregated: bool) -> str:
    span_ns = max(1, end_ns - begin_ns)
    shares = []
    for track in tracks:
        busy_ns = sum(span.end_ns - span.start_ns for span in spans if span.track == track and span.kind not in WAITS)
        shares.append(f"{track} {format_percent(busy_ns / span_ns, digits=0)}")
    stall_ns = sum(span.end_ns - span.start_ns for span in spans if span.kind == "stall")
    moved = sum(span.num_bytes for span in spans if span.kind == "load")
    text = (
        f"{plural(len(spans), 'span')} in {format_ms(span_ns / 1e6)}. Busy: {', '.join(shares)}; "
        f"{format_percent(stall_ns / span_ns, digits=0)} of the time the device waits for the link. "
        f"{format_bytes(moved)} were copied."
    )
    if is_aggregated:
        text += f" More than {MAX_SPANS:,} spans, so heights show shares of time; choose fewer passes for single spans."
    return text
