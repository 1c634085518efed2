"""What the link was busy with while the host waited for it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

from simulator.policies.cache import Key
from simulator.policies.plans import Load
from trace_capture.run import Span

STALL_PARTS = ("demand", "late_prefetch", "other_copies", "wakeup")
"""Parts of a stall by what the link carried in each nanosecond of it.

demand: a copy that this layer asked for when it was routed. late_prefetch: a copy that was begun ahead, for an expert
that this layer needs. other_copies: a copy that this layer does not need, so that its own wait in the queue behind it.
wakeup: none any more; the waiting thread has yet to go on.
"""


def split_stall(
    parts_ns: dict[str, int],
    start_ns: int,
    landed_ns: int,
    landings: Iterable[tuple[int, Load]],
    awaited: Collection[Key],
) -> None:
    """Add the parts of one stall, up to the landing it waited for, to `parts_ns`.

    Args:
        parts_ns: nanoseconds by `STALL_PARTS`.
        start_ns, landed_ns: the stall.
        landings: (end, load) of copies in order of their ends; those that ended in the stall follow each other
            without a gap, because a link with a queue does not rest.
        awaited: what the layer runs and waits for.
    """
    for end_ns, load in landings:
        stop_ns = min(end_ns, landed_ns)
        if stop_ns <= start_ns:
            continue
        if load.key not in awaited:
            part = "other_copies"
        else:
            part = "demand" if load.reason == "demand" else "late_prefetch"
        parts_ns[part] = parts_ns.get(part, 0) + stop_ns - start_ns
        start_ns = stop_ns


def split_recorded_stall(
    parts_ns: dict[str, int], start_ns: int, stop_ns: int, loads: Sequence[Span], layer: int, pass_id: int
) -> None:
    """Add the parts of one recorded stall to `parts_ns`; what the link did not work in counts as `wakeup`.

    Args:
        parts_ns: nanoseconds by `STALL_PARTS`.
        start_ns, stop_ns: the stall.
        loads: all copies in order, none overlapping another, those loaded ahead with their `used_pass`.
        layer, pass_id: where it was waited.
    """
    begin_ns = start_ns
    for place in range(bisect_right(loads, start_ns, key=lambda span: span.end_ns), len(loads)):
        span = loads[place]
        if span.start_ns >= stop_ns:
            break
        if span.layer != layer or (span.reason != "demand" and span.used_pass != pass_id):
            part = "other_copies"
        else:
            part = "demand" if span.reason == "demand" else "late_prefetch"
        busy_from_ns = max(begin_ns, span.start_ns)
        begin_ns = max(busy_from_ns, min(span.end_ns, stop_ns))
        parts_ns[part] = parts_ns.get(part, 0) + begin_ns - busy_from_ns
        parts_ns["wakeup"] = parts_ns.get("wakeup", 0) - (begin_ns - busy_from_ns)
    parts_ns["wakeup"] = parts_ns.get("wakeup", 0) + stop_ns - start_ns
