"""Timelines of runs as Chrome JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Every run is a process, every track of it a thread. Slices of one thread nest or follow each other, as Perfetto wants
it: on the device's thread passes hold layers and layers hold work. Counters tell what is on the device, what waits
for the link and whether the link is busy; arrows lead from each prefetch to the layer that used it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from simulator.counters import can_tell_queue, can_tell_residency, link_busy, queue_length, residency
from trace_capture.errors import TraceError
from trace_capture.files import atomic_path
from trace_capture.run import TRACKS, Run, RunPass, Span
from trace_capture.trace import Phase

LANES_PER_TRACK = 100
_DEVICE_TID = TRACKS.index("device") * LANES_PER_TRACK + 1
Event = dict[str, Any]


class Window(NamedTuple):
    """Times of a run that are shown, in its nanoseconds."""

    start_ns: int
    stop_ns: int


def write_perfetto(
    runs: Run | Sequence[Run],
    path: Path,
    passes: tuple[int, int] | None = None,
    tokens: tuple[int, int] | None = None,
) -> dict[str, int]:
    """Write the timelines of one or several runs into one file.

    Args:
        runs: simulated or measured, each with its spans; windows are laid over each other at their starts.
        path: the JSON file; compressed when its name ends in `.gz`.
        passes: only the passes in these places of each run, from the first up to but without the second (0 is
            the first pass of the run, normally a prefill); None for all.
        tokens: instead, only the passes that make these output tokens, counted over all prompts of a run from 0;
            a prefill between them is shown too.

    Returns:
        How many `slices`, `counter values` and `arrows` were written.

    Raises:
        TraceError: a run has no spans, or not so many passes or tokens.
        StudioError: the place cannot be written to.
    """
    path = Path(path)
    document = perfetto_document([runs] if isinstance(runs, Run) else runs, passes, tokens)
    data = json.dumps(document, separators=(",", ":")).encode()
    if path.name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
    phases = [event["ph"] for event in document["traceEvents"]]
    return {"slices": phases.count("X"), "counter values": phases.count("C"), "arrows": phases.count("s")}


def perfetto_document(
    runs: Sequence[Run], passes: tuple[int, int] | None = None, tokens: tuple[int, int] | None = None
) -> dict[str, Any]:
    """What `write_perfetto` writes, as a dictionary."""
    events: list[Event] = []
    notes: list[str] = []
    arrows = count(1)
    for pid, run in enumerate(runs, start=1):
        if not run.spans:
            raise TraceError(f"run '{run.info.label}' has no timeline; record it with --spans")
        window = _window(run, _passes_of_tokens(run, tokens) if tokens is not None else passes)
        events += _process(pid, run)
        placed = _placed(run, window)
        events += _slices(pid, run, window, placed)
        events += _counters(pid, run, window)
        events += _arrows(pid, window, placed, arrows)
        if not can_tell_residency(run):
            notes.append(f"'{run.info.label}' did not record its evictions, so what is on the device is not shown")
        notes += [f"'{run.info.label}': {note}" for note in run.info.notes]
    return {"displayTimeUnit": "ns", "otherData": {"notes": notes}, "traceEvents": events}


def _passes_of_tokens(run: Run, tokens: tuple[int, int]) -> tuple[int, int]:
    """The places of the passes that make the output tokens from the first up to but without the second."""
    if not run.passes:
        raise TraceError(
            f"run '{run.info.label}' does not say which of its passes make tokens; record it again with this version"
        )
    owners = [
        place for place, item in enumerate(run.passes) if item.phase != Phase.PREFILL for _ in range(item.output_tokens)
    ]
    first, stop = tokens
    if not 0 <= first < stop <= len(owners):
        raise TraceError(
            f"run '{run.info.label}' has {len(owners)} output tokens, so there is no window from {first} to {stop}"
        )
    return owners[first], owners[stop - 1] + 1


def _window(run: Run, passes: tuple[int, int] | None) -> Window:
    """Start and end of a window of passes."""
    ordered = sorted(item.start_ns for item in _extents(run, by_layer=False).values())
    end_ns = max(span.end_ns for span in run.spans) + 1
    if passes is None:
        return Window(0, end_ns)
    first, stop = passes
    if not 0 <= first < stop <= len(ordered):
        raise TraceError(
            f"run '{run.info.label}' has {len(ordered)} passes, so there is no window from {first} to {stop} in it"
        )
    return Window(ordered[first], ordered[stop] if stop < len(ordered) else end_ns)


def _extents(run: Run, by_layer: bool) -> dict[tuple[int, int], Span]:
    """From the first to the last work of every pass, or of every layer of every pass, by (pass, layer); copies and
    evictions do not count, they may belong to another layer."""
    found: dict[tuple[int, int], Span] = {}
    for span in run.spans:
        if span.kind in ("load", "evict") or (by_layer and span.layer < 0):
            continue
        key = (span.pass_id, span.layer if by_layer else -1)
        known = found.get(key)
        if known is None:
            found[key] = Span("device", "layer" if by_layer else "pass", span.start_ns, span.end_ns, *key)
        elif span.start_ns < known.start_ns or span.end_ns > known.end_ns:
            start_ns, end_ns = min(span.start_ns, known.start_ns), max(span.end_ns, known.end_ns)
            found[key] = known._replace(start_ns=start_ns, end_ns=end_ns)
    return found


def _process(pid: int, run: Run) -> list[Event]:
    info = run.info
    emulated = ", emulated" if info.emulated else ""
    name = f"{info.kind}{emulated}: {info.label} ({info.model} on {info.hardware})"
    return [_named(pid, 0, "process_name", name=name), _named(pid, 0, "process_sort_index", sort_index=pid)]


def _named(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _placed(run: Run, window: Window) -> list[tuple[Span, int]]:
    """The spans of a window with the thread of each: one per track, and more where spans of a track overlap."""
    result: list[tuple[Span, int]] = []
    for place, track in enumerate(TRACKS):
        lane_ends_ns: list[int] = []
        inside = [span for span in run.spans if span.track == track and _overlaps(span, window)]
        for span in sorted(inside, key=lambda span: (span.start_ns, span.end_ns)):
            lane = 0
            if span.kind != "evict":
                lane = _free_lane(lane_ends_ns, span)
                lane_ends_ns[lane:] = [span.end_ns, *lane_ends_ns[lane + 1 :]]
            result.append((span, place * LANES_PER_TRACK + lane + 1))
    return result


def _slices(pid: int, run: Run, window: Window, placed: Sequence[tuple[Span, int]]) -> Iterator[Event]:
    threads = {tid: span.track for span, tid in placed} | {_DEVICE_TID: "device"}
    for tid in sorted(threads):
        lane = (tid - 1) % LANES_PER_TRACK
        yield _named(pid, tid, "thread_name", name=f"{threads[tid]} {lane + 1}" if lane else threads[tid])
        yield _named(pid, tid, "thread_sort_index", sort_index=tid)
    yield from _frames(pid, run, window)
    for span, tid in placed:
        if span.kind == "evict":
            yield _event(span, "i", pid, tid, span.start_ns - window.start_ns) | {"s": "t"}
        else:
            yield _slice(span, pid, tid, window)


def _frames(pid: int, run: Run, window: Window) -> Iterator[Event]:
    """Slices of passes and, in them, of layers: the work on the device's thread lies in these."""
    passes = sorted(_extents(run, by_layer=False).values(), key=lambda span: span.start_ns)
    names = _pass_names(run.passes) if len(run.passes) == len(passes) else [f"pass {span.pass_id}" for span in passes]
    for span, name in zip(passes, names, strict=True):
        if _overlaps(span, window):
            yield _slice(span, pid, _DEVICE_TID, window) | {"name": name}
    layers = sorted(_extents(run, by_layer=True).values(), key=lambda span: span.start_ns)
    for span in layers:
        if _overlaps(span, window):
            yield _slice(span, pid, _DEVICE_TID, window) | {"name": f"layer {span.layer}"}


