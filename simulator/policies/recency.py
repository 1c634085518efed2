"""Eviction by how long ago an expert was used; the cache that keeps nothing; and chance."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Leavers, Partition
from simulator.policies.seats import SeatQueue, SeatTable


class Lru(CachePolicy):
    """Least recently used leaves first.

    A queue of uses, in which only the latest of each expert counts. To be used is then one entry more, which takes less
    time than finding an expert in an ordered dictionary.
    """

    evicts_ahead = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._table = SeatTable()
        self._queue = SeatQueue(1)
        """Of those on the device."""

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._queue.append(self._table.find(key))

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._queue.tidy()
        self._queue.requeue(self._table.find(key))

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        seat = self._table.find(key)
        if seat.place >= 0:
            self._queue.drop(seat)

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        found = self._oldest(1, leavers)
        return found[0] if found else None

    def all_admitted(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        seats, queue = self._table.of_row(row), self._queue
        for expert in experts:
            queue.append(seats[expert])

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        seats, queue = self._table.of_row(row), self._queue
        queue.tidy()
        for expert in experts:
            queue.requeue(seats[expert])

    def evict(self, count: int, leavers: Leavers) -> list[Key]:
        """See `CachePolicy`; one walk from the oldest on."""
        victims = self._oldest(count, leavers)
        for key in victims:
            self._queue.drop(self._table.find(key))
        return victims

    def _oldest(self, count: int, leavers: Leavers) -> list[Key]:
        """At most so many that may leave, the oldest first."""
        queue = self._queue
        place = queue.first()
        found: list[Key] = []
        while place < len(queue.entries) and len(found) < count:
            if queue.counts(place):
                key = self._table.key_of(queue.entries[place])
                if leavers.allow(key):
                    found.append(key)
            place += 1
        return found


class NoCache(Lru):
    """Nothing outlives its layer: what on-demand engines without an expert cache do."""

    def expired(self, layer_keys: Sequence[Key]) -> Iterable[Key]:
        """See `CachePolicy`."""
        return layer_keys


class Random(CachePolicy):
    """A uniformly random expert leaves; seeded, so that runs repeat. The floor any policy must beat.

    A draw counts in order of admission those that may leave. Few may not, and their places are found by bisection.
    """

    evicts_ahead = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._random = random.Random(partition.seed)
        self._keys: list[Key] = []
        """In order of admission."""
        self._numbers: list[int] = []
        """Likewise, how many were admitted before each."""
        self._number_of: dict[Key, int] = {}
        self._admissions = 0

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._keys.append(key)
        self._numbers.append(self._admissions)
        self._number_of[key] = self._admissions
        self._admissions += 1

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        if key in self._number_of:
            place = bisect_left(self._numbers, self._number_of.pop(key))
            del self._keys[place], self._numbers[place]

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        place = self._draw(self._kept_places(leavers))
        return None if place < 0 else self._keys[place]

    def evict(self, count: int, leavers: Leavers) -> list[Key]:
        """See `CachePolicy`; those that may not leave are looked for once."""
        kept = self._kept_places(leavers)
        victims: list[Key] = []
        while len(victims) < count:
            place = self._draw(kept)
            if place < 0:
                break
            victim = self._keys[place]
            victims.append(victim)
            self.removed(victim)
            kept = [other - (other > place) for other in kept]
        return victims

    def _draw(self, kept: list[int]) -> int:
        """The place of one that may leave, or -1; `kept` are the places of the others, in order."""
        if len(kept) == len(self._keys):
            return -1
        place: int = self._random.choice(range(len(self._keys) - len(kept)))
        for other in kept:
            if other > place:
                break
            place += 1
        return place

    def _kept_places(self, leavers: Leavers) -> list[int]:
        """The places of those that may not leave, in order."""
        kept = leavers.kept_back()
        if kept is None:
            return [place for place, key in enumerate(self._keys) if not leavers.allow(key)]
        numbers = self._numbers
        return [
            bisect_left(numbers, number) for number in sorted({self._number_of.get(key, -1) for key in kept} - {-1})
        ]
