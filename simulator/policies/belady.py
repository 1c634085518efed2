"""Eviction that knows the future: an upper bound, usable only where the whole workload is known beforehand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from simulator.policies.eviction import UNSPECIFIED, Key, Partition
from simulator.policies.frequency import ScoredPolicy
from trace_capture.errors import ConfigError

_NEVER = float("inf")


def future_uses(lookups: Iterable[Key]) -> dict[Key, deque[int]]:
    """For each key the places in the stream of look-ups where it is asked for, in order."""
    uses: dict[Key, deque[int]] = {}
    for place, key in enumerate(lookups):
        uses.setdefault(key, deque()).append(place)
    return uses


class Belady(ScoredPolicy):
    """The expert whose next use is farthest away leaves first (Belady 1966).

    Consumes the future of its partition by its `routed` calls, so partitions may share one.

    Raises:
        ConfigError: the future is not known.
    """

    needs_future = True
    evicts_ahead = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        if partition.future is None:
            raise ConfigError(
                "cache.policy = 'belady' needs to know the future, and only a replay does: use it with "
                "'moe-studio simulate', and lru or another policy in the live engine"
            )
        self._uses = partition.future

    def routed(self, layer: int, experts: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """See `CachePolicy`."""
        for expert in experts:
            self._uses[layer, expert].popleft()

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._rank(key)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._rank(key)

    def _rank(self, key: Key) -> None:
        pending = self._uses.get(key)
        self.score(key, -float(pending[0]) if pending else -_NEVER)