def _pass_names(passes: Sequence[RunPass]) -> list[str]:
    names = []
    token = 0
    for item in passes:
        if item.phase == Phase.PREFILL:
            names.append(f"prefill of {item.tokens} tokens, prompt {item.sequence}")
            continue
        last = token + item.output_tokens - 1
        made = f"token {token}" if last == token else f"tokens {token} to {last}"
        names.append(made if item.tokens == 1 else f"{made}, {item.tokens - 1} draft{'s' * (item.tokens > 2)}")
        token = last + 1
    return names


def _slice(span: Span, pid: int, tid: int, window: Window) -> Event:
    begin_ns, end_ns = max(span.start_ns, window.start_ns), min(span.end_ns, window.stop_ns)
    return _event(span, "X", pid, tid, begin_ns - window.start_ns) | {"dur": (end_ns - begin_ns) / 1000}


def _overlaps(span: Span, window: Window) -> bool:
    """Whether a span is in the window; spans of no length are shown only where they are moments."""
    if span.end_ns == span.start_ns:
        return span.kind == "evict" and window.start_ns <= span.start_ns < window.stop_ns
    return span.start_ns < window.stop_ns and span.end_ns > window.start_ns


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


def _counters(pid: int, run: Run, window: Window) -> Iterator[Event]:
    """Counters from their value at the window's start on."""
    series: list[tuple[str, str, list[tuple[int, int]]]] = [("link busy", "busy", link_busy(run))]
    if can_tell_queue(run):
        series.append(("copies waiting for the link", "copies", queue_length(run)))
    if can_tell_residency(run):
        samples = residency(run)
        series.append(("experts on device", "experts", [(at_ns, experts) for at_ns, experts, _ in samples]))
        series.append(("expert bytes on device", "bytes", [(at_ns, size) for at_ns, _, size in samples]))
    for name, unit, values in series:
        before = [value for at_ns, value in values if at_ns <= window.start_ns]
        inside = [(at_ns, value) for at_ns, value in values if window.start_ns < at_ns < window.stop_ns]
        for at_ns, value in [(window.start_ns, before[-1] if before else 0), *inside]:
            yield {"ph": "C", "name": name, "pid": pid, "ts": (at_ns - window.start_ns) / 1000, "args": {unit: value}}


def _arrows(pid: int, window: Window, placed: Sequence[tuple[Span, int]], numbers: Iterator[int]) -> Iterator[Event]:
    """From each load ahead to the first experts that ran with it, where the window shows both."""
    work: dict[tuple[int, int], list[tuple[Span, int]]] = {}
    for span, tid in placed:
        if span.kind == "experts" and span.track == "device":
            work.setdefault((span.pass_id, span.layer), []).append((span, tid))
    for load, tid in placed:
        if load.kind != "load" or load.used_pass < 0:
            continue
        uses = [item for item in work.get((load.used_pass, load.layer), ()) if item[0].start_ns >= load.end_ns]
        if not uses:
            continue
        common = {"name": "prefetch to use", "cat": "prefetch", "id": next(numbers), "pid": pid}
        for phase, (span, at_tid) in (("s", (load, tid)), ("f", uses[0])):
            at_us = (max(span.start_ns, window.start_ns) - window.start_ns) / 1000
            end = {"bp": "e"} if phase == "f" else {}
            yield common | {"ph": phase, "tid": at_tid, "ts": at_us} | end
