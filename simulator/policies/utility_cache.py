"""Eviction and loading in the space of utilities: the coldest expert leaves, the hottest is loaded first.

After MoE-SpAc (arXiv 2603.09983): residents in a pool sorted by state, of which those below the threshold may leave,
and requests in a priority queue by state. Different from its released code: a state is kept while and after a layer
runs (there every resident of the layer falls to 0), and a stale request is dropped wherever it is in the queue (there
only at its front).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from simulator.policies.eviction import UNSPECIFIED, Key, Leavers, Partition
from simulator.policies.frequency import ScoredPolicy
from trace_capture.errors import ConfigError

_STEP = float(1 << 40)
"""A score is a state times this, plus the time of the last use: exact in a float for 2^40 uses."""


class UtilityCache(ScoredPolicy):
    """The lowest utility leaves first; among equals the least recently used.

    Experts that a layer is computing are pinned by the core and keep their state meanwhile. A victim is found in
    O(log n) of the experts on the device, beside those that are pinned.

    Raises:
        ConfigError: the partition has no utility signal.
    """

    needs_token_counts = True
    needs_utility = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        if partition.utility is None:
            raise ConfigError("cache.policy = 'utility' needs a utility signal; make the core from a configuration")
        self._signal = partition.utility
        self.threshold = self._signal.top + 1
        """Only states below it leave; above the top, as at first, everything may."""
        self._uses = 0
        self._last_use: dict[Key, int] = {}

    def routed(self, layer: int, experts: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """See `CachePolicy`; the layer's utilities move."""
        self._signal.route(layer, experts, tokens)
        states = self._signal.states[layer]
        for key in [key for key in self._current if key[0] == layer]:
            if self.state(key) != states[key[1]]:
                self._rank(key)

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._last_use[key] = self._uses
        self._rank(key)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._uses += 1
        self._last_use[key] = self._uses
        self._rank(key)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._last_use.pop(key, None)
        super().removed(key)

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`; None also where nothing below the threshold may leave."""
        victim = super().choose_victim(leavers)
        return None if victim is None or self.state(victim) >= self.threshold else victim

    def state(self, key: Key) -> int:
        """The utility by which a resident expert is ranked now."""
        return int(self._current[key][0] // _STEP)

    def _rank(self, key: Key) -> None:
        self.score(key, float(self._signal.states[key]) * _STEP + self._last_use[key])


class UtilityQueue:
    """Requests for experts, the most useful first; among equals the oldest. A key is queued once.

    Args:
        top: the highest state of the utility signal. Experts that a predictor names for the next layer (Speculating
            Experts, arXiv 2603.19289) enter one level above it.
    """

    def __init__(self, top: int) -> None:
        self.predicted_level = top + 1
        self._heap: list[tuple[int, int, Key]] = []
        self._current: dict[Key, tuple[int, int]] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: Key) -> bool:
        return key in self._current

    def push(self, key: Key, level: int) -> None:
        """Ask for `key`; one that is queued takes the new level, and keeps its place where that is its old one."""
        if key in self._current and self._current[key][0] == -level:
            return
        self._tick += 1
        self._current[key] = (-level, self._tick)
        heapq.heappush(self._heap, (-level, self._tick, key))

    def pop(self, threshold: int) -> Key | None:
        """The next key to load, or None where nothing reaches the threshold."""
        while self._heap:
            rank, tick, key = self._heap[0]
            if self._current.get(key) != (rank, tick):
                heapq.heappop(self._heap)
                continue
            if -rank < threshold:
                return None
            heapq.heappop(self._heap)
            del self._current[key]
            return key
        return None

    def drop(self, is_stale: Callable[[Key], bool]) -> tuple[Key, ...]:
        """Forget requests wherever they are in the queue, such as those of a layer that has passed."""
        stale = tuple(key for key in self._current if is_stale(key))
        for key in stale:
            del self._current[key]
        return stale
