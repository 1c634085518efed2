"""Three first-in-first-out queues (S3-FIFO)."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Leavers, Partition
from simulator.policies.seats import Seat, SeatQueue, SeatTable

SMALL_SHARE = 0.1
"""Share of the partition that the small queue may take before it is evicted from (the paper's choice)."""
MAX_USES = 3
"""Uses are counted up to this (two bits in the paper)."""


class S3Fifo(CachePolicy):
    """A small queue for the new, a main queue for what was used twice more, a ghost queue of what left the small one.

    Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1: most experts that are used
    once are not used again soon, so they leave by the small queue without touching the main one; an expert that the
    ghost queue remembers enters the main queue at once. The use that a load was made for is not counted.
    """

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._slots = max(1, partition.capacity_bytes // partition.expert_bytes)
        self._small_slots = max(1, round(SMALL_SHARE * self._slots))
        self._max_uses = MAX_USES
        self._table = SeatTable()
        self._small, self._main, self._ghost = SeatQueue(1), SeatQueue(2), SeatQueue(3)

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        seat = self._table.find(key)
        seat.uses = -1
        if seat.queue == self._ghost.number:
            self._ghost.drop(seat)
            self._main.append(seat)
        else:
            self._small.append(seat)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._count(self._table.find(key))

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        seats = self._table.of_row(row)
        for expert in experts:
            self._count(seats[expert])

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        seat = self._table.find(key)
        if seat.queue == self._main.number:
            self._main.drop(seat)
        elif seat.queue == self._small.number:
            self._small.drop(seat)
            if seat.uses >= 0:  # a prefetch that nobody asked for is not worth remembering
                self._remember(seat)

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        self._small.tidy()
        self._main.tidy()
        if self._small.held >= self._small_slots:
            victim = self._from_small(leavers)
            return self._from_main(leavers) if victim is None else victim
        victim = self._from_main(leavers)
        return self._from_small(leavers) if victim is None else victim

    def _count(self, seat: Seat) -> None:
        """One use more."""
        if seat.uses < self._max_uses:
            seat.uses += 1

    def _remember(self, seat: Seat) -> None:
        """The ghost queue takes one, and forgets its oldest when it holds as many as the partition has room for."""
        ghost = self._ghost
        ghost.append(seat)
        if ghost.held > self._slots:
            ghost.drop(ghost.entries[ghost.first()])
        ghost.tidy()

    def _from_small(self, leavers: Leavers) -> Key | None:
        """The oldest of the small queue; those that were used more than once on the way move to the main one."""
        small = self._small
        for place in range(small.first(), len(small.entries)):
            if not small.counts(place):
                continue
            seat = small.entries[place]
            key = self._table.key_of(seat)
            if not leavers.allow(key):
                continue
            if seat.uses <= 1:
                return key
            small.drop(seat)
            seat.uses = 0
            self._main.append(seat)
        return None

    def _from_main(self, leavers: Leavers) -> Key | None:
        """The oldest of the main queue without a use since it was last passed over. Those passed over move to the end,
        where the walk meets them again."""
        main = self._main
        place = main.first()
        while place < len(main.entries):
            if main.counts(place):
                seat = main.entries[place]
                key = self._table.key_of(seat)
                if leavers.allow(key):
                    if seat.uses <= 0:
                        return key
                    seat.uses -= 1
                    main.requeue(seat)
            place += 1
        return None
