"""What an expert costs on the device, on the CPU and on the link, as decisions weigh it, out of a machine's costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simulator.cost_model import CostModel
from simulator.policies.balancer import ExpertTimes
from simulator.policies.config import OffloadConfig
from trace_capture.hardware import HardwareProfile
from trace_capture.model_shape import ModelShape


def times_for(config: OffloadConfig, hardware: HardwareProfile, shape: ModelShape) -> ExpertTimes | None:
    """The times that a configuration's core needs on a machine; None where it needs none.

    Raises:
        ProfileError: the profile lacks a rate, or knows no host that could run experts.
    """
    if not config.needs_expert_times:
        return None
    costs = CostModel(hardware, shape, config.cpu.used_threads)
    return expert_times(costs, shape, config.utility.gamma, config.cpu.is_used)


def expert_times(costs: CostModel, shape: ModelShape, gamma: int, has_cpu: bool) -> ExpertTimes:
    """One expert by the tokens that it serves, 0..gamma+1.

    The costs are those of groups of experts, so one expert is the slope between half and all of the experts that a
    verify pass is expected to use if its tokens are routed independently; what is left is the base.

    Args:
        costs: of the machine.
        shape: of the model.
        gamma: drafts per verify pass at most.
        has_cpu: False: what is not on the device is loaded on demand and run there.
    """
    layers, tokens = range(shape.num_moe_layers), range(1, gamma + 2)
    copy_ns = [costs.copy_ns(size) for size in shape.expert_bytes]
    device = [_by_tokens(costs.compute.experts_ns, layer, shape, gamma) for layer in layers]
    if has_cpu:
        cpu = [_by_tokens(costs.compute.cpu_experts_ns, layer, shape, gamma) for layer in layers]
    else:
        cpu = [(base, [copy + each for each in row]) for copy, (base, row) in zip(copy_ns, device, strict=True)]
    zero = [0] * (len(tokens) > 0)
    return ExpertTimes(
        device_ns=np.array([zero + row for _, row in device], dtype=np.int64),
        cpu_ns=np.array([zero + row for _, row in cpu], dtype=np.int64),
        device_base_ns=np.array([base for base, _ in device], dtype=np.int64),
        cpu_base_ns=np.array([base for base, _ in cpu], dtype=np.int64),
        copy_ns=np.array(copy_ns, dtype=np.int64),
        expert_bytes=np.array(shape.expert_bytes, dtype=np.int64),
    )


def _by_tokens(
    group_ns: Callable[[int, int, int, int], int], layer: int, shape: ModelShape, gamma: int
) -> tuple[int, list[int]]:
    """Time of a layer beside its experts, and of one expert serving 1..gamma+1 tokens."""
    num, top_k = shape.num_experts, shape.top_k
    active = max(2, round(num * (1 - (1 - top_k / num) ** (gamma + 1))))
    half = active // 2
    each, base = [], 0
    for served in range(1, gamma + 2):
        tokens = max(1, round(served * active / top_k))
        whole, part = group_ns(layer, tokens, active, active), group_ns(layer, tokens, half, active)
        slope = max(0, round((whole - part) / (active - half)))
        each.append(slope)
        base = max(0, whole - slope * active) if served == 1 else base
    return base, each
