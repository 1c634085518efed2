"""What an expert costs on device, CPU and link, measured when a model is offloaded: for decisions, where no hardware
profile of the machine was given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
import torch
from torch import Tensor

from runtime.kernels import Kernel, SlotExperts, stock_kernel
from runtime.slots import ExpertBank
from simulator.policies.balancer import ExpertTimes
from simulator.policies.config import OffloadConfig
from trace_capture.hooks import MoeSite
from trace_capture.model_shape import ModelShape

_EXPERTS = (1, 4)
"""Group sizes from which the cost of one expert and that of a group are told apart."""
_REPEATS = 9


def measure_expert_times(
    config: OffloadConfig,
    shape: ModelShape,
    site: MoeSite,
    bank: Mapping[str, ExpertBank],
    implementations: tuple[str | None, str | None],
    device: torch.device,
) -> ExpertTimes:
    """Times of all layers from one of them, in proportion to the bytes of an expert.

    Args:
        config: drafts per pass, threads of the CPU's part, and the emulated link's rate.
        shape: of the model.
        site, bank: a MoE layer and its experts.
        implementations: experts implementation on the device and on the CPU.
        device: of the model.
    """
    few = {name: torch.stack([part[expert] for expert in range(_EXPERTS[-1])]) for name, part in bank.items()}
    served = np.arange(config.utility.gamma + 2)
    scale = np.array(shape.expert_bytes) / shape.expert_bytes[site.index]
    hidden = shape.hidden_size or 0
    sides = []
    threads = torch.get_num_threads()
    for implementation, where, count in zip(
        implementations, (device, torch.device("cpu")), (threads, config.cpu.live_threads), strict=True
    ):
        kernel = stock_kernel(site.experts, implementation)[0]
        view = SlotExperts(site.experts, {name: part.to(where) for name, part in few.items()})
        torch.set_num_threads(count)
        try:
            sides.append(_side(kernel, view, hidden, served, where))
        finally:
            torch.set_num_threads(threads)
    copy_ns = [_copy_ns(config, size, few, device) for size in shape.expert_bytes]
    (device_base, device_each), (cpu_base, cpu_each) = sides
    if not config.cpu.is_used:
        cpu_base, cpu_each = device_base, device_each + copy_ns[site.index] * (served > 0)
    return ExpertTimes(
        device_ns=_whole(scale[:, None] * device_each),
        cpu_ns=_whole(scale[:, None] * cpu_each),
        device_base_ns=_whole(np.full(len(scale), device_base)),
        cpu_base_ns=_whole(np.full(len(scale), cpu_base)),
        copy_ns=_whole(np.array(copy_ns)),
        expert_bytes=_whole(np.array(shape.expert_bytes)),
    )


def _whole(values: np.ndarray) -> np.ndarray:
    return np.asarray(np.rint(values), dtype=np.int64)


def _side(
    kernel: Kernel, view: SlotExperts, hidden: int, served: np.ndarray, where: torch.device
) -> tuple[float, np.ndarray]:
    """Time of any group, and of one expert by the tokens that it serves: linear between one token and all."""
    dtype = next(value for value in vars(view).values() if isinstance(value, Tensor)).dtype

    def group_ns(experts: int, tokens: int) -> float:
        rows = experts * tokens
        index = (torch.arange(rows, device=where) % experts).unsqueeze(1)
        inputs = torch.randn(rows, hidden, device=where).to(dtype)
        ones = torch.ones(rows, 1, dtype=dtype, device=where)
        return _median_ns(lambda: kernel(view, inputs, index, ones), where)

    most = int(served[-1])
    few, many = ([group_ns(experts, tokens) for experts in _EXPERTS] for tokens in (1, most))
    step = _EXPERTS[1] - _EXPERTS[0]
    first, last = (max(0.0, (pair[1] - pair[0]) / step) for pair in (few, many))
    each = np.where(served > 0, first + (last - first) * np.maximum(0, served - 1) / max(1, most - 1), 0.0)
    return max(0.0, few[0] - first), each


def _median_ns(work: Callable[[], Tensor], where: torch.device) -> float:
    durations = []
    with torch.no_grad():
        for _ in range(_REPEATS):
            began_ns = time.perf_counter_ns()
            work()
            if where.type == "cuda":
                torch.cuda.synchronize(where)
            durations.append(time.perf_counter_ns() - began_ns)
    return float(median(durations[1:]))


def _copy_ns(config: OffloadConfig, num_bytes: int, few: Mapping[str, Tensor], device: torch.device) -> float:
    """Loading one expert of a size: by the configured rate of an emulated link, else measured."""
    if device.type != "cuda" or config.device.backend == "emulated":
        return config.device.latency_ns + num_bytes / config.device.h2d_bytes_per_s * 1e9
    sources: Sequence[Tensor] = [part[0].contiguous().cpu().pin_memory() for part in few.values()]
    places = [torch.empty_like(source, device=device) for source in sources]

    def copied() -> Tensor:
        for place, source in zip(places, sources, strict=True):
            place.copy_(source, non_blocking=True)
        return places[0]

    measured = sum(source.numel() * source.element_size() for source in sources)
    return _median_ns(copied, device) * num_bytes / measured
