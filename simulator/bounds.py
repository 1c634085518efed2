"""What no policy can beat: perfect eviction, perfect prefetch, and the larger of compute and transfer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from simulator.cost_model import ComputeCosts, CostModel
from simulator.executed import Routing, executed_routing
from simulator.perfect_eviction import Misses, perfect_eviction
from simulator.policies.capacity import Capacity, plan_capacity, preloaded_keys
from simulator.policies.config import CpuConfig, OffloadConfig
from simulator.policies.eviction import Key
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Phase, Trace

_REMEMBERED = 16
"""Answers of `_misses` that are kept: sweeps ask for the same trace and budget again and again."""

_known_misses: dict[tuple[object, ...], Misses] = {}


def belady_hit_rates(trace: Trace, config: OffloadConfig, warmup_passes: int = 0) -> tuple[float, float]:
    """Hit rates of evictions that know the future, with the same budget, the same start and no prefetch.

    Args:
        trace: what is replayed.
        config: budget, and what is on the device at the start.
        warmup_passes: decode passes at the start whose look-ups are not counted.

    Returns:
        The best over all look-ups, and the best over those of decode passes, which another eviction may reach: one
        that keeps nothing for a later prefill. Upper bounds for on-demand loading when all experts have equal bytes
        (Belady 1966), close to them otherwise.
    """
    return _hit_rates(trace, config, executed_routing(trace, config), warmup_passes)


def _hit_rates(trace: Trace, config: OffloadConfig, routing: Routing, warmup_passes: int) -> tuple[float, float]:
    """See `belady_hit_rates`."""
    lookups = routing.lengths
    decode = np.array(_counted_decode(trace, warmup_passes))
    counted = decode | np.array([item.phase == Phase.PREFILL for item in trace.passes])
    hits = (lookups - _misses(trace, config, routing, counted.tolist()))[counted]
    decode_hits = (lookups - _misses(trace, config, routing, decode.tolist()))[decode]
    return float(hits.sum() / max(1, lookups[counted].sum())), float(decode_hits.sum() / max(1, lookups[decode].sum()))


def _counted_decode(trace: Trace, warmup_passes: int) -> list[bool]:
    """Which passes are decode passes behind the warm-up."""
    decode = [place for place, item in enumerate(trace.passes) if item.phase != Phase.PREFILL]
    counted = set(decode[warmup_passes:])
    return [place in counted for place in range(len(trace.passes))]


def _misses(trace: Trace, config: OffloadConfig, routing: Routing, counted: list[bool]) -> Misses:
    """Misses [passes, L] of a perfect eviction for which misses in passes that are not `counted` cost nothing.

    See `perfect_eviction`; answers are remembered.
    """
    cpu_layers = config.cpu.whole_layers(trace.shape.num_moe_layers)
    capacity = plan_capacity(config.cache, trace.shape, cpu_layers)
    start = _start(config, capacity, trace.shape, cpu_layers)
    partitions = capacity.partition_bytes, capacity.partition_of_layer
    key = (trace.digest, partitions, routing.digest, tuple(counted), cpu_layers, start)
    if key not in _known_misses:
        while len(_known_misses) >= _REMEMBERED:
            _known_misses.pop(next(iter(_known_misses)), None)
        _known_misses[key] = perfect_eviction(routing, trace.shape, capacity, cpu_layers, start, counted)
    return _known_misses[key]


def _start(config: OffloadConfig, capacity: Capacity, shape: ModelShape, cpu_layers: frozenset[int]) -> tuple[Key, ...]:
    """What is on the device before the first pass."""
    free = list(capacity.partition_bytes)
    start = []
    for key in preloaded_keys(config.cache, capacity, shape, cpu_layers):
        partition = capacity.partition_of_layer[key[0]]
        if free[partition] >= shape.expert_bytes[key[0]]:
            free[partition] -= shape.expert_bytes[key[0]]
            start.append(key)
    return tuple(start)


class _Layer(NamedTuple):
    """What one layer of a pass takes: its compute, and its copies under perfect eviction."""

    dense_ns: int
    decide_ns: int
    experts_ns: int
    copies_ns: int


def tpot_bounds(trace: Trace, costs: CostModel, config: OffloadConfig, warmup_passes: int = 0) -> dict[str, float]:
    """The best hit rates, and times per output token in milliseconds that loading could come down to.

    Args:
        trace: what is replayed.
        costs: of the machine.
        config: budget, start and CPU.
        warmup_passes: decode passes at the start that are not counted, as in the figures of the run.

    Returns:
        `belady_hit_rate`, `belady_decode_hit_rate`: see `belady_hit_rates`.
        `compute_ms`: everything but copies and their issue, prediction and the bookkeeping of loads.
        `transfer_ms`: copies that a perfect eviction still needs in decode, back to back.
        `max_ms`: the larger of the two. With experts of equal bytes no policy is faster. Where the CPU may run what
        is missing, nothing must be copied, and each layer's experts take the best split over device and CPU.
        `prefetch_ms`: these copies by a perfect prefetch, in the order of need, as far ahead as it likes.
        `look_ahead_ms`: by a perfect prefetch that looks one layer ahead, from its routing on (Speculating Experts,
        arXiv 2603.19289, Eq. 1 as a recurrence); the first layer of a pass is not foreseen.
        `on_demand_ms`: without prefetch.
        The last three stand for that one eviction. They are what perfection in one part would give, and a policy
        that evicts less well may hide its copies better.
    """
    routing = executed_routing(trace, config)
    hit_rate, decode_hit_rate = _hit_rates(trace, config, routing, warmup_passes)
    counted = _counted_decode(trace, warmup_passes)
    tokens = sum(trace.output_tokens(item) for item, counts in zip(trace.passes, counted, strict=True) if counts)
    if not tokens:
        return {"belady_hit_rate": hit_rate}
    compute_ns, transfer_ns, prefetch_ns, look_ahead_ns = _perfect_times(trace, costs, config, routing, counted)
    times_ns = {
        "compute_ms": compute_ns,
        "transfer_ms": transfer_ns,
        "max_ms": max(compute_ns, transfer_ns),
        "prefetch_ms": prefetch_ns,
        "look_ahead_ms": look_ahead_ns,
        "on_demand_ms": compute_ns + transfer_ns,
    }
    rates = {"belady_hit_rate": hit_rate, "belady_decode_hit_rate": decode_hit_rate}
    return rates | {name: value / tokens / 1e6 for name, value in times_ns.items()}


def _perfect_times(
    trace: Trace, costs: CostModel, config: OffloadConfig, routing: Routing, counted: list[bool]
) -> tuple[int, int, int, int]:
    """Nanoseconds of all counted decode passes: compute, copies, prefetch without limit, prefetch one layer ahead."""
    misses = _misses(trace, config, routing, counted)
    copy_ns = [costs.copy_ns(size) for size in trace.shape.expert_bytes]
    decide_ns = costs.compute.decide_ns(0)
    experts_time = lru_cache(maxsize=None)(partial(_experts_time, costs.compute, config.cpu, trace.shape))
    compute_ns = transfer_ns = unlimited_ns = look_ahead_ns = 0
    now_ns = link_ns = 0  # of a stretch of decode passes, in which the link may run ahead
    for place, item in enumerate(trace.passes):
        if not counted[place]:
            unlimited_ns += now_ns
            now_ns = link_ns = 0
            continue
        tokens, context = item.stop - item.start, int(trace.position[item.start])
        layers = []
        dense = costs.compute.dense_of_layers_ns(tokens, context)
        missed = misses[place].tolist()
        for layer, active in enumerate(routing.lengths[place].tolist()):
            if not active:
                layers.append(_Layer(dense[layer], 0, 0, 0))
                continue
            experts_ns, is_loaded = experts_time(layer, tokens, active)
            copies_ns = missed[layer] * copy_ns[layer] if is_loaded else 0
            layers.append(_Layer(dense[layer], decide_ns, experts_ns, copies_ns))
        overhead_ns = costs.compute.overhead_ns(tokens) + costs.drafting_ns(trace.info.draft, tokens - 1)
        compute_ns += overhead_ns
        look_ahead_ns += overhead_ns + _look_ahead_ns(layers)
        now_ns += overhead_ns
        for before_ns, bookkeeping_ns, experts_ns, copies_ns in layers:
            compute_ns += before_ns + bookkeeping_ns + experts_ns
            transfer_ns += copies_ns
            link_ns += copies_ns
            now_ns = max(now_ns + before_ns + bookkeeping_ns, link_ns) + experts_ns
    return compute_ns, transfer_ns, unlimited_ns + now_ns, look_ahead_ns


def _experts_time(
    compute: ComputeCosts, cpu: CpuConfig, shape: ModelShape, layer: int, tokens: int, active: int
) -> tuple[int, bool]:
    """Time of a layer's experts at best, and whether its misses must be loaded.

    Where the CPU may take what is missing, the best is the split over device and CPU that ends first, whatever it
    takes to have the device's part there.
    """
    if layer in cpu.whole_layers(shape.num_moe_layers):
        return compute.cpu_experts_ns(layer, tokens, active, active), False
    whole_ns = compute.experts_ns(layer, tokens, active, active)
    if cpu.policy == "none":
        return whole_ns, True
    splits = [
        max(
            compute.experts_ns(layer, tokens, active - count, active) if count < active else 0,
            compute.cpu_experts_ns(layer, tokens, count, active),
        )
        for count in range(1, active + 1)
    ]
    return min(whole_ns, *splits), False


def _look_ahead_ns(layers: Sequence[_Layer]) -> int:
    """One pass when the copies of a layer may begin once the layer before it has been routed, the first one's once
    it has been routed itself."""
    now_ns = 0
    landed_ns = layers[0].dense_ns + layers[0].copies_ns
    next_copies_ns = [each.copies_ns for each in layers[1:]] + [0]
    for (dense_ns, decide_ns, experts_ns, _), copies_ns in zip(layers, next_copies_ns, strict=True):
        routed_ns = now_ns + dense_ns
        ready_ns = max(routed_ns + decide_ns, landed_ns)
        landed_ns = max(routed_ns, landed_ns) + copies_ns
        now_ns = ready_ns + experts_ns
    return now_ns
