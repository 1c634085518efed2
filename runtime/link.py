"""The link between host and device: loads by priority, one at a time, on a thread of its own.

Two links share everything but the copy itself: `EmulatedLink` here, paced to a set bandwidth and latency, and
`runtime.cuda.CudaLink`, a copy stream.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.slots import Source
from simulator.policies.cache import Key

_EARLY_NS = 120_000
"""How long before a copy's end the link's thread wakes up: a sleep overshoots by about 70 us."""
_SPIN_NS = 20_000_000
"""Waits up to this long are spun through, as a CUDA synchronisation does: after a sleep the core is cold, and what
runs next takes up to twice its time."""


class LinkError(RuntimeError):
    """A copy failed on the link's thread; the pass that waits for it cannot go on."""


class CopySpan(NamedTuple):
    """A finished copy, for the timeline. Times are of `time.perf_counter_ns`."""

    key: Key
    num_bytes: int
    reason: str
    submit_ns: int
    start_ns: int
    end_ns: int


class Latch:
    """Opens once, for whoever waits then or later: a `threading.Event` that is made in an eighth of its time."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Open it; once only."""
        self._lock.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Return when it is open, or after so many seconds; gives whether it is open."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._lock.release()
        return True


@dataclass(eq=False, slots=True)
class CopyJob:
    """One expert to copy: pairs of destination and source, and how it went. `stamp` is called when it went well, on
    the link's thread. `fence`, `event` and `ticket` are a CUDA link's own."""

    key: Key
    num_bytes: int
    reason: str
    priority: int
    pairs: Sequence[tuple[Tensor, Source]]
    stamp: Callable[[], None] | None = None
    fence: Any = None
    event: Any = None
    ticket: int = 0
    submit_ns: int = 0
    start_ns: int = 0
    end_ns: int = 0
    error: BaseException | None = None
    copied: Latch = field(default_factory=Latch)


