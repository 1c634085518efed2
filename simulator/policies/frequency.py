"""Eviction by a score per expert, and by how often it was used."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Leavers, Partition
from simulator.policies.rank_heap import Rank, RankHeap, make_rank


class ScoredPolicy(CachePolicy):
    """Lowest score leaves first; ties go to the least recently scored. Scores are integers and change only through
    `score`.

    One whose score rises stays where it is in the heap and is put right when it comes to the top: most never do.
    """

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        self._heap = RankHeap()
        """Of those on the device."""
        self._rows: list[Sequence[Key]] = []
        """Keys by layer and expert, as far as they were asked for."""
        self._ranks: list[list[Rank]] = []
        """Likewise."""
        self._tick = 0

    def score(self, key: Key, score: int) -> None:
        """Give `key`, which is on the device, a new score."""
        self._score(self._rank_of(key), score)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        rank = self._rank_of(key)
        if rank.place >= 0:
            self._heap.remove(rank)
            self._left(rank)

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        lowest = self._take_lowest(1, leavers)
        if not lowest:
            return None
        rank = lowest[0]
        self._heap.push(rank)
        return self._key_of(rank)

    def evict(self, count: int, leavers: Leavers) -> list[Key]:
        """See `CachePolicy`; those that may not leave are passed over once."""
        victims: list[Key] = []
        for rank in self._take_lowest(count, leavers):
            self._left(rank)
            victims.append(self._key_of(rank))
        return victims

    def _left(self, rank: Rank) -> None:
        """One has left the device."""

    def _score(self, rank: Rank, score: int) -> None:
        """Give an expert on the device a new score."""
        self._tick += 1
        rank.score, rank.tick = score, self._tick
        if rank.place < 0:
            self._heap.push(rank)
        elif score < rank.heap_score:
            self._heap.lower(rank)

    def _take_lowest(self, count: int, leavers: Leavers) -> list[Rank]:
        """At most so many that may leave, in order; they are no longer in the heap."""
        heap = self._heap
        ranks = heap.ranks
        found: list[Rank] = []
        aside: list[Rank] = []
        while ranks and len(found) < count:
            rank = ranks[0]
            if rank.tick != rank.heap_tick:
                heap.correct(rank)
                continue
            heap.remove(rank)
            if leavers.allow(self._key_of(rank)):
                found.append(rank)
            else:
                aside.append(rank)
        for rank in aside:
            heap.push(rank)
        return found

    def _ranks_of(self, row: Sequence[Key]) -> list[Rank]:
        """The ranks of a layer whose keys are `row`, or of more than that."""
        layer = row[0][0]
        while len(self._ranks) <= layer:
            self._ranks.append([])
            self._rows.append(())
        ranks = self._ranks[layer]
        if len(ranks) < len(row):
            self._rows[layer] = row
            for expert in range(len(ranks), len(row)):
                ranks.append(make_rank(layer, expert))
        return ranks

    def _rank_of(self, key: Key) -> Rank:
        layer, expert = key
        if layer >= len(self._ranks) or expert >= len(self._ranks[layer]):
            self._ranks_of([(layer, other) for other in range(expert + 1)])
        ranks = self._ranks[layer]
        return ranks[expert]

    def _key_of(self, rank: Rank) -> Key:
        row = self._rows[rank.layer]
        return row[rank.expert]


class Lfu(ScoredPolicy):
    """Least frequently used leaves first. Counts outlive eviction, so a returning expert keeps its rank."""

    evicts_ahead = True

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        rank = self._rank_of(key)
        self._score(rank, rank.uses)

    def all_admitted(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        ranks = self._ranks_of(row)
        for expert in experts:
            rank = ranks[expert]
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

    def all_admitted(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        ranks = self._ranks_of(row)
        for expert in experts:
            rank = ranks[expert]
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

    def _left(self, rank: Rank) -> None:
        self._age = max(self._age, rank.score)
