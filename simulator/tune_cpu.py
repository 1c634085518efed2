"""Candidates of the tuner in which the CPU runs experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.cost_model import CostModel
from simulator.costs.host import most_threads, thread_counts
from simulator.policies.config import CacheConfig, CpuConfig, DeviceConfig, OffloadConfig
from trace_capture.hardware import HardwareProfile, numbers_text
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Trace

_BEST = 4
"""So many candidates without the CPU are tried with it."""
_ADMISSIONS = (1, 2, 4)
_SHARES = (0.25, 0.5, 0.75, 1.0)

Named = tuple[str, OffloadConfig]
"""How the budget is split, and the configuration."""


@dataclass(frozen=True)
class CpuThreads:
    """Threads that may run experts on the CPU.

    Attributes:
        counts: to choose from, rising; empty where the CPU runs no experts.
        first: what the grid takes: the fewest with which a token's experts take the least time.
        origin: where it comes from how the rate grows with them, a sentence; empty where there is nothing to say.
    """

    counts: tuple[int, ...] = ()
    first: int = 1
    origin: str = ""

    def chosen(self, named: Sequence[Named]) -> list[Named]:
        """Configurations with the grid's number, where there is a choice."""
        return [
            (split, with_threads(config, self.first) if len(self.counts) > 1 else config) for split, config in named
        ]

    def others(self, best: Sequence[Named]) -> list[Named]:
        """The first of `best` with misses on the CPU and the first with whole layers there, with each number but the
        grid's."""
        misses = [(split, config) for split, config in best if config.cpu.policy != "none"][:1]
        layers = [(split, config) for split, config in best if config.cpu.layers][:1]
        rest = [count for count in self.counts if count != self.first]
        return [(split, with_threads(config, count)) for split, config in misses + layers for count in rest]


def cpu_threads_for(hardware: HardwareProfile, shape: ModelShape) -> CpuThreads:
    """What to choose from: the numbers that a calibration with this model measured, else powers of two up to the
    host's cores, whose rate is derived from that of one."""
    measured, host = hardware.measured, hardware.host
    if measured is not None and measured.model == shape.name:
        counts = measured.cpu_threads
        origin = f"measured with {numbers_text(counts)}"
        if len(counts) == 1:
            origin = "not searched, since calibrate measured one alone (calibrate --cpu-threads 1,2,4 measures more)"
    elif host is not None:
        counts = thread_counts(most_threads(host))
        origin = f"derived: the rate of one core of {host.name} so many times, up to what its memory gives"
    else:
        return CpuThreads()

    def token_ns(threads: int) -> int:
        costs = CostModel(hardware, shape, threads).compute
        return sum(costs.cpu_experts_ns(layer, 1, shape.top_k, shape.top_k) for layer in range(shape.num_moe_layers))

    return CpuThreads(counts, min(counts, key=token_ns), f"CPU threads: {origin}")


def with_threads(config: OffloadConfig, threads: int) -> OffloadConfig:
    """The same with another number of threads, which its label says."""
    label = f"{config.label.removesuffix(threads_text(config.cpu.threads))}{threads_text(threads)}"
    return config.model_copy(update={"cpu": config.cpu.model_copy(update={"threads": threads}), "label": label})


def threads_text(threads: int | None) -> str:
    """The end of a label that says so."""
    return "" if threads is None else f", {threads} CPU thread{'s' if threads > 1 else ''}"


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
