"""Eviction by a score per expert, and by how often it was used."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Leavers, Partition


class ScoredPolicy(CachePolicy):
    """Lowest score leaves first; ties go to the least recently scored. Scores change only through `score`.

    A heap with stale entries, rebuilt when most are stale: an entry counts only if it is the newest of its key.
    """

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._heap: list[tuple[float, int, Key]] = []
        self._current: dict[Key, tuple[float, int]] = {}
        self._tick = 0

    def score(self, key: Key, score: float) -> None:
        """Give `key` a new score."""
        self._tick += 1
        self._current[key] = (score, self._tick)
        heapq.heappush(self._heap, (score, self._tick, key))
        if len(self._heap) > 8 * len(self._current) + 64:
            self._rebuild()

    def score_all(self, keys: Sequence[Key], scores: Sequence[float]) -> None:
        """Give each of `keys` its new score, in order."""
        current, heap, tick, push = self._current, self._heap, self._tick, heapq.heappush
        for place, key in enumerate(keys):
            tick += 1
            score = scores[place]
            current[key] = (score, tick)
            push(heap, (score, tick, key))
        self._tick = tick
        if len(heap) > 8 * len(current) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        """Leave out the stale entries."""
        self._heap = [(*rank, other) for other, rank in self._current.items()]
        heapq.heapify(self._heap)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._current.pop(key, None)

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        aside: list[tuple[float, int, Key]] = []
        victim = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            score, tick, key = entry
            if self._current.get(key) != (score, tick):
                continue
            aside.append(entry)
            if leavers.allow(key):
                victim = key
                break
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return victim


class Lfu(ScoredPolicy):
    """Least frequently used leaves first. Counts outlive eviction, so a returning expert keeps its rank."""

    evicts_ahead = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._count: dict[Key, int] = {}

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        self.score(key, self._count.get(key, 0))

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        self._count[key] = self._count.get(key, 0) + 1
        self.score(key, self._count[key])

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        count = self._count
        keys = [row[expert] for expert in experts]
        scores: list[int] = []
        for key in keys:
            count[key] = uses = count.get(key, 0) + 1
            scores.append(uses)
        self.score_all(keys, scores)


class LfuAgeing(ScoredPolicy):
    """LFU with dynamic ageing: the score is uses since admission plus the score of the last victim, so experts
    that were hot long ago fade."""

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
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

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        uses, age = self._uses, self._age
        keys = [row[expert] for expert in experts]
        scores: list[float] = []
        for key in keys:
            uses[key] += 1
            scores.append(age + uses[key])
        self.score_all(keys, scores)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        if key in self._current:
            self._age = max(self._age, self._current[key][0])
        super().removed(key)
