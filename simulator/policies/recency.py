"""Eviction by how long ago an expert was used; the cache that keeps nothing; and chance."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Partition


class Lru(CachePolicy):
    """Least recently used leaves first."""

    evicts_ahead = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._order[key] = None

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._order.move_to_end(key)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._order.pop(key, None)

    def choose_victim(self, can_leave: Callable[[Key], bool]) -> Key | None:
        """See `CachePolicy`."""
        for key in self._order:
            if can_leave(key):
                return key
        return None

    def all_admitted(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        order = self._order
        for expert in experts:
            order[row[expert]] = None

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        order = self._order
        for expert in experts:
            order.move_to_end(row[expert])

    def evict(self, count: int, can_leave: Callable[[Key], bool]) -> list[Key]:
        """See `CachePolicy`; one walk from the oldest on."""
        order = self._order
        victims: list[Key] = []
        for key in order:
            if len(victims) == count:
                break
            if can_leave(key):
                victims.append(key)
        for key in victims:
            del order[key]
        return victims


class NoCache(Lru):
    """Nothing outlives its layer: what on-demand engines without an expert cache do."""

    def expired(self, layer_keys: Sequence[Key]) -> Iterable[Key]:
        """See `CachePolicy`."""
        return layer_keys


class Random(CachePolicy):
    """A uniformly random expert leaves; seeded, so that runs repeat. The floor any policy must beat."""

    evicts_ahead = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._random = random.Random(partition.seed)
        self._keys: dict[Key, None] = {}

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._keys[key] = None

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._keys.pop(key, None)

    def choose_victim(self, can_leave: Callable[[Key], bool]) -> Key | None:
        """See `CachePolicy`."""
        free = [key for key in self._keys if can_leave(key)]
        return self._random.choice(free) if free else None
