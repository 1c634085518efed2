"""Candidates of the tuner in which the CPU runs experts."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.policies.config import CacheConfig, CpuConfig, DeviceConfig, OffloadConfig
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Trace

_BEST = 4
"""So many candidates without the CPU are tried with it."""
_ADMISSIONS = (1, 2, 4)
_SHARES = (0.25, 0.5, 0.75, 1.0)

Named = tuple[str, OffloadConfig]
"""How the budget is split, and the configuration."""


def num_with_cpu_misses(candidates: int) -> int:
    """How many configurations `with_cpu_misses` makes of so many."""
    return min(candidates, _BEST) * len(_ADMISSIONS)


def with_cpu_misses(best: Sequence[Named]) -> list[Named]:
    """The first few of `best` once more, with what has not landed run on the CPU and more or less of it admitted."""
    result = []
    for split, config in best[:_BEST]:
        for admissions in _ADMISSIONS:
            cpu = CpuConfig(policy="misses", admissions=admissions)
            label = f"{config.label}, misses on the CPU (admitting {admissions})"
            result.append((split, config.model_copy(update={"cpu": cpu, "label": label})))
    return result


def with_cpu_layers(trace: Trace, budget_bytes: int, device: DeviceConfig) -> list[Named]:
    """Shares of the layers on the CPU altogether, from the first on, and LRU with the whole budget for the others."""
    layers = trace.shape.num_moe_layers
    counts = sorted(
        {max(1, round(share * layers)) for share in _SHARES} | {_fewest_for_residency(trace.shape, budget_bytes)}
    )
    result = []
    for count in counts:
        cache = CacheConfig(budget_bytes=budget_bytes)
        label = f"lru, even split, {count} of {layers} layers on the CPU"
        result.append(("even", OffloadConfig(label=label, cache=cache, cpu=CpuConfig(layers=count), device=device)))
    return result


def _fewest_for_residency(shape: ModelShape, budget_bytes: int) -> int:
    """How many of the first layers must be on the CPU for all others to fit."""
    sizes = [shape.num_experts * size for size in shape.expert_bytes]
    count = 0
    while count < len(sizes) and sum(sizes[count:]) > budget_bytes:
        count += 1
    return max(1, count)
