"""Eviction that knows the future, as a bound: the same decisions as an `OffloadCore` with the `Belady` policy takes, in
a tighter loop over numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from simulator.executed import Routing
from simulator.policies.capacity import Capacity
from simulator.policies.eviction import Key
from trace_capture.model_shape import ModelShape

ABSENT, NEVER = 1, 0
"""Codes of an expert that is not on the device, and of one that is and will not be asked for again. A next use is a
negative number, the farther the smaller: minus its place in the stream of look-ups times L E, minus the expert."""

Misses = npt.NDArray[np.uint16]


def perfect_eviction(
    routing: Routing,
    shape: ModelShape,
    capacity: Capacity,
    cpu_layers: frozenset[int],
    start: Sequence[Key],
    counted: Sequence[bool],
) -> Misses:
    """Misses [passes, L] when the expert whose next use is farthest leaves first; of `cpu_layers` all look-ups.

    A use in a pass that is not counted is as good as none: of the times an expert could be kept, only those that end
    in a counted pass are worth something, and the greedy choice of the earliest end keeps the most of them.

    Args:
        routing: what is asked for.
        shape, capacity: of the model and of the device.
        cpu_layers: layers whose experts never come to the device.
        start: what is there before the first pass.
        counted: passes in which a miss costs something.
    """
    experts = shape.num_experts
    first = [layer * experts + expert for layer, expert in start]
    ids = routing.ids(experts)
    codes = _codes(np.concatenate([np.array(first, dtype=np.int64), ids]), routing, len(first), counted, shape)
    code_of = array("q", [ABSENT]) * (shape.num_moe_layers * experts)
    sizes = shape.expert_bytes
    memory = [PerfectMemory(size, code_of, experts, sizes) for size in capacity.partition_bytes]
    for number, code in zip(first, codes[: len(first)].tolist(), strict=True):
        memory[capacity.partition_of_layer[number // experts]].preload(number, code)
    of_layer: list[PerfectMemory | None] = [
        None if layer in cpu_layers else memory[capacity.partition_of_layer[layer]]
        for layer in range(shape.num_moe_layers)
    ]
    misses = np.zeros(routing.lengths.shape, dtype=np.uint16)
    place = 0
    for number, lengths in enumerate(routing.lengths.tolist()):
        stop = place + sum(lengths)
        one_pass = ids[place:stop].tolist(), codes[len(first) + place : len(first) + stop].tolist()
        misses[number] = _misses_of_pass(lengths, *one_pass, of_layer)
        place = stop
    return misses


def _misses_of_pass(
    lengths: list[int], ids: list[int], codes: list[int], of_layer: list[PerfectMemory | None]
) -> list[int]:
    """Misses of each layer [L] of a pass."""
    misses: list[int] = []
    place = 0
    for layer, asked in enumerate(lengths):
        memory = of_layer[layer]
        misses.append(asked if memory is None else memory.ask(ids, codes, place, place + asked))
        place += asked
    return misses


def _codes(
    ids: npt.NDArray[np.int64], routing: Routing, num_first: int, counted: Sequence[bool], shape: ModelShape
) -> npt.NDArray[np.int64]:
    """The code of the next use, for what is there at the start and then for each look-up."""
    passes = np.repeat(np.arange(len(routing.lengths)), routing.lengths.sum(axis=1))
    passes = np.concatenate([np.zeros(num_first, dtype=np.int64), passes])
    order = np.argsort(ids, kind="stable")
    codes = np.full(len(ids), NEVER, dtype=np.int64)
    same = (ids[order[1:]] == ids[order[:-1]]) & np.asarray(counted, dtype=np.bool_)[passes[order[1:]]]
    following = order[1:][same]
    codes[order[:-1][same]] = -(following * (shape.num_moe_layers * shape.num_experts) + ids[following])
    return codes


class PerfectMemory:
    """A partition of device memory under perfect eviction.

    Who will not be asked for again leaves first, the longest unused of them before the others, then who is asked for
    last. Experts are numbers: layer times E plus expert.

    Args:
        free_bytes: its size.
        code_of: code of each expert [L E], in one array with the other partitions.
        num_experts: E.
        expert_bytes: of each layer.
    """

    def __init__(self, free_bytes: int, code_of: array[int], num_experts: int, expert_bytes: Sequence[int]) -> None:
        self._free_bytes = free_bytes
        self._code_of = code_of
        self._total = len(code_of)
        self._num_experts = num_experts
        self._expert_bytes = list(expert_bytes)
        self._heap: list[int] = []
        """Codes of next uses; one counts while its expert has it."""
        self._unasked: list[int] = []
        """Experts that were used for the last time, in order of that use."""
        self._head = 0
        """Before it nothing in `_unasked` counts."""
        self._unasked_at = array("q", [-1]) * self._total
        """Place of each expert in `_unasked` that counts."""
        self._pinned = bytearray(self._total)
        self._held = 0

    def preload(self, number: int, code: int) -> None:
        """Have an expert there from the start."""
        self._free_bytes -= self._expert_bytes[number // self._num_experts]
        self._held += 1
        self._use(number, code)

    def ask(self, ids: list[int], codes: list[int], place: int, stop: int) -> int:
        """Look experts of one layer up, `ids[place:stop]` with the codes of their next uses, in waves where they do
        not fit at once. Gives how many were missing."""
        missing: list[int] = []
        for at in range(place, stop):
            number = ids[at]
            self._pinned[number] = 1
            if self._code_of[number] == ABSENT:
                missing.append(number)
        num_missing, waiting = len(missing), stop - place
        while waiting:
            while missing and self._make_room(missing[0]):
                self._code_of[missing[0]] = NEVER
                del missing[0]
            for at in range(place, stop):
                number = ids[at]
                if self._pinned[number] and self._code_of[number] != ABSENT:
                    self._pinned[number] = 0
                    self._use(number, codes[at])
                    waiting -= 1
        return num_missing

    def _use(self, number: int, code: int) -> None:
        """An expert that is there was asked for, and will be again as its new code says."""
        value = code
        self._code_of[number] = value
        if value == NEVER:
            self._unasked_at[number] = len(self._unasked)
            self._unasked.append(number)
            return
        heappush(self._heap, code)
        if len(self._heap) > 4 * self._held + 64:
            kept: list[int] = []
            for entry in self._heap:
                if self._code_of[-entry % self._total] == entry:
                    kept.append(entry)
            heapify(kept)
            self._heap = kept

    def _make_room(self, newcomer: int) -> bool:
        """Take the bytes of an expert, evicting who is asked for last; False, with nobody evicted, when it cannot."""
        size, free = self._expert_bytes[newcomer // self._num_experts], self._free_bytes
        victims: list[int] = []
        while free < size:
            victim = self._farthest()
            if victim < 0:
                self._restore(victims)
                return False
            victims.append(victim)
            free += self._expert_bytes[victim // self._num_experts]
        for victim in victims:
            self._code_of[victim] = ABSENT
        self._held += 1 - len(victims)
        self._free_bytes = free - size
        return True

    def _farthest(self) -> int:
        """Take out the expert that is not pinned and leaves next; -1 where there is none. Those that are pinned are
        taken out as well: they come back when they are used."""
        while self._head < len(self._unasked):
            number = self._unasked[self._head]
            is_current = self._unasked_at[number] == self._head and self._code_of[number] == NEVER
            self._head += 1
            if is_current and not self._pinned[number]:
                return number
        while self._heap:
            code = heappop(self._heap)
            number = -code % self._total
            if self._code_of[number] == code and not self._pinned[number]:
                return number
        return -1

    def _restore(self, victims: list[int]) -> None:
        """Put those back that were taken out, in front of the others."""
        unasked: list[int] = []
        for number in victims:
            if self._code_of[number] == NEVER:
                unasked.append(number)
            else:
                heappush(self._heap, self._code_of[number])
        for at in range(self._head, len(self._unasked)):
            number = self._unasked[at]
            if self._unasked_at[number] == at and self._code_of[number] == NEVER:
                unasked.append(number)
        for at in range(len(unasked)):
            self._unasked_at[unasked[at]] = at
        self._unasked, self._head = unasked, 0
