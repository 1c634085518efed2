"""The CUDA link: a copy stream fed so that urgent loads can overtake queued ones, ordered with compute by events alone.

The host waits for nothing but the hand-over to the stream: the compute stream waits for a copy's event, and a copy for
the kernels that may still read its slot. Both are waits on the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from runtime.link import CopyJob, ThreadedLink


class CudaLink(ThreadedLink):
    """Copies from page-locked host memory on a stream of its own, in the order of service.

    Copies that a layer waits for go to the stream at once. One that is loaded ahead goes there when everything before
    it is over, so that it can be overtaken until then; the link's thread waits for that, not the one that computes.

    Args:
        device: the CUDA device. All compute is to be on one stream of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device=device, priority=-1)  # type: ignore[no-untyped-call]
        self._running: deque[CopyJob] = deque()
        """On the stream, in order, as far as the link's thread has not seen them end."""
        self._given = 0
        """Copies that went to the stream; each has its number as its ticket."""
        self._awaited = 0
        """The highest ticket that the compute stream was made to wait for, and with it for all lower ones."""
        self._free_ns = 0
        super().__init__()

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        """See `ThreadedLink`. A slot may still be read by kernels launched so far, so its copy waits for those."""
        fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
        fence.record(torch.cuda.current_stream(self._device))
        for job in jobs:
            job.fence = fence
        super().submit(jobs)

    def settle(self) -> None:
        """See `ThreadedLink`."""
        if self.times_parts:
            torch.cuda.current_stream(self._device).synchronize()

    def _copy(self, job: CopyJob) -> None:
        job.start_ns = time.perf_counter_ns()
        landed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.fence)
            for destination, source in job.pairs:
                tensor = source if isinstance(source, torch.Tensor) else source()
                destination.copy_(tensor, non_blocking=True)
            landed.record(self._stream)
        self._given += 1
        job.event, job.ticket = landed, self._given

    def _await(self, job: CopyJob) -> None:
        if self.times_parts:
            job.event.synchronize()
        else:
            torch.cuda.current_stream(self._device).wait_event(job.event)
        self._awaited = max(self._awaited, job.ticket)

    def _is_over(self, job: CopyJob, now_ns: int) -> bool:
        return job.ticket <= self._awaited or bool(job.event.query())

    def _note(self, job: CopyJob) -> None:
        """Nothing: compute may be behind a copy that has not ended, so the link's thread notes copies as they end."""

    def _rest(self, job: CopyJob) -> None:
        if job.error is not None:
            return
        self._running.append(job)
        while self._running and not self._has_demand():
            first = self._running.popleft()
            first.event.synchronize()
            first.end_ns = time.perf_counter_ns()
            first.start_ns = max(first.start_ns, self._free_ns)
            self._free_ns = first.end_ns
            super()._note(first)
