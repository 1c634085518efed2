"""A heap of experts by score, in which each knows its place."""

from __future__ import annotations


class Rank:
    """Where an expert stands; of numbers alone, so that the garbage collector never looks at it.

    Attributes:
        layer, expert: its key.
        score, tick: the latest, and when it was given.
        heap_score, heap_tick: those by which it stands in the heap.
        place: in the heap; -1: it is not in it.
        uses: as far as a policy counts them.
    """

    __slots__ = ("expert", "heap_score", "heap_tick", "layer", "place", "score", "tick", "uses")
    layer: int
    expert: int
    score: int
    tick: int
    heap_score: int
    heap_tick: int
    place: int
    uses: int


def make_rank(layer: int, expert: int) -> Rank:
    """Of an expert that is not in the heap."""
    rank = Rank.__new__(Rank)
    rank.layer, rank.expert, rank.place, rank.uses = layer, expert, -1, 0
    rank.score, rank.tick, rank.heap_score, rank.heap_tick = 0, 0, 0, 0
    return rank


def is_before(one: Rank, other: Rank) -> bool:
    """Whether `one` stands before `other`: the lower score, and among equals the earlier tick."""
    if one.heap_score == other.heap_score:
        return one.heap_tick < other.heap_tick
    return one.heap_score < other.heap_score


class RankHeap:
    """The lowest score is at the top. Not the heap of the standard library, since that compares Python's objects and
    cannot move one whose score has changed.

    Attributes:
        ranks: as a heap; see `heapq`.
    """

    def __init__(self) -> None:
        self.ranks: list[Rank] = []

    def push(self, rank: Rank) -> None:
        """One enters by its latest score."""
        rank.heap_score, rank.heap_tick = rank.score, rank.tick
        self.ranks.append(rank)
        self._rise(rank, len(self.ranks) - 1)

    def lower(self, rank: Rank) -> None:
        """One whose score has fallen moves towards the top."""
        rank.heap_score, rank.heap_tick = rank.score, rank.tick
        self._rise(rank, rank.place)

    def correct(self, rank: Rank) -> None:
        """One whose score has risen, or was given again, moves away from the top."""
        rank.heap_score, rank.heap_tick = rank.score, rank.tick
        self._sink(rank, rank.place)

    def remove(self, rank: Rank) -> None:
        """One leaves, wherever it stands."""
        place, last = rank.place, self.ranks.pop()
        rank.place = -1
        if last is not rank:
            if is_before(last, rank):
                self._rise(last, place)
            else:
                self._sink(last, place)

    def _rise(self, rank: Rank, place: int) -> None:
        ranks = self.ranks
        while place > 0:
            parent = (place - 1) >> 1
            other = ranks[parent]
            if is_before(other, rank):
                break
            ranks[place], other.place = other, place
            place = parent
        ranks[place], rank.place = rank, place

    def _sink(self, rank: Rank, place: int) -> None:
        ranks = self.ranks
        end = len(ranks)
        child = 2 * place + 1
        while child < end:
            other = ranks[child]
            if child + 1 < end:
                right = ranks[child + 1]
                if is_before(right, other):
                    other, child = right, child + 1
            if is_before(rank, other):
                break
            ranks[place], other.place = other, place
            place, child = child, 2 * child + 1
        ranks[place], rank.place = rank, place
