"""Eviction that knows the future: an upper bound, usable only where the whole workload is known beforehand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from simulator.policies.cache import Key, ScoredPolicy

_NEVER = float("inf")


def future_uses(lookups: Iterable[Key]) -> dict[Key, deque[int]]:
    """For each key the places in the stream of look-ups where it is asked for, in order."""
    uses: dict[Key, deque[int]] = {}
    for place, key in enumerate(lookups):
        uses.setdefault(key, deque()).append(place)
    return uses


class Belady(ScoredPolicy):
    """The expert whose next use is farthest away leaves first (Belady 1966).

    Args:
        uses: of `future_uses`; consumed by this policy's `used` calls, so partitions may share one.
    """

    def __init__(self, uses: dict[Key, deque[int]]) -> None:
        super().__init__()
        self._uses = uses

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._rank(key)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._uses[key].popleft()
        self._rank(key)

    def _rank(self, key: Key) -> None:
        pending = self._uses.get(key)
        self.score(key, -float(pending[0]) if pending else -_NEVER)
