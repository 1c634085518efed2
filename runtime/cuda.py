"""The CUDA link: a copy stream fed one expert at a time, so that urgent loads can overtake queued ones."""

from __future__ import annotations

import time

import torch

from runtime.link import CopyJob, ThreadedLink


class CudaLink(ThreadedLink):
    """Copies from page-locked host memory on a stream of its own.

    A slot may still be read by kernels that were launched before it was given away, so a copy first waits, on the
    device, for the compute stream as it stood when the load was submitted.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
        super().__init__()

    def submit(self, jobs: list[CopyJob]) -> None:  # type: ignore[override]
        """See `ThreadedLink`; remembers how far the compute stream has come."""
        self._fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._fence.record(torch.cuda.current_stream(self._device))
        super().submit(jobs)

    def _copy(self, job: CopyJob) -> None:
        job.start_ns = time.perf_counter_ns()
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._fence)
            for destination, source in job.pairs:
                tensor = source if isinstance(source, torch.Tensor) else source()
                destination.copy_(tensor, non_blocking=True)
            landed.record(self._stream)
        landed.synchronize()
        job.end_ns = time.perf_counter_ns()
