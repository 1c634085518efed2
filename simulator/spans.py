"""What a timeline says of loads beside their times, for simulated and measured runs alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from simulator.policies.cache import Key
from trace_capture.run import Span


class FirstUse(NamedTuple):
    """A prefetched expert was asked for the first time since."""

    pass_id: int
    key: Key


def mark_uses(loads: Sequence[Span], uses: Iterable[FirstUse]) -> list[Span]:
    """Give each prefetch the pass in which it was first used.

    Args:
        loads: spans of kind `load` in order of start.
        uses: in order of time; each belongs to the latest prefetch of its key that began up to its pass.
    """
    places: dict[Key, list[int]] = {}
    for place, span in enumerate(loads):
        if span.reason in ("prefetch", "utility"):
            places.setdefault((span.layer, span.expert), []).append(place)
    marked = list(loads)
    for use in uses:
        before = [place for place in places.get(use.key, ()) if loads[place].pass_id <= use.pass_id]
        if before:
            marked[before[-1]] = loads[before[-1]]._replace(used_pass=use.pass_id)
    return marked
