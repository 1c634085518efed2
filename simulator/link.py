"""The host-to-device link in simulated time: one copy at a time, the most urgent queued one next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

import simpy
from simpy.events import URGENT

from simulator.policies.cache import Key
from simulator.policies.plans import Load

NEVER_NS = 1 << 62


class Copy(NamedTuple):
    """A copy that has begun, for the timeline."""

    load: Load
    start_ns: int
    end_ns: int


class Landing(simpy.Event):  # type: ignore[misc]  # mypy does not follow into simpy
    """The end of a copy. Comes before everything else of the same nanosecond: what ends at t has landed at t."""

    def __init__(self, env: simpy.Environment, delay_ns: int, callback: Callable[[simpy.Event], None]) -> None:
        self.env = env  # as in simpy's Timeout, without the call of the base class: this runs once per copy
        self.callbacks = [callback]
        self._ok = True
        self._value = None
        env.schedule(self, URGENT, delay_ns)


class SimulatedLink:
    """A DMA engine with a priority queue. One event per copy, one per stall.

    Args:
        env: the simulation; its time is integer nanoseconds.
        copy_ns: duration of a copy by its bytes.
        record_copies: keep every copy in `copies`.
        note_landings: keep `landings`.

    Attributes:
        ends_ns: when the copy in flight ends; `NEVER_NS` when the link is idle.
        copies: the copies that have begun, in order, if recorded.
        landings: copies that have landed since the last `drain`, with their ends, if noted.
    """

    def __init__(
        self,
        env: simpy.Environment,
        copy_ns: Callable[[int], int],
        record_copies: bool = False,
        note_landings: bool = False,
    ) -> None:
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
        self._record_copies = record_copies
        self.ends_ns = NEVER_NS
        self.copies: list[Copy] = []
        self._note_landings = note_landings
        self.landings: list[tuple[int, Load]] = []

    def submit(self, load: Load, earliest_ns: int) -> None:
        """Queue a copy that may not begin before `earliest_ns` (when its submission has been issued)."""
        if self._in_flight is None:
            self._start(load, earliest_ns)
            return
        self._sequence += 1
        self._queued[load.key] = self._sequence
        heapq.heappush(self._queue, (load.priority, self._sequence, earliest_ns, load))

    def cancel(self, key: Key) -> bool:
        """Withdraw a queued copy; False when it has begun."""
        sequence = self._queued.pop(key, None)
        if sequence is None:
            return False
        self._cancelled.add(sequence)
        return True

    def drain(self) -> list[Key]:
        """Keys that have landed since the last call, in order."""
        if not self._landed:
            return []
        landed, self._landed = self._landed, []
        self.landings.clear()
        return landed

    def barrier(self, keys: Iterable[Key]) -> simpy.Event | None:
        """An event for when all `keys` have landed, or None when they already have (and were not yet drained)."""
        self._awaited = set(keys).difference(self._landed)
        if not self._awaited:
            return None
        self._barrier = self._env.event()
        return self._barrier

    def _start(self, load: Load, earliest_ns: int) -> None:
        self._in_flight = load
        now_ns = int(self._env.now)
        start_ns = max(now_ns, earliest_ns)
        self.ends_ns = start_ns + self._copy_ns(load.num_bytes)
        if self._record_copies:
            self.copies.append(Copy(load, start_ns, self.ends_ns))
        Landing(self._env, self.ends_ns - now_ns, self._finish)

    def _finish(self, _: simpy.Event) -> None:
        if self._in_flight is None:
            raise RuntimeError("a copy finished on an idle link")
        key = self._in_flight.key
        self._landed.append(key)
        if self._note_landings:
            self.landings.append((self.ends_ns, self._in_flight))
        if self._barrier is not None:
            self._awaited.discard(key)
            if not self._awaited:
                self._barrier.succeed()
                self._barrier = None
        self._in_flight = None
        self.ends_ns = NEVER_NS
        self._start_next()

    def _start_next(self) -> None:
        while self._queue:
            _, sequence, earliest_ns, load = heapq.heappop(self._queue)
            if sequence in self._cancelled:
                self._cancelled.discard(sequence)
                continue
            del self._queued[load.key]
            self._start(load, earliest_ns)
            return
