"""Timelines of runs as Chrome JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Every run is a process, every track of it a thread. Slices of one thread never overlap, as Perfetto wants it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trace_capture.errors import TraceError
from trace_capture.files import atomic_path
from trace_capture.run import TRACKS, Run, Span

LANES_PER_TRACK = 100
Event = dict[str, Any]


def write_perfetto(runs: Run | Sequence[Run], path: Path, passes: tuple[int, int] | None = None) -> None:
    """Write the timelines of one or several runs into one file.

    Args:
        runs: simulated or measured, each with its spans; windows are laid over each other at their starts.
        path: the JSON file; compressed when its name ends in `.gz`.
        passes: only the passes in these places of each run, from the first up to but without the second (0 is
            the first pass of the run, normally a prefill); None for all.

    Raises:
        TraceError: a run has no spans, or not so many passes.
        StudioError: the place cannot be written to.
    """
    path = Path(path)
    document = perfetto_document([runs] if isinstance(runs, Run) else runs, passes)
    data = json.dumps(document, separators=(",", ":")).encode()
    if path.name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def perfetto_document(runs: Sequence[Run], passes: tuple[int, int] | None = None) -> dict[str, Any]:
    """What `write_perfetto` writes, as a dictionary."""
    events: list[Event] = []
    notes: list[str] = []
    for pid, run in enumerate(runs, start=1):
        if not run.spans:
            raise TraceError(f"run '{run.info.label}' has no timeline; record it with --spans")
        start_ns, stop_ns = _window(run, passes)
        events += _process(pid, run)
        events += _slices(pid, run, start_ns, stop_ns)
        if can_tell_residency(run):
            events += _residency(pid, run, start_ns, stop_ns)
        else:
            notes.append(f"'{run.info.label}' did not record its evictions, so what is on the device is not shown")
        notes += [f"'{run.info.label}': {note}" for note in run.info.notes]
    return {"displayTimeUnit": "ns", "otherData": {"notes": notes}, "traceEvents": events}


def can_tell_residency(run: Run) -> bool:
    """Whether the spans of a run say which experts were on the device: every eviction it counted is among them."""
    return sum(span.kind == "evict" for span in run.spans) == run.metrics.evictions


def residency(run: Run) -> list[tuple[int, int, int]]:
    """What was on the device: (nanosecond, landed experts, their bytes) at every change, in order of time.

    An expert counts from the end of its load until its eviction.
    """
    changes = [(span.end_ns, 0, 1, span.num_bytes) for span in run.spans if span.kind == "load"]
    changes += [(span.start_ns, 1, -1, -span.num_bytes) for span in run.spans if span.kind == "evict"]
    result: list[tuple[int, int, int]] = []
    experts = num_bytes = 0
    for at_ns, _, count, size in sorted(changes):
        experts += count
        num_bytes += size
        if result and result[-1][0] == at_ns:
            result.pop()
        result.append((at_ns, experts, num_bytes))
    return result


def _window(run: Run, passes: tuple[int, int] | None) -> tuple[int, int]:
    """Start and end of a window of passes, in the run's nanoseconds."""
    starts: dict[int, int] = {}
    for span in run.spans:
        if span.kind != "load":
            starts[span.pass_id] = min(span.start_ns, starts.get(span.pass_id, span.start_ns))
    ordered = sorted(starts.values())
    end_ns = max(span.end_ns for span in run.spans) + 1
    if passes is None:
        return 0, end_ns
    first, stop = passes
    if not 0 <= first < stop <= len(ordered):
        raise TraceError(
            f"run '{run.info.label}' has {len(ordered)} passes, so there is no window from {first} to {stop} in it"
        )
    return ordered[first], ordered[stop] if stop < len(ordered) else end_ns


def _process(pid: int, run: Run) -> list[Event]:
    info = run.info
    emulated = ", emulated" if info.emulated else ""
    name = f"{info.kind}{emulated}: {info.label} ({info.model} on {info.hardware})"
    return [_named(pid, 0, "process_name", name=name), _named(pid, 0, "process_sort_index", sort_index=pid)]


def _named(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _slices(pid: int, run: Run, start_ns: int, stop_ns: int) -> Iterator[Event]:
    for place, track in enumerate(TRACKS):
        lane_ends_ns: list[int] = []
        inside = [span for span in run.spans if span.track == track and _overlaps(span, start_ns, stop_ns)]
        for span in sorted(inside, key=lambda span: (span.start_ns, span.end_ns)):
            if span.kind == "evict":
                yield _event(span, "i", pid, place * LANES_PER_TRACK + 1, span.start_ns - start_ns) | {"s": "t"}
                continue
            lane = _free_lane(lane_ends_ns, span)
            tid = place * LANES_PER_TRACK + lane + 1
            if lane == len(lane_ends_ns):
                lane_ends_ns.append(0)
                yield _named(pid, tid, "thread_name", name=track if lane == 0 else f"{track} {lane + 1}")
                yield _named(pid, tid, "thread_sort_index", sort_index=tid)
            lane_ends_ns[lane] = span.end_ns
            begin_ns, end_ns = max(span.start_ns, start_ns), min(span.end_ns, stop_ns)
            yield _event(span, "X", pid, tid, begin_ns - start_ns) | {"dur": (end_ns - begin_ns) / 1000}


def _overlaps(span: Span, start_ns: int, stop_ns: int) -> bool:
    """Whether a span is in the window; spans of no length are shown only where they are moments."""
    if span.end_ns == span.start_ns:
        return span.kind == "evict" and start_ns <= span.start_ns < stop_ns
    return span.start_ns < stop_ns and span.end_ns > start_ns


def _free_lane(lane_ends_ns: Sequence[int], span: Span) -> int:
    """The first lane that is free when a span starts. Tracks are serial, so there is one, unless a measured run's
    clocks disagree."""
    for lane, end_ns in enumerate(lane_ends_ns):
        if end_ns <= span.start_ns:
            return lane
    return len(lane_ends_ns)


def _event(span: Span, phase: str, pid: int, tid: int, at_ns: int) -> Event:
    args: dict[str, Any] = {"pass": span.pass_id}
    if span.layer >= 0:
        args["layer"] = span.layer
    if span.expert >= 0:
        args |= {"expert": span.expert, "bytes": span.num_bytes}
    if span.reason:
        args["reason"] = span.reason
    name = f"{span.reason} load" if span.kind == "load" and span.reason else span.kind
    return {"ph": phase, "name": name, "cat": span.track, "pid": pid, "tid": tid, "ts": at_ns / 1000, "args": args}


def _residency(pid: int, run: Run, start_ns: int, stop_ns: int) -> Iterator[Event]:
    """Counters of experts and bytes on the device, from their value at the window's start."""
    samples = residency(run)
    before = [sample for sample in samples if sample[0] <= start_ns]
    at_start = (start_ns, *before[-1][1:]) if before else (start_ns, 0, 0)
    for at_ns, experts, num_bytes in [at_start, *(sample for sample in samples if start_ns < sample[0] < stop_ns)]:
        at_us = (at_ns - start_ns) / 1000
        yield {"ph": "C", "name": "experts on device", "pid": pid, "ts": at_us, "args": {"experts": experts}}
        yield {"ph": "C", "name": "expert bytes on device", "pid": pid, "ts": at_us, "args": {"bytes": num_bytes}}
