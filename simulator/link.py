"""The host-to-device link in simulated time: one copy at a time, the most urgent queued one next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from simulator.policies.cache import Key
from simulator.policies.plans import Load

NEVER_NS = 1 << 62


class Copy(NamedTuple):
    """A copy that has begun, for the timeline."""

    load: Load
    submit_ns: int
    start_ns: int
    end_ns: int


class SimulatedLink:
    """A DMA engine with a priority queue.

    What it does between two calls is settled by its queue, so it takes no events: whoever looks brings it up to the
    present first, and whoever waits is told until when.

    Args:
        copy_ns: duration of a copy by its bytes.
        record_copies: keep every copy in `copies`.
        note_landings: keep `landings`.

    Attributes:
        ends_ns: when the copy in flight ends; `NEVER_NS` when the link is idle.
        copies: the copies that have begun, in order, if recorded.
        landings: copies that have landed since the last `drain`, with their ends, if noted.
    """

    def __init__(self, copy_ns: Callable[[int], int], record_copies: bool = False, note_landings: bool = False) -> None:
        self._copy_ns = copy_ns
        self._queue: list[tuple[int, int, int, Load]] = []
        """(priority, number, not before, load), a heap; an entry counts if `_queued` knows its number."""
        self._queued: dict[Key, int] = {}
        self._sequence = 0
        self._in_flight: Load | None = None
        self._landed: list[Key] = []
        self._record_copies = record_copies
        self._note_landings = note_landings
        self.ends_ns = NEVER_NS
        self.copies: list[Copy] = []
        self.landings: list[tuple[int, Load]] = []
        self._started_ns = 0
        self._slow_from_ns = self._slow_to_ns = 0
        self._slow_ratio = 1.0

    def submit(self, load: Load, earliest_ns: int) -> None:
        """Queue a copy that may not begin before `earliest_ns` (when its submission has been issued)."""
        if self._in_flight is None:
            self._start(load, earliest_ns, earliest_ns)
            return
        self._sequence = number = self._sequence + 1
        self._queued[load.key] = number
        heapq.heappush(self._queue, (load.priority, number, earliest_ns, load))

    def cancel(self, key: Key) -> bool:
        """Withdraw a queued copy; False when it has begun."""
        return self._queued.pop(key, None) is not None

    def advance(self, now_ns: int) -> None:
        """Let copies end and begin up to a moment: what ends at t has landed at t."""
        while self.ends_ns <= now_ns:
            self._finish()

    def drain(self) -> list[Key]:
        """Keys that have landed since the last call, in order."""
        landed, self._landed = self._landed, []
        if self.landings:
            self.landings.clear()
        return landed

    def land(self, keys: Iterable[Key]) -> int | None:
        """Let copies end and begin until all `keys` have landed.

        Returns:
            when the last of them did, or None when they already had (and were not yet drained).

        Raises:
            RuntimeError: a key was never submitted.
        """
        awaited = set(keys).difference(self._landed)
        if not awaited:
            return None
        landed_ns = self.ends_ns
        while awaited:
            landed_ns = self.ends_ns
            awaited.discard(self._finish())
        return landed_ns

    def backlog_ns(self, from_ns: int) -> int:
        """Time that the copies in flight and in the queue take from `from_ns` on, undisturbed."""
        if self._in_flight is None:
            return 0
        if len(self._queue) > len(self._queued):  # some were withdrawn
            self._queue = [entry for entry in self._queue if self._queued.get(entry[3].key) == entry[1]]
            heapq.heapify(self._queue)
        queued_ns = sum(self._copy_ns(load.num_bytes) for _, _, _, load in self._queue)
        return max(0, self.ends_ns - from_ns) + queued_ns

    def slow_down(self, from_ns: int, to_ns: int, ratio: float) -> None:
        """Copies take `ratio` times longer between two moments; what is in flight then lands later.

        Must not reach into another such time. Copies that have landed are not asked about.
        """
        self._slow_from_ns, self._slow_to_ns, self._slow_ratio = from_ns, to_ns, ratio
        if self._in_flight is None or self.ends_ns <= from_ns:
            return
        begins_ns = max(from_ns, self._started_ns)
        self.ends_ns = self._slowed_end_ns(begins_ns, self.ends_ns - begins_ns)
        if self._record_copies:
            self.copies[-1] = self.copies[-1]._replace(end_ns=self.ends_ns)

    def _start(self, load: Load, submit_ns: int, start_ns: int) -> None:
        self._in_flight = load
        self._started_ns = start_ns
        copy_ns = self._copy_ns(load.num_bytes)
        if start_ns < self._slow_to_ns:
            self.ends_ns = self._slowed_end_ns(start_ns, copy_ns)
        else:
            self.ends_ns = start_ns + copy_ns
        if self._record_copies:
            self.copies.append(Copy(load, submit_ns, start_ns, self.ends_ns))

    def _slowed_end_ns(self, start_ns: int, copy_ns: int) -> int:
        """End of a copy that takes `copy_ns` undisturbed."""
        end_ns = start_ns + copy_ns
        slow_from_ns = max(self._slow_from_ns, start_ns)
        if end_ns <= slow_from_ns or start_ns >= self._slow_to_ns:
            return end_ns
        left_ns = end_ns - slow_from_ns
        slowed_ns = min(round(left_ns * self._slow_ratio), self._slow_to_ns - slow_from_ns)
        return slow_from_ns + slowed_ns + round(left_ns - slowed_ns / self._slow_ratio)

    def _finish(self) -> Key:
        """End the copy in flight and begin the next; gives the key that has landed."""
        landed = self._in_flight
        if landed is None:
            raise RuntimeError("a copy is awaited that was never submitted")
        self._landed.append(landed.key)
        if self._note_landings:
            self.landings.append((self.ends_ns, landed))
        queue, queued = self._queue, self._queued
        while queue:
            _, number, earliest_ns, load = heapq.heappop(queue)
            if queued.get(load.key) == number:
                del queued[load.key]
                end_ns = self.ends_ns
                self._start(load, earliest_ns, end_ns if end_ns > earliest_ns else earliest_ns)
                return landed.key
        self._in_flight = None
        self.ends_ns = NEVER_NS
        return landed.key
