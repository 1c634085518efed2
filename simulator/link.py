"""The host-to-device link in simulated time: one copy at a time, the most urgent queued one next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from simulator.policies.eviction import Key
from simulator.policies.plans import BEHIND_PRIORITY, Load
from simulator.policies.residency import for_look_ups

NEVER_NS = 1 << 62
_MANY = 64


class Copy(NamedTuple):
    """A copy that has begun, for the timeline."""

    load: Load
    submit_ns: int
    start_ns: int
    end_ns: int


class CopyQueue:
    """Copies that wait for their turn, in order of submission. What has begun is removed now and then only, since
    that moves all others.

    Attributes:
        loads: with those before `head`, which have begun.
        issued_ns: when each was issued; it begins not before.
        head: place of the next one.
    """

    __slots__ = ("head", "issued_ns", "loads")

    def __init__(self) -> None:
        self.loads: list[Load] = []
        self.issued_ns: list[int] = []
        self.head = 0

    def drop_next(self) -> None:
        """The next one begins."""
        self.head += 1
        if self.head == _MANY:
            del self.loads[: self.head], self.issued_ns[: self.head]
            self.head = 0


class SimulatedLink:
    """A DMA engine with a queue for each priority.

    What it does between two calls is settled by its queue, so it takes no events: whoever looks brings it up to the
    present first, and whoever waits is told until when.

    Args:
        copy_ns, issue_ns: duration of a copy, and of submitting it, by its bytes.
        record_copies: keep every copy in `copies`.
        note_landings: keep `landings`.

    Attributes:
        ends_ns: when the copy in flight ends; `NEVER_NS` when the link is idle.
        landed: keys that have landed since the last `drain`, in order.
        copies: the copies that have begun, in order, if recorded.
        landings: copies that have landed since the last `drain`, with their ends, if noted.
    """

    def __init__(
        self,
        copy_ns: Mapping[int, int],
        issue_ns: Mapping[int, int],
        record_copies: bool = False,
        note_landings: bool = False,
    ) -> None:
        self._copy_ns = copy_ns
        self._issue_ns = issue_ns
        self._queues = [CopyQueue() for _ in range(BEHIND_PRIORITY + 1)]
        """By priority."""
        self._size_bytes = -1
        """The size that was last looked up; experts mostly have one."""
        self._size_copy_ns = self._size_issue_ns = 0
        self._in_flight: Load | None = None
        self._record_copies = record_copies
        self._note_landings = note_landings
        self.ends_ns = NEVER_NS
        self.landed: list[Key] = []
        self.copies: list[Copy] = []
        self.landings: list[tuple[int, Load]] = []
        self._started_ns = 0
        self._slow_from_ns = self._slow_to_ns = 0
        self._slow_ratio = 1.0

    def submit(self, loads: Iterable[Load], now_ns: int) -> int:
        """Queue copies that a host thread issues one after the other; none begins before it has been issued.

        Args:
            loads: in order.
            now_ns: when the first is about to be issued.

        Returns:
            when the last has been issued.
        """
        for load in loads:
            if load.num_bytes != self._size_bytes:
                self._look_up(load.num_bytes)
            now_ns += self._size_issue_ns
            if self._in_flight is None:
                self._start(load, now_ns)
            else:
                queue = self._queues[load.priority]
                queue.loads.append(load)
                queue.issued_ns.append(now_ns)
        return now_ns

    def cancel(self, key: Key) -> bool:
        """Withdraw a queued copy; False when it has begun."""
        for queue in self._queues:
            for place in range(queue.head, len(queue.loads)):
                load = queue.loads[place]
                if load.key == key:
                    del queue.loads[place], queue.issued_ns[place]
                    return True
        return False

    def advance(self, now_ns: int) -> None:
        """Let copies end and begin up to a moment: what ends at t has landed at t."""
        self._work(now_ns, (), 0)

    def land(self, keys: Sequence[Key]) -> int:
        """Let copies end and begin until all `keys` have landed.

        Returns:
            when the last of them did, or -1 when they already had (and were not yet drained).

        Raises:
            RuntimeError: a key was never submitted.
        """
        awaited = for_look_ups(keys)
        left = len(keys)
        for key in self.landed:
            left -= key in awaited
        return self._work(-1, awaited, left) if left else -1

    def drain(self) -> list[Key]:
        """Keys that have landed since the last call, in order."""
        landed, self.landed = self.landed, []
        if self.landings:
            self.landings.clear()
        return landed

    def backlog_ns(self, from_ns: int) -> int:
        """Time that the copies in flight and in the queue take from `from_ns` on, undisturbed."""
        if self._in_flight is None:
            return 0
        queued = sum(self._copy_ns[load.num_bytes] for queue in self._queues for load in queue.loads[queue.head :])
        return max(0, self.ends_ns - from_ns) + queued

    def slow_down(self, from_ns: int, to_ns: int, ratio: float) -> None:
        """Copies take `ratio` times longer between two moments; what is in flight then lands later.

        Must not reach into another such time. Copies that have landed are not asked about.
        """
        self._slow_from_ns, self._slow_to_ns, self._slow_ratio = from_ns, to_ns, ratio
        if self._in_flight is None or self.ends_ns <= from_ns:
            return
        begins_ns = max(from_ns, self._started_ns)
        self.ends_ns = self._end_ns(begins_ns, self.ends_ns - begins_ns)
        if self._record_copies:
            self.copies[-1] = self.copies[-1]._replace(end_ns=self.ends_ns)

    def _start(self, load: Load, start_ns: int) -> None:
        """Begin a copy on the idle link."""
        self._in_flight = load
        self._started_ns = start_ns
        self.ends_ns = self._end_ns(start_ns, self._copy_ns[load.num_bytes])
        if self._record_copies:
            self.copies.append(Copy(load, start_ns, start_ns, self.ends_ns))

    def _work(self, until_ns: int, awaited: Collection[Key], left: int) -> int:
        """End copies and begin queued ones, up to a moment and until so many more of `awaited` have landed.

        Returns:
            the end of the last copy.
        """
        load, start_ns, end_ns = self._in_flight, self._started_ns, self.ends_ns
        landed, now_ns = self.landed, until_ns
        while left or end_ns <= until_ns:
            if load is None:
                raise RuntimeError("a copy is awaited that was never submitted")
            now_ns = end_ns
            key = load.key
            landed.append(key)
            if key in awaited:
                left -= 1
            if self._note_landings:
                self.landings.append((now_ns, load))
            queue = self._urgent_queue()
            if queue is None:
                load, end_ns = None, NEVER_NS
                continue
            load, issued_ns = queue.loads[queue.head], queue.issued_ns[queue.head]
            queue.drop_next()
            start_ns = max(now_ns, issued_ns)
            if load.num_bytes != self._size_bytes:
                self._look_up(load.num_bytes)
            end_ns = start_ns + self._size_copy_ns
            if start_ns < self._slow_to_ns:
                end_ns = self._end_ns(start_ns, self._size_copy_ns)
            if self._record_copies:
                self.copies.append(Copy(load, issued_ns, start_ns, end_ns))
        self._in_flight, self._started_ns, self.ends_ns = load, start_ns, end_ns
        return now_ns

    def _urgent_queue(self) -> CopyQueue | None:
        """The queue whose turn it is; None where nothing waits."""
        for queue in self._queues:
            if queue.head < len(queue.loads):
                return queue
        return None

    def _look_up(self, num_bytes: int) -> None:
        self._size_bytes = num_bytes
        self._size_copy_ns, self._size_issue_ns = self._copy_ns[num_bytes], self._issue_ns[num_bytes]

    def _end_ns(self, start_ns: int, copy_ns: int) -> int:
        """End of a copy that takes `copy_ns` undisturbed."""
        end_ns = start_ns + copy_ns
        slow_from_ns = max(self._slow_from_ns, start_ns)
        if end_ns <= slow_from_ns or start_ns >= self._slow_to_ns:
            return end_ns
        left_ns = end_ns - slow_from_ns
        slowed_ns = min(round(left_ns * self._slow_ratio), self._slow_to_ns - slow_from_ns)
        return slow_from_ns + slowed_ns + round(left_ns - slowed_ns / self._slow_ratio)
