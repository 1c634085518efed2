"""Eviction by how long ago an expert was used; the cache that keeps nothing; and chance."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Leavers, Partition


class Seat:
    """An expert in a queue of uses; of numbers alone, so that the garbage collector never looks at it.

    Attributes:
        layer, expert: its key.
        place: of its latest use in the queue; -1: it is not on the device.
    """

    __slots__ = ("expert", "layer", "place")
    layer: int
    expert: int
    place: int


def make_seat(layer: int, expert: int) -> Seat:
    """Of an expert that is not on the device."""
    seat = Seat.__new__(Seat)
    seat.layer, seat.expert, seat.place = layer, expert, -1
    return seat


class Lru(CachePolicy):
    """Least recently used leaves first.

    A queue of uses, in which only the latest of each expert counts; those that do not are left out when most do not.
    To be used is then one entry more, which takes less time than finding an expert in an ordered dictionary.
    """

    evicts_ahead = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._seats: list[list[Seat]] = []
        """Per layer and expert, as far as they were asked for."""
        self._rows: list[Sequence[Key]] = []
        """Keys, likewise."""
        self._queue: list[Seat] = []
        self._head = 0
        """Before it no entry counts."""
        self._held = 0
        """How many experts are on the device."""

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        seat = self._seat_of(key)
        self._held += seat.place < 0
        self._enqueue(seat)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._tidy()
        self._enqueue(self._seat_of(key))

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        seat = self._seat_of(key)
        if seat.place >= 0:
            seat.place = -1
            self._held -= 1

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        found = self._oldest(1, leavers)
        return found[0] if found else None

    def all_admitted(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        seats, queue = self._seats_of(row), self._queue
        for expert in experts:
            seat = seats[expert]
            self._held += seat.place < 0
            seat.place = len(queue)
            queue.append(seat)

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        self._tidy()
        seats, queue = self._seats_of(row), self._queue
        for expert in experts:
            seat = seats[expert]
            seat.place = len(queue)
            queue.append(seat)

    def evict(self, count: int, leavers: Leavers) -> list[Key]:
        """See `CachePolicy`; one walk from the oldest on."""
        victims = self._oldest(count, leavers)
        for layer, expert in victims:
            seats = self._seats[layer]
            seat = seats[expert]
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
                row = self._rows[seat.layer]
                key = row[seat.expert]
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

    def _seats_of(self, row: Sequence[Key]) -> list[Seat]:
        """The seats of a layer whose keys are `row`, or of more than that."""
        layer = row[0][0]
        while len(self._seats) <= layer:
            self._seats.append([])
            self._rows.append(())
        seats = self._seats[layer]
        if len(seats) < len(row):
            self._rows[layer] = row
            for expert in range(len(seats), len(row)):
                seats.append(make_seat(layer, expert))
        return seats

    def _seat_of(self, key: Key) -> Seat:
        layer, expert = key
        if layer >= len(self._seats) or expert >= len(self._seats[layer]):
            self._seats_of([(layer, other) for other in range(expert + 1)])
        return self._seats[layer][expert]


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

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        free = [key for key in self._keys if leavers.allow(key)]
        return self._random.choice(free) if free else None
