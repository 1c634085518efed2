"""Eviction that knows the future: an upper bound, usable only where the whole workload is known beforehand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from simulator.policies.eviction import UNSPECIFIED, Key, Partition
from simulator.policies.frequency import Rank as Rank
from simulator.policies.frequency import ScoredPolicy
from trace_capture.errors import ConfigError

_LAST_PLACE = 1 << 40
"""No stream of look-ups is longer."""


def future_uses(lookups: Iterable[Key]) -> dict[Key, deque[int]]:
    """For each key the places in the stream of look-ups where it is asked for, in order."""
    uses: dict[Key, deque[int]] = {}
    for place, key in enumerate(lookups):
        pending = uses.get(key)
        if pending is None:
            pending = uses[key] = deque()
        pending.append(place)
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
        self._pending: list[list[deque[int]]] = []
        """The uses to come per layer and expert, as far as they were asked for: found without hashing the key."""

    def routed(self, layer: int, experts: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """See `CachePolicy`."""
        for expert in experts:
            self._pending_of(layer, expert).popleft()

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        layer, expert = key
        self.score(key, self._nearness(layer, expert))

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        layer, expert = key
        self.score(key, self._nearness(layer, expert))

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        ranks, layer = self._ranks_of(row), row[0][0]
        for expert in experts:
            rank = ranks[expert]
            self._score(rank, self._nearness(layer, expert))

    def _nearness(self, layer: int, expert: int) -> int:
        """How near the next use is: the nearer, the higher, and 0 if there is none."""
        pending = self._pending_of(layer, expert)
        return _LAST_PLACE - pending[0] if pending else 0

    def _pending_of(self, layer: int, expert: int) -> deque[int]:
        while len(self._pending) <= layer:
            self._pending.append([])
        row = self._pending[layer]
        while len(row) <= expert:
            row.append(self._uses.get((layer, len(row))) or deque())
        return row[expert]
