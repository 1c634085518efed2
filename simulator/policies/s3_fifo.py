"""Three first-in-first-out queues (S3-FIFO)."""

from __future__ import annotations

from collections import OrderedDict

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Leavers, Partition

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
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghost: OrderedDict[Key, None] = OrderedDict()

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = -1
        else:
            self._small[key] = -1

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        queue = self._small if key in self._small else self._main
        queue[key] = min(MAX_USES, queue[key] + 1)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        uses = self._small.pop(key, -1)
        if uses >= 0:  # a prefetch that nobody asked for is not worth remembering
            self._ghost[key] = None
            if len(self._ghost) > self._slots:
                self._ghost.popitem(last=False)
        self._main.pop(key, None)

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        if len(self._small) >= max(1, round(SMALL_SHARE * self._slots)):
            victim = self._from_small(leavers)
            return self._from_main(leavers) if victim is None else victim
        victim = self._from_main(leavers)
        return self._from_small(leavers) if victim is None else victim

    def _from_small(self, leavers: Leavers) -> Key | None:
        """The oldest of the small queue; those that were used more than once on the way move to the main one."""
        for key, uses in list(self._small.items()):
            if not leavers.allow(key):
                continue
            if uses <= 1:
                return key
            del self._small[key]
            self._main[key] = 0
        return None

    def _from_main(self, leavers: Leavers) -> Key | None:
        """The oldest of the main queue without a use since it was last passed over."""
        free = [key for key in self._main if leavers.allow(key)]
        while free:
            for key in free:
                if self._main[key] <= 0:
                    return key
                self._main[key] -= 1
                self._main.move_to_end(key)
        return None
