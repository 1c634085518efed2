"""The host-to-device link in simulated time: one copy at a time, the most urgent queued one next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from typing import NamedTuple

import simpy

from simulator.policies.cache import Key
from simulator.policies.core import Load


class Copy(NamedTuple):
    """A finished copy, for the timeline."""

    load: Load
    start_ns: int
    end_ns: int


class SimulatedLink:
    """A DMA engine with a priority queue. One event per copy, one per stall.

    Args:
        env: the simulation; its time is integer nanoseconds.
        copy_ns: duration of a copy by its bytes.
    """

    def __init__(self, env: simpy.Environment, copy_ns: Callable[[int], int]) -> None:
        self._env = env
        self._copy_ns = copy_ns
        self._queue: list[tuple[int, int, int, Load]] = []
        self._sequence = 0
        self._in_flight: Load | None = None
        self._cancelled: set[int] = set()
        self._queued: dict[Key, int] = {}
        self._landed: list[Key] = []
        self._awaited: set[Key] = set()
        self._barrier: simpy.Event | None = None
        self.copies: list[Copy] = []

    def submit(self, load: Load, earliest_ns: int) -> None:
        """Queue a copy that may not begin before `earliest_ns` (when its submission has been issued)."""
        self._sequence += 1
        self._queued[load.key] = self._sequence
        heapq.heappush(self._queue, (load.priority, self._sequence, earliest_ns, load))
        if self._in_flight is None:
            self._start_next()

    def cancel(self, key: Key) -> bool:
        """Withdraw a queued copy; False when it has begun."""
        sequence = self._queued.pop(key, None)
        if sequence is None:
            return False
        self._cancelled.add(sequence)
        return True

    def drain(self) -> list[Key]:
        """Keys that have landed since the last call, in order."""
        landed, self._landed = self._landed, []
        return landed

    def barrier(self, keys: Collection[Key]) -> simpy.Event | None:
        """An event for when all `keys` have landed, or None when they already have (and were not yet drained)."""
        self._awaited = set(keys).difference(self._landed)
        if not self._awaited:
            return None
        self._barrier = self._env.event()
        return self._barrier

    def _start_next(self) -> None:
        while self._queue:
            _, sequence, earliest_ns, load = heapq.heappop(self._queue)
            if sequence in self._cancelled:
                self._cancelled.discard(sequence)
                continue
            del self._queued[load.key]
            self._in_flight = load
            start_ns = max(int(self._env.now), earliest_ns)
            end_ns = start_ns + self._copy_ns(load.num_bytes)
            self.copies.append(Copy(load, start_ns, end_ns))
            event = self._env.timeout(end_ns - int(self._env.now))
            event.callbacks.append(self._finish)
            return
        self._in_flight = None

    def _finish(self, _: simpy.Event) -> None:
        if self._in_flight is None:
            raise RuntimeError("a copy finished on an idle link")
        key = self._in_flight.key
        self._landed.append(key)
        self._awaited.discard(key)
        if self._barrier is not None and not self._awaited:
            self._barrier.succeed()
            self._barrier = None
        self._start_next()
