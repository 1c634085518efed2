"""Eviction and loading in the space of utilities: the coldest expert leaves, the hottest is loaded first.

After MoE-SpAc (arXiv 2603.09983): residents in a pool sorted by state, of which those below the threshold may leave,
and requests in a priority queue by state. Different from its released code: a state is kept while and after a layer
runs (there every resident of the layer falls to 0), and a stale request is dropped wherever it is in the queue (there
only at its front).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Leavers, Partition
from simulator.policies.utility import UtilitySignal
from trace_capture.errors import ConfigError

_STEP = 1 << 40
"""A rank is a state times this, plus the time of the last use."""


class Place:
    """An expert that is or was on the device; of numbers alone, so that the garbage collector never looks at it.

    Attributes:
        expert: its id.
        state: the utility by which it is ranked.
        last_use: how many uses there had been when it was used last, or admitted since.
        rank: of both; the lowest leaves first.
        tick: when it was ranked last; no two are equal. Of equal ranks the lowest leaves first.
        is_held: whether it is on the device.
    """

    __slots__ = ("expert", "is_held", "last_use", "rank", "state", "tick")
    expert: int
    state: int
    last_use: int
    rank: int
    tick: int
    is_held: bool


class Shelf:
    """The experts of one layer that are on the device.

    Attributes:
        row: keys of the layer by expert [E].
        places: by expert [E], as far as they were ever on the device.
        held: those that are, in order of admission.
        coldest: who of them would leave first; None where it must be found again.
    """

    __slots__ = ("coldest", "held", "places", "row")

    def __init__(self, layer: int, num_experts: int) -> None:
        self.row: list[Key] = [(layer, expert) for expert in range(num_experts)]
        self.places: list[Place | None] = [None] * num_experts
        self.held: list[Place] = []
        self.coldest: Place | None = None


class UtilityCache(CachePolicy):
    """The lowest utility leaves first; among equals the least recently used.

    Experts that a layer is computing are pinned by the core and keep their state meanwhile. Each layer knows its
    coldest expert until something about it changes, which it does for the layer that runs and for those that lose an
    expert; the next victim is the coldest of the layers' coldest.

    Raises:
        ConfigError: the partition has no utility signal.
    """

    needs_token_counts = True
    needs_utility = True
    evicts_ahead = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        if partition.utility is None:
            raise ConfigError("cache.policy = 'utility' needs a utility signal; make the core from a configuration")
        self._signal: UtilitySignal = partition.utility
        self.threshold = self._signal.top + 1
        """Only states below it leave; above the top, as at first, everything may."""
        self._uses = 0
        self._tick = 0
        self._step = _STEP
        self._shelves: list[Shelf] = []
        self._shelf_of_layer: dict[int, Shelf] = {}
        """Of the layers that were asked for."""

    def routed(self, layer: int, experts: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """See `CachePolicy`; the layer's utilities move."""
        self._signal.route(layer, experts, tokens)
        shelf = self._shelf_of(layer)
        shelf.coldest = None
        cells, first = self._signal.cells, layer * self._signal.num_experts
        for place in shelf.held:
            if cells[first + place.expert] != place.state:
                self._rank(place, cells[first + place.expert])

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        layer, expert = key
        self._admit(layer, expert)

    def all_admitted(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        for expert in experts:
            self._admit(row[0][0], expert)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        layer, expert = key
        self._use(layer, (expert,))

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""
        self._use(row[0][0], experts)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        layer, expert = key
        shelf = self._shelf_of(layer)
        place = shelf.places[expert]
        if place is not None and place.is_held:
            place.is_held = False
            shelf.held.remove(place)
            shelf.coldest = None

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`; None also where nothing below the threshold may leave."""
        victim: Key | None = None
        rank, tick = self.threshold * self._step, 0
        for shelf in self._shelves:
            if not shelf.held:
                continue
            place = shelf.coldest
            if place is None:
                place = shelf.coldest = self._coldest(shelf)
            if place.rank > rank or (place.rank == rank and place.tick > tick):
                continue
            if not leavers.allow(shelf.row[place.expert]):
                place = self._coldest_of(shelf, leavers, rank, tick)
                if place is None:
                    continue
            victim, rank, tick = shelf.row[place.expert], place.rank, place.tick
        return victim

    def state(self, key: Key) -> int:
        """The utility by which a resident expert is ranked now."""
        layer, expert = key
        place = self._shelf_of(layer).places[expert]
        if place is None or not place.is_held:
            raise KeyError(key)
        return place.state

    def _coldest(self, shelf: Shelf) -> Place:
        """Of a layer that holds any."""
        found = shelf.held[0]
        rank = found.rank
        for place in shelf.held:
            if place.rank <= rank and (place.rank < rank or place.tick < found.tick):
                found, rank = place, place.rank
        return found

    def _coldest_of(self, shelf: Shelf, leavers: Leavers, rank: int, tick: int) -> Place | None:
        """Of those of a layer that may leave and are colder than a rank and tick."""
        found: Place | None = None
        for place in shelf.held:
            if place.rank <= rank and (place.rank < rank or place.tick < tick):
                if leavers.allow(shelf.row[place.expert]):
                    found, rank, tick = place, place.rank, place.tick
        return found

    def _admit(self, layer: int, expert: int) -> None:
        shelf = self._shelf_of(layer)
        place = shelf.places[expert]
        if place is None:
            place = Place.__new__(Place)
            place.expert, place.is_held = expert, False
            shelf.places[expert] = place
        if not place.is_held:
            place.is_held = True
            shelf.held.append(place)
        shelf.coldest = None
        place.last_use = self._uses
        self._rank(place, self._signal.cells[layer * self._signal.num_experts + expert])

    def _use(self, layer: int, experts: Sequence[int]) -> None:
        shelf = self._shelf_of(layer)
        shelf.coldest = None
        places, cells, first = shelf.places, self._signal.cells, layer * self._signal.num_experts
        for expert in experts:
            place = places[expert]
            if place is None:
                raise KeyError((layer, expert))
            self._uses += 1
            place.last_use = self._uses
            self._rank(place, cells[first + expert])

    def _rank(self, place: Place, state: int) -> None:
        self._tick += 1
        place.state, place.tick = state, self._tick
        place.rank = state * self._step + place.last_use

    def _shelf_of(self, layer: int) -> Shelf:
        shelf = self._shelf_of_layer.get(layer)
        if shelf is None:
            shelf = self._shelf_of_layer[layer] = Shelf(layer, self._signal.num_experts)
            self._shelves.append(shelf)
        return shelf


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
        self._of_layer: dict[int, list[Key]] = {}
        """What was asked for of each layer since it last passed, of which some is no longer queued."""
        self._tick = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: Key) -> bool:
        return key in self._current

    def push(self, key: Key, level: int) -> None:
        """Ask for `key`; one that is queued takes the new level, and keeps its place where that is its old one."""
        current = self._current.get(key)
        if current is None:
            self._of_layer.setdefault(key[0], []).append(key)
        elif current[0] == -level:
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

    def drop_layer(self, layer: int) -> None:
        """Forget the requests of a layer that has passed, wherever they are in the queue."""
        for key in self._of_layer.pop(layer, ()):
            self._current.pop(key, None)
