"""What no policy can beat: perfect eviction, perfect prefetch, and the larger of compute and transfer."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.cost_model import CostModel
from simulator.machine import PassTimes
from simulator.policies.belady import Belady, future_uses
from simulator.policies.capacity import plan_capacity
from simulator.policies.config import OffloadConfig
from simulator.policies.core import OffloadCore
from simulator.policies.prefetch import NoPrefetch
from trace_capture.trace import Phase, Trace


def belady_hit_rates(trace: Trace, config: OffloadConfig) -> tuple[float, float]:
    """Hit rates of an eviction that knows the future, with the same budget and no prefetch.

    Returns:
        Over all look-ups, and over those of decode passes; upper bounds for on-demand loading when all experts
        have equal bytes (Belady 1966), close to it otherwise.
    """
    core = _belady_core(trace, config)
    for item in trace.passes:
        core.begin_pass(item.phase == Phase.PREFILL)
        for layer, experts in trace.iter_layers(item):
            core.layer_routed(layer, experts)
            while (wave := core.next_wave()) is not None:
                for key in wave.wait:
                    core.landed(key)
                core.wave_done()
            core.layer_done()
    first, later = core.prefill_counters, core.decode_counters
    lookups = first.lookups + later.lookups
    return (first.hits + later.hits) / max(1, lookups), later.hits / max(1, later.lookups)


def tpot_bounds(trace: Trace, passes: Sequence[PassTimes], costs: CostModel, config: OffloadConfig) -> dict[str, float]:
    """Lower bounds on TPOT in milliseconds, and the best hit rate, beside a result.

    Returns:
        `belady_hit_rate`; `compute_ms`: everything but stalls, issue and prediction; `transfer_ms`: copies that a
        perfect eviction still needs in decode, back to back; `max_ms`: the larger of the two, which a perfect
        prefetch without look-ahead limit would reach.
    """
    decode = [times for times in passes if times.phase != Phase.PREFILL]
    tokens = sum(times.tokens for times in decode)
    hit_rate, decode_hit_rate = belady_hit_rates(trace, config)
    if not tokens:
        return {"belady_hit_rate": hit_rate}
    parts = ("dense", "experts", "decide", "overhead")
    compute_ms = sum(times.terms_ns[name] for times in decode for name in parts) / tokens / 1e6
    per_layer = sum(costs.copy_ns(size) for size in trace.shape.expert_bytes) / trace.shape.num_moe_layers
    lookups = sum(
        len(experts) for item in trace.passes if item.phase != Phase.PREFILL for _, experts in trace.iter_layers(item)
    )
    transfer_ms = lookups * (1 - decode_hit_rate) * per_layer / tokens / 1e6
    return {
        "belady_hit_rate": hit_rate,
        "belady_decode_hit_rate": decode_hit_rate,
        "compute_ms": compute_ms,
        "transfer_ms": transfer_ms,
        "max_ms": max(compute_ms, transfer_ms),
    }


def _belady_core(trace: Trace, config: OffloadConfig) -> OffloadCore:
    capacity = plan_capacity(config.cache, trace.shape)
    uses = future_uses(
        (layer, expert)
        for item in trace.passes
        for layer, experts in trace.iter_layers(item)
        for expert in experts
    )
    policies = [Belady(uses) for _ in capacity.partition_bytes]
    return OffloadCore(trace.shape, capacity, policies, NoPrefetch())
