"""What the link was busy with while the host waited for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.policies.plans import Load

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
    layer: int,
    experts: Sequence[int],
) -> None:
    """Add the parts of one stall, up to the landing it waited for, to `parts_ns`.

    Args:
        parts_ns: nanoseconds by `STALL_PARTS`.
        start_ns, landed_ns: the stall.
        landings: (end, load) of copies in order of their ends; those that ended in the stall follow each other
            without a gap, because a link with a queue does not rest.
        layer, experts: the waiting layer and what it runs.
    """
    for end_ns, load in landings:
        stop_ns = min(end_ns, landed_ns)
        if stop_ns <= start_ns:
            continue
        if load.key[0] != layer or load.key[1] not in experts:
            part = "other_copies"
        else:
            part = "demand" if load.reason == "demand" else "late_prefetch"
        parts_ns[part] = parts_ns.get(part, 0) + stop_ns - start_ns
        start_ns = stop_ns