class ThreadedLink:
    """A priority queue of copies served by one daemon thread. Used by one compute thread.

    Subclasses say how a job is copied. `landed` order is the order of service.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: list[tuple[int, int, CopyJob]] = []
        self._sequence = 0
        self._queued: dict[Key, CopyJob] = {}
        self._outstanding: dict[Key, CopyJob] = {}
        self._served: deque[CopyJob] = deque()
        self._closing = False
        self._failure: BaseException | None = None
        self.times_parts = False
        """For calibration: make the parts of a layer end where the host sees them end, so that they can be timed.
        An emulated device is always so."""
        self.spans: list[CopySpan] | None = None
        """Set to a list to keep the timeline."""
        self._thread = threading.Thread(target=self._serve, name="moe-studio-link", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        """Queue copies; returns at once."""
        with self._wake:
            now_ns = time.perf_counter_ns()
            for job in jobs:
                job.submit_ns = now_ns
                self._sequence += 1
                heapq.heappush(self._queue, (job.priority, self._sequence, job))
                self._queued[job.key] = job
                self._outstanding[job.key] = job
            self._wake.notify()

    def cancel(self, key: Key) -> bool:
        """Withdraw a queued copy; False when it has begun."""
        with self._lock:
            job = self._queued.pop(key, None)
            if job is not None:
                del self._outstanding[key]
            return job is not None

    def wait(self, keys: Collection[Key]) -> None:
        """Return when whatever is computed from now on finds all `keys` landed.

        Raises:
            LinkError: a copy failed.
        """
        for key in keys:
            job = self._outstanding.get(key)
            if job is None:
                continue
            job.copied.wait()
            self._check()
            if job.error is not None:
                raise LinkError(f"copying expert {key[1]} of MoE layer {key[0]} failed: {job.error}") from job.error
            self._await(job)

    def drain(self) -> list[Key]:
        """Keys that have landed since the last call, in order.

        Raises:
            LinkError: a copy failed.
        """
        landed: list[Key] = []
        served = self._served
        if not served:
            return landed
        self._check()
        now_ns = time.perf_counter_ns()
        while served and (served[0].error is not None or self._is_over(served[0], now_ns)):
            job = served.popleft()
            if job.error is not None:
                raise LinkError(f"copying expert {job.key[1]} of MoE layer {job.key[0]} failed: {job.error}")
            del self._outstanding[job.key]
            landed.append(job.key)
            self._note(job)
        return landed

    def settle(self) -> None:
        """Where parts are to be timed: return when everything computed so far is done."""

    def abandon(self) -> None:
        """Drop everything queued, wait for the copy that has begun, forget what has landed or failed."""
        with self._lock:
            begun = [job for key, job in self._outstanding.items() if key not in self._queued]
            self._queued.clear()
            self._outstanding.clear()
        for job in begun:
            job.copied.wait()
        self._served.clear()
        self._failure = None

    def close(self) -> None:
        """Stop the thread; queued copies are dropped."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _serve(self) -> None:
        with torch.inference_mode():
            while (job := self._next_job()) is not None:
                try:
                    self._copy(job)
                    if job.stamp is not None:
                        job.stamp()
                except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                    job.error = error
                    job.end_ns = time.perf_counter_ns()
                self._served.append(job)
                job.copied.set()
                try:
                    self._rest(job)
                except BaseException as error:  # noqa: BLE001 - handed to whoever waits or drains next
                    self._failure = error

    def _next_job(self) -> CopyJob | None:
        with self._wake:
            while True:
                while self._queue:
                    job = heapq.heappop(self._queue)[2]
                    if self._queued.get(job.key) is job:
                        del self._queued[job.key]
                        return job
                if self._closing:
                    return None
                self._wake.wait()

    def _has_demand(self) -> bool:
        """Whether a copy that a layer waits for is queued."""
        with self._lock:
            return any(job.priority == 0 for job in self._queued.values())

    def _check(self) -> None:
        if self._failure is not None:
            raise LinkError(f"the link failed: {self._failure}") from self._failure

    def _note(self, job: CopyJob) -> None:
        """Put a copy that is over on the timeline."""
        if self.spans is not None:
            self.spans.append(CopySpan(job.key, job.num_bytes, job.reason, job.submit_ns, job.start_ns, job.end_ns))

    def _copy(self, job: CopyJob) -> None:
        """Copy the pairs and set the job's start and end."""
        raise NotImplementedError

    def _await(self, job: CopyJob) -> None:
        """Make what is computed next find this copy landed."""
        wait_until(job.end_ns)

    def _is_over(self, job: CopyJob, now_ns: int) -> bool:
        """Whether what is computed next finds this copy landed, without waiting."""
        return job.end_ns <= now_ns

    def _rest(self, job: CopyJob) -> None:
        """Whatever keeps the link busy after a copy; by default nothing."""


class EmulatedLink(ThreadedLink):
    """A link of set bandwidth and latency, with one outstanding copy as on a DMA engine.

    The schedule is arithmetic (start = max(submitted, link free), end = start + latency + bytes / rate), so lateness
    of the thread does not add up; the bytes are really copied, and a copy never ends before its bytes are there.

    Args:
        bytes_per_s: rate.
        latency_ns: time per copy beside its bytes.
    """

    def __init__(self, bytes_per_s: float, latency_ns: int) -> None:
        self._ns_per_byte = 1e9 / bytes_per_s
        self._latency_ns = latency_ns
        self._free_ns = 0
        super().__init__()

    def _copy(self, job: CopyJob) -> None:
        job.start_ns = max(job.submit_ns, self._free_ns)
        job.end_ns = job.start_ns + self._latency_ns + round(job.num_bytes * self._ns_per_byte)
        for destination, source in job.pairs:
            destination.copy_(source if isinstance(source, Tensor) else source())
        job.end_ns = max(job.end_ns, time.perf_counter_ns())
        self._free_ns = job.end_ns

    def _rest(self, job: CopyJob) -> None:
        """Keep the link busy until shortly before the copy's end, so that a more urgent one can still overtake."""
        left_ns = job.end_ns - time.perf_counter_ns() - _EARLY_NS
        if left_ns > 0:
            time.sleep(left_ns / 1e9)


def wait_until(end_ns: int) -> None:
    """Sleep until `time.perf_counter_ns` reaches `end_ns`, spinning at the end."""
    while (left_ns := end_ns - time.perf_counter_ns()) > 0:
        time.sleep((left_ns - _SPIN_NS) / 1e9 if left_ns > _SPIN_NS else 0)
