"""Which strategy family a configuration belongs to, in the terms of published measurements."""

from __future__ import annotations

from simulator.policies.capacity import plan_capacity
from simulator.policies.config import OffloadConfig
from simulator.validation.record import Family
from trace_capture.model_shape import ModelShape


def strategy_family(config: OffloadConfig, shape: ModelShape) -> Family:
    """The family whose validation speaks for predictions of `config` for a model of this shape.

    Raises:
        ConfigError: the budget does not hold a layer's top-k.
    """
    cpu_layers = config.cpu.whole_layers(shape.num_moe_layers)
    if len(cpu_layers) == shape.num_moe_layers:
        return "cpu_experts"
    if config.cpu.policy != "none":
        return "hybrid"
    if cpu_layers:
        return "layer_split"
    if config.prefetch.source != "none":
        return "prefetch"
    if config.cache.policy == "none":
        return "on_demand"
    if plan_capacity(config.cache, shape).total_bytes >= shape.total_expert_bytes:
        return "all_resident"
    return "expert_cache"
