"""What a run's spans say of every moment: experts on the device, copies that wait, whether the link is busy."""

from __future__ import annotations

from collections.abc import Iterable

from trace_capture.run import Run


def can_tell_residency(run: Run) -> bool:
    """Whether the spans of a run say which experts were on the device: every eviction it counted is among them, and
    without a warm-up, which is not counted, no other."""
    recorded = sum(span.kind == "evict" for span in run.spans)
    return recorded >= run.metrics.evictions if run.info.warmup_passes else recorded == run.metrics.evictions


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


def can_tell_queue(run: Run) -> bool:
    """Whether the copies of a run say when they were submitted; what was there from the start was not copied."""
    return all(span.submit_ns >= 0 for span in run.spans if span.kind == "load" and span.end_ns > span.start_ns)


def queue_length(run: Run) -> list[tuple[int, int]]:
    """(nanosecond, copies submitted and not begun) at every change. Copies that were withdrawn before they began
    left no span and are not counted."""
    loads = [span for span in run.spans if span.kind == "load" and 0 <= span.submit_ns < span.start_ns]
    return _running_sum([(span.submit_ns, 1) for span in loads] + [(span.start_ns, -1) for span in loads])


def link_busy(run: Run) -> list[tuple[int, int]]:
    """(nanosecond, 1 or 0) whenever the link begins to work or comes to rest."""
    loads = [span for span in run.spans if span.kind == "load" and span.end_ns > span.start_ns]
    return _running_sum([(span.start_ns, 1) for span in loads] + [(span.end_ns, -1) for span in loads])


def _running_sum(changes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The sum after all changes of each moment, where it differs from the moment before."""
    by_time: dict[int, int] = {}
    for at_ns, change in changes:
        by_time[at_ns] = by_time.get(at_ns, 0) + change
    result: list[tuple[int, int]] = []
    value = 0
    for at_ns in sorted(by_time):
        if by_time[at_ns]:
            value += by_time[at_ns]
            result.append((at_ns, value))
    return result
