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
    submit_ns: int
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
        self._landing: Landing | None = None
        self._started_ns = 0
        self._slow_from_ns = self._slow_to_ns = 0
        self._slow_ratio = 1.0

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

    def backlog_ns(self, from_ns: int) -> int:
        """Time that the copies in flight and in the queue take from `from_ns` on, undisturbed."""
        if self._in_flight is None:
            return 0
        queued = [load for _, sequence, _, load in self._queue if sequence not in self._cancelled]
        return max(0, self.ends_ns - from_ns) + sum(self._copy_ns(load.num_bytes) for load in queued)

    def slow_down(self, from_ns: int, to_ns: int, ratio: float) -> None:
        """Copies take `ratio` times longer between two moments; what is in flight then lands later.

        Must not reach into another such time. Copies that have landed are not asked about.
        """
        self._slow_from_ns, self._slow_to_ns, self._slow_ratio = from_ns, to_ns, ratio
        if self._in_flight is None or self.ends_ns <= from_ns:
            return
        begins_ns = max(from_ns, self._started_ns)
        self._land_at(self._slowed_end_ns(begins_ns, self.ends_ns - begins_ns))
        if self._record_copies:
            self.copies[-1] = self.copies[-1]._replace(end_ns=self.ends_ns)

    def barrier(self, keys: Iterable[Key]) -> simpy.Event | None:
        """An event for when all `keys` have landed, or None when they already have (and were not yet drained)."""
        self._awaited = set(keys).difference(self._landed)
        if not self._awaited:
            return None
        self._barrier = self._env.event()
        return self._barrier

    def _start(self, load: Load, earliest_ns: int) -> None:
        self._in_flight = load
        self._started_ns = start_ns = max(int(self._env.now), earliest_ns)
        self._land_at(self._slowed_end_ns(start_ns, self._copy_ns(load.num_bytes)))
        if self._record_copies:
            self.copies.append(Copy(load, earliest_ns, start_ns, self.ends_ns))

    def _land_at(self, end_ns: int) -> None:
        self.ends_ns = end_ns
        self._landing = Landing(self._env, end_ns - int(self._env.now), self._finish)

    def _slowed_end_ns(self, start_ns: int, copy_ns: int) -> int:
        """End of a copy that takes `copy_ns` undisturbed."""
        end_ns = start_ns + copy_ns
        slow_from_ns = max(self._slow_from_ns, start_ns)
        if end_ns <= slow_from_ns or start_ns >= self._slow_to_ns:
            return end_ns
        left_ns = end_ns - slow_from_ns
        slowed_ns = min(round(left_ns * self._slow_ratio), self._slow_to_ns - slow_from_ns)
        return slow_from_ns + slowed_ns + round(left_ns - slowed_ns / self._slow_ratio)

    def _finish(self, landing: simpy.Event) -> None:
        if landing is not self._landing:
            return  # the copy was slowed down after this end had been set
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
