"""Which expert leaves when another needs its place.

A new policy is one class here and one line in `CACHE_POLICIES`; replay, tuner, live engine and dashboard then
know it by that name.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from simulator.policies.errors import unknown_name

Key = tuple[int, int]
"""(MoE layer index, expert id)."""


class CachePolicy:
    """Order of eviction within one partition of device memory.

    The core calls, in this order: `admitted` when a load of an absent expert is planned, `used` for each expert
    that a layer asks for (in the router's order, after its load was planned), `choose_victim` while room is
    needed, and `removed` for every key that leaves. `expired` is asked once after each layer. A policy sees keys
    only; which of them may leave now is told by the predicate it is given.
    """

    def admitted(self, key: Key) -> None:
        """A load of `key` into this partition was planned."""
        raise NotImplementedError

    def used(self, key: Key) -> None:
        """A layer asks for `key`, which is resident or being loaded."""
        raise NotImplementedError

    def removed(self, key: Key) -> None:
        """`key` left the partition."""
        raise NotImplementedError

    def choose_victim(self, can_leave: Callable[[Key], bool]) -> Key | None:
        """The key to evict next among those that `can_leave`, or None when there is none."""
        raise NotImplementedError

    def expired(self, layer_keys: Sequence[Key]) -> Iterable[Key]:
        """Keys to drop now that their layer has run; by default none."""
        return ()


class Lru(CachePolicy):
    """Least recently used leaves first."""

    def __init__(self) -> None:
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


class NoCache(Lru):
    """Nothing outlives its layer: what on-demand engines without an expert cache do."""

    def expired(self, layer_keys: Sequence[Key]) -> Iterable[Key]:
        """See `CachePolicy`."""
        return layer_keys


class ScoredPolicy(CachePolicy):
    """Lowest score leaves first; ties go to the least recently scored. Scores change only through `score`.

    A heap with stale entries, rebuilt when most are stale: an entry counts only if it is the newest of its key.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Key]] = []
        self._current: dict[Key, tuple[float, int]] = {}
        self._tick = 0

    def score(self, key: Key, score: float) -> None:
        """Give `key` a new score."""
        self._tick += 1
        self._current[key] = (score, self._tick)
        heapq.heappush(self._heap, (score, self._tick, key))
        if len(self._heap) > 8 * len(self._current) + 64:
            self._heap = [(*rank, other) for other, rank in self._current.items()]
            heapq.heapify(self._heap)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._current.pop(key, None)

    def choose_victim(self, can_leave: Callable[[Key], bool]) -> Key | None:
        """See `CachePolicy`."""
        aside: list[tuple[float, int, Key]] = []
        victim = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            score, tick, key = entry
            if self._current.get(key) != (score, tick):
                continue
            aside.append(entry)
            if can_leave(key):
                victim = key
                break
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return victim


class Lfu(ScoredPolicy):
    """Least frequently used leaves first. Counts outlive eviction, so a returning expert keeps its rank."""

    def __init__(self) -> None:
        super().__init__()
        self._count: dict[Key, int] = {}

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        self.score(key, self._count.get(key, 0))

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._count[key] = self._count.get(key, 0) + 1
        self.score(key, self._count[key])


class LfuAgeing(ScoredPolicy):
    """LFU with dynamic ageing: the score is uses since admission plus the score of the last victim, so experts
    that were hot long ago fade."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[Key, int] = {}
        self._age = 0.0

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._uses[key] = 0
        self.score(key, self._age)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._uses[key] += 1
        self.score(key, self._age + self._uses[key])

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        if key in self._current:
            self._age = max(self._age, self._current[key][0])
        super().removed(key)


class Random(CachePolicy):
    """A uniformly random expert leaves; seeded, so that runs repeat. The floor any policy must beat."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
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


CACHE_POLICIES: dict[str, Callable[[], CachePolicy]] = {
    "none": NoCache,
    "lru": Lru,
    "lfu": Lfu,
    "lfu-ageing": LfuAgeing,
    "random": Random,
}


def make_cache_policy(name: str) -> CachePolicy:
    """A fresh cache policy by its registered name.

    Raises:
        ConfigError: the name is not registered.
    """
    if name not in CACHE_POLICIES:
        raise unknown_name("cache policy", name, CACHE_POLICIES)
    return CACHE_POLICIES[name]()
