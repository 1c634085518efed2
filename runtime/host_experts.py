"""The CPU's part of a layer: experts run from host memory on a thread of their own, beside the device and the link.

On a machine with a GPU that is what it says. With the emulated device, "device" and CPU are two threads of one
processor: results, decisions and the order of events are real, and so is the overlap as far as there are two idle cores
and memory to feed both; but the device is as slow as the CPU and takes cycles and bandwidth from it, so what such a run
shows is that the parts run at the same time and what that hides, not what a GPU would gain. Products run without the
interpreter lock and everything between them with it, so small experts, which are mostly "between", slow each other
down; `tests/benchmarks/cpu_beside_device.py` shows both sizes.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runtime.kernels import Kernel, Pairs, Routed, SlotExperts, pairs_of, run_pairs, stock_kernel
from runtime.slots import ExpertBanks
from simulator.policies.config import CpuConfig
from trace_capture.errors import ConfigError
from trace_capture.hooks import MoeSite

_HOST_KERNELS = (None, "eager", "grouped_mm", "batched_mm")
"""Implementations of transformers that run on a CPU."""


@dataclass(eq=False)
class HostJob:
    """Some experts of one layer, and how running them went. Times are of `time.perf_counter_ns`."""

    layer: int
    experts: Sequence[int]
    hidden: Tensor
    top_k: int
    pairs: Pairs
    outputs: Tensor | None = None
    """[pairs, H] in host memory, unweighted."""
    error: BaseException | None = None
    began_ns: int = 0
    ended_ns: int = 0
    done: threading.Event = field(default_factory=threading.Event)


class HostError(RuntimeError):
    """Experts failed on the CPU's thread; the pass that waits for them cannot go on."""


class HostExperts:
    """Runs experts of a layer from host memory, one job at a time.

    Args:
        sites: Mixture-of-Experts layers of the model.
        banks: their experts, in host memory or in files.
        implementation: the experts implementation that the untouched model uses; where that has no CPU form, grouped
            matrix products are used, and equality with the untouched model is one up to rounding.
        threads: that one job may use inside its products.
        expert_ns: a job takes at least this long per expert, as on a slower CPU; 0 for no pacing.
    """

    def __init__(
        self,
        sites: Sequence[MoeSite],
        banks: Sequence[ExpertBanks],
        implementation: str | None,
        threads: int,
        expert_ns: int = 0,
    ) -> None:
        usable = host_implementation(implementation)
        self._kernels: list[Kernel] = [stock_kernel(site.experts, usable)[0] for site in sites]
        self._modules = [_on_host(site.experts) for site in sites]
        self._banks = banks
        self._expert_ns = expert_ns
        self._views: dict[int, SlotExperts] = {}
        self._jobs: queue.SimpleQueue[HostJob | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(threads,), name="moe-studio-cpu", daemon=True)
        self._thread.start()
        self._ready.wait()
        torch.set_num_threads(torch.get_num_threads())  # a thread's own count is also the default of later threads

    def start(self, layer: int, experts: Sequence[int], routed: Routed) -> HostJob:
        """Begin to run the pairs of some experts; returns at once (CUDA: when the activations have arrived)."""
        pairs = pairs_of(routed.rows, {expert: expert for expert in experts})
        job = HostJob(layer, experts, routed.hidden.detach().cpu(), routed.weights.shape[1], pairs)
        self._jobs.put(job)
        return job

    def wait(self, job: HostJob) -> Tensor:
        """The outputs of a job [pairs, H], once they are there.

        Raises:
            HostError: it failed.
        """
        job.done.wait()  # not spun through as copies are: a spinning thread takes the interpreter lock from the other
        if job.error is not None or job.outputs is None:
            raise HostError(f"running experts of MoE layer {job.layer} on the CPU failed: {job.error}") from job.error
        return job.outputs

    def close(self) -> None:
        """Stop the thread after the job that it is at."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _serve(self, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.get_num_threads()  # only now does this thread keep its count, whatever others set later
        self._ready.set()
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                job.began_ns = time.perf_counter_ns()
                try:
                    job.outputs = self._run(job)
                    left_ns = job.began_ns + self._expert_ns * len(job.experts) - time.perf_counter_ns()
                    if left_ns > 0:
                        time.sleep(left_ns / 1e9)
                except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                    job.error = error
                job.ended_ns = time.perf_counter_ns()
                job.done.set()

    def _run(self, job: HostJob) -> Tensor:
        kernel, banks = self._kernels[job.layer], self._banks[job.layer]
        tensors = {name: bank for name, bank in banks.items() if isinstance(bank, Tensor)}
        if len(tensors) == len(banks):
            if job.layer not in self._views:
                self._views[job.layer] = SlotExperts(self._modules[job.layer], tensors)
            return run_pairs(kernel, self._views[job.layer], job.hidden, job.top_k, job.pairs)
        outputs = torch.empty(len(job.pairs.places), job.hidden.shape[1], dtype=job.hidden.dtype)
        for expert in job.experts:  # in files: mapped one at a time, so that none is copied that need not be
            view = SlotExperts(
                self._modules[job.layer], {name: bank[expert].unsqueeze(0) for name, bank in banks.items()}
            )
            chosen = [number for number, slot in enumerate(job.pairs.slots) if slot == expert]
            pairs = Pairs([job.pairs.places[number] for number in chosen], [0] * len(chosen))
            outputs[torch.tensor(chosen)] = run_pairs(kernel, view, job.hidden, job.top_k, pairs)
        return outputs


def check_threads(config: CpuConfig) -> None:
    """Refuse more threads than cores, which only hold each other up.

    Raises:
        ConfigError: so many are asked for.
    """
    cores = os.cpu_count() or config.live_threads
    if config.is_used and config.live_threads > cores:
        raise ConfigError(
            f"cpu.threads is {config.live_threads} and this machine has {cores} cores, on which so many threads only "
            "hold each other up; set fewer in the configuration, or --cpu-threads"
        )


def host_implementation(implementation: str | None) -> str | None:
    """The experts implementation that the CPU runs for a model set to `implementation`."""
    return implementation if implementation in _HOST_KERNELS else "grouped_mm"


def _on_host(module: nn.Module) -> nn.Module:
    """The experts module with whatever it has beside its experts (a norm, an activation's scale) in host memory."""
    others = [*module.parameters(), *module.buffers()]
    if all(tensor.device.type == "cpu" for tensor in others):
        return module
    return copy.deepcopy(module).cpu()
