"""Eviction by how long ago an expert was used; the cache that keeps nothing; and chance."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Leavers, Partition
from simulator.policies.seats import Seat, SeatTable


class Lru(CachePolicy):
    """Least recently used leaves first.

    A queue of uses, in which only the latest of each expert counts; those that do not are left out when most do not.
    To be used is then one entry more, which takes less time than finding an expert in an ordered dictionary.
    """

    evicts_ahead = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._table = SeatTable()
        self._queue: list[Seat] = []
        self._head = 0
        """Before it no entry counts."""
        self._held = 0
        """How many experts are on the device."""

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        seat = self._table.find(key)
        self._held += seat.place < 0
        self._enqueue(seat)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._tidy()
        self._enqueue(self._table.find(key))

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        seat = self._table.find(key)
        if seat.place >= 0:
            seat.place = -1
            self._held -= 1

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        found = self._oldest(1, leavers)
        return found[0] if found else None

    def all_admitted(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        seats, queue = self._table.of_row(row), self._queue
        for expert in experts:
            seat = seats[expert]
            self._held += seat.place < 0
            seat.place = len(queue)
            queue.append(seat)

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        self._tidy()
        seats, queue = self._table.of_row(row), self._queue
        for expert in experts:
            seat = seats[expert]
            seat.place = len(queue)
            queue.append(seat)

    def evict(self, count: int, leavers: Leavers) -> list[Key]:
        """See `CachePolicy`; one walk from the oldest on."""
        victims = self._oldest(count, leavers)
        for key in victims:
            seat = self._table.find(key)
            seat.place = -1
        self._held -= len(victims)
        return victims

    def _oldest(self, count: int, leavers: Leavers) -> list[Key]:
        """At most so many that may leave, the oldest first."""
        queue, place, first = self._queue, self._head, -1
        found: list[Key] = []
        while place < len(queue) and len(found) < count:
            seat = queue[place]
            if seat.place == place:
                if first < 0:
                    first = place
                key = self._table.key_of(seat)
                if leavers.allow(key):
                    found.append(key)
            place += 1
        self._head = first if first >= 0 else place
        return found

    def _tidy(self) -> None:
        """Leave out the entries that do not count, once they are many."""
        if len(self._queue) <= 4 * self._held + 64:
            return
        queue = self._queue
        kept: list[Seat] = []
        for place in range(self._head, len(queue)):
            seat = queue[place]
            if seat.place == place:
                seat.place = len(kept)
                kept.append(seat)
        self._queue, self._head = kept, 0

    def _enqueue(self, seat: Seat) -> None:
        seat.place = len(self._queue)
        self._queue.append(seat)


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
