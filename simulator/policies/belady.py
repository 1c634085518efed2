"""Eviction that knows the future: an upper bound, usable only where the whole workload is known beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.policies.eviction import UNSPECIFIED, Key, Partition
from simulator.policies.frequency import ScoredPolicy
from simulator.policies.rank_heap import Rank
from trace_capture.errors import ConfigError

_LAST_PLACE = 1 << 40
"""No stream of look-ups is longer."""


def future_uses(lookups: Iterable[Key]) -> dict[Key, list[int]]:
    """For each key the places in the stream of look-ups where it is asked for, in order."""
    uses: dict[Key, list[int]] = {}
    for place, key in enumerate(lookups):
        places = uses.get(key)
        if places is None:
            places = uses[key] = []
        places.append(place)
    return uses


class Belady(ScoredPolicy):
    """The expert whose next use is farthest away leaves first (Belady 1966).

    Follows the future by its `routed` calls, and changes nothing about it, so partitions may share one.

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
        self._future = partition.future
        self._future_rows: list[list[Sequence[int]]] = []
        """The same by layer and expert, as far as they were asked for: found without hashing the key."""
        self._last_place = _LAST_PLACE

    def routed(self, layer: int, experts: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """See `CachePolicy`.

        Raises:
            RuntimeError: this look-up was not foreseen.
        """
        for expert in experts:
            rank = self._rank_of((layer, expert))
            if rank.uses >= len(self._future_of(rank)):
                raise RuntimeError(f"expert {expert} of MoE layer {layer} is asked for more often than was foreseen")
            rank.uses += 1

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        rank = self._rank_of(key)
        self._score(rank, self._nearness(rank))

    def all_admitted(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        ranks = self._ranks_of(row)
        for expert in experts:
            rank = ranks[expert]
            self._score(rank, self._nearness(rank))

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self.admitted(key)

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        self.all_admitted(row, experts)

    def _nearness(self, rank: Rank) -> int:
        """How near the next use is: the nearer, the higher, and 0 if there is none."""
        future = self._future_of(rank)
        if rank.uses >= len(future):
            return 0
        return self._last_place - future[rank.uses]

    def _future_of(self, rank: Rank) -> Sequence[int]:
        """All places where an expert is asked for; `Rank.uses` of them have passed."""
        while len(self._future_rows) <= rank.layer:
            self._future_rows.append([])
        row = self._future_rows[rank.layer]
        while len(row) <= rank.expert:
            row.append(self._future.get((rank.layer, len(row)), []))
        return row[rank.expert]
