"""Eviction by a score per expert, and by how often it was used."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Leavers, Partition

_TICK = 1 << 20
_SCORE = 1 << 62
_NUMBER_MASK = _TICK - 1
"""An entry of the heap is one number, which is compared much faster than a tuple: score, then tick, then which expert,
for up to 2^20 experts and 2^42 ticks."""


class Rank:
    """Where an expert stands; of numbers alone, so that the garbage collector never looks at it.

    Attributes:
        number: which expert, counted as they are first asked for.
        score, tick: the latest, and when it was given.
        entry_score, entry_tick: those of its entry in the heap, which is never behind where the expert stands;
            tick 0: it has none and is not on the device.
        uses: as far as the policy counts them.
    """

    __slots__ = ("entry_score", "entry_tick", "number", "score", "tick", "uses")
    number: int
    score: int
    tick: int
    entry_score: int
    entry_tick: int
    uses: int


def make_rank(number: int) -> Rank:
    """Of an expert that is not on the device."""
    rank = Rank.__new__(Rank)
    rank.number, rank.score, rank.tick, rank.entry_score, rank.entry_tick, rank.uses = number, 0, 0, 0, 0, 0
    return rank


class ScoredPolicy(CachePolicy):
    """Lowest score leaves first; ties go to the least recently scored. Scores change only through `score`.

    A heap with one entry that counts for each expert. One whose score rises keeps its old entry, which is put right
    when it comes to the top: most never do. One whose score falls gets another, and the old one is stale.
    """

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._heap: list[int] = []
        self._entries: list[int | None] = []
        """By number, the entry that counts."""
        self._ranks: list[Rank] = []
        self._keys: list[Key] = []
        """Likewise by number."""
        self._rows: list[list[Rank]] = []
        """Ranks by layer and expert."""
        self._held = 0
        """How many experts are on the device."""
        self._tick = 0

    def score(self, key: Key, score: int) -> None:
        """Give `key` a new score, an integer."""
        self._score(self._rank_of(key), score)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        rank = self._rank_of(key)
        if rank.entry_tick:
            rank.entry_tick = 0
            self._entries[rank.number] = None
            self._held -= 1

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        found = self._take_lowest(1, leavers)
        if not found:
            return None
        key = found[0]
        heappush(self._heap, self._make_entry(self._rank_of(key)))
        return key

    def evict(self, count: int, leavers: Leavers) -> list[Key]:
        """See `CachePolicy`; those that may not leave are passed over once."""
        victims = self._take_lowest(count, leavers)
        for key in victims:
            self.removed(key)
        return victims

    def _score(self, rank: Rank, score: int) -> None:
        """Give an expert a new score."""
        self._tick += 1
        rank.score, rank.tick = score, self._tick
        if rank.entry_tick and score >= rank.entry_score:
            return
        self._held += not rank.entry_tick
        heappush(self._heap, self._make_entry(rank))
        if len(self._heap) > 4 * self._held + 64:
            entries = self._entries
            self._heap = [entry for entry in self._heap if entries[entry & _NUMBER_MASK] is entry]
            heapify(self._heap)

    def _make_entry(self, rank: Rank) -> int:
        """The entry that counts from now on, where the expert stands."""
        rank.entry_score, rank.entry_tick = rank.score, rank.tick
        entry = rank.score * _SCORE + rank.tick * _TICK + rank.number
        self._entries[rank.number] = entry
        return entry

    def _take_lowest(self, count: int, leavers: Leavers) -> list[Key]:
        """At most so many that may leave, in order; their entries are no longer in the heap."""
        heap, entries, mask = self._heap, self._entries, _NUMBER_MASK
        found: list[Key] = []
        aside: list[int] = []
        while heap and len(found) < count:
            entry = heap[0]
            number = entry & mask
            if entries[number] is not entry:
                heappop(heap)
                continue
            rank = self._ranks[number]
            if rank.tick != rank.entry_tick:
                heapreplace(heap, self._make_entry(rank))
                continue
            heappop(heap)
            key = self._keys[number]
            if leavers.allow(key):
                found.append(key)
            else:
                aside.append(entry)
        for entry in aside:
            heappush(heap, entry)
        return found

    def _ranks_of(self, row: Sequence[Key]) -> list[Rank]:
        """The ranks of a layer whose keys are `row`, or of more than that."""
        layer = row[0][0]
        while len(self._rows) <= layer:
            self._rows.append([])
        ranks = self._rows[layer]
        if len(ranks) < len(row):
            for key in row[len(ranks) :]:
                rank = make_rank(len(self._ranks))
                ranks.append(rank)
                self._ranks.append(rank)
                self._keys.append(key)
                self._entries.append(None)
        return ranks

    def _rank_of(self, key: Key) -> Rank:
        layer, expert = key
        if layer >= len(self._rows) or expert >= len(self._rows[layer]):
            self._ranks_of([(layer, other) for other in range(expert + 1)])
        ranks = self._rows[layer]
        return ranks[expert]


class Lfu(ScoredPolicy):
    """Least frequently used leaves first. Counts outlive eviction, so a returning expert keeps its rank."""

    evicts_ahead = True

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        rank = self._rank_of(key)
        self._score(rank, rank.uses)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        rank = self._rank_of(key)
        rank.uses += 1
        self._score(rank, rank.uses)

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        ranks = self._ranks_of(row)
        for expert in experts:
            rank = ranks[expert]
            rank.uses += 1
            self._score(rank, rank.uses)


class LfuAgeing(ScoredPolicy):
    """LFU with dynamic ageing: the score is uses since admission plus the score of the last victim, so experts
    that were hot long ago fade."""

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._age = 0

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        rank = self._rank_of(key)
        rank.uses = 0
        self._score(rank, self._age)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        rank = self._rank_of(key)
        rank.uses += 1
        self._score(rank, self._age + rank.uses)

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        ranks = self._ranks_of(row)
        for expert in experts:
            rank = ranks[expert]
            rank.uses += 1
            self._score(rank, self._age + rank.uses)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        rank = self._rank_of(key)
        if rank.entry_tick and rank.score > self._age:
            self._age = rank.score
        ScoredPolicy.removed(self, key)
