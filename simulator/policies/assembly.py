"""A core and all its policies, put together as a configuration says."""

from __future__ import annotations

from typing import Any

from simulator.policies.balancer import ExpertTimes
from simulator.policies.cache import make_cache_policy
from simulator.policies.capacity import describe_partitions, plan_capacity, preloaded_keys, room_of_layers
from simulator.policies.config import OffloadConfig
from simulator.policies.core import OffloadCore
from simulator.policies.eviction import FutureUses
from simulator.policies.placement import PlacementSettings, make_placement_policy
from simulator.policies.prefetch import make_prefetch_policy
from simulator.policies.utility_core import UtilityCore
from simulator.policies.utility_loads import UtilityLoads
from trace_capture.errors import ConfigError
from trace_capture.model_shape import ModelShape


def make_core(
    config: OffloadConfig,
    shape: ModelShape,
    log: list[tuple[Any, ...]] | None = None,
    future: FutureUses | None = None,
    times: ExpertTimes | None = None,
) -> OffloadCore:
    """The core that a configuration describes; see `OffloadCore.from_config`."""
    if config.needs_expert_times and times is None:
        raise ConfigError(
            "cpu.policy = 'balanced' and utility.loads weigh what an expert costs on either side, and the core was "
            "made without those times"
        )
    layers = shape.num_moe_layers
    cpu_layers = config.cpu.whole_layers(layers)
    capacity = plan_capacity(config.cache, shape, cpu_layers)
    signal = config.utility.make(shape, room_of_layers(capacity, shape)) if config.needs_utility else None
    partitions = describe_partitions(config, capacity, shape, cpu_layers, future, signal)
    policies = [make_cache_policy(config.cache.policy, partition) for partition in partitions]
    hot = None
    if config.utility.loads != "none" and signal is not None and times is not None:
        hot = UtilityLoads(config.utility, signal, times)
    settings = PlacementSettings(
        max_tokens=config.cpu.max_tokens,
        max_admissions=0 if hot else config.cpu.admissions,
        signal=signal,
        times=times,
        objective=config.utility.objective,
        fixed_tau=config.utility.tau,
        hot_from=hot.thresholds if hot and config.cpu.hot_misses == "load" else None,
        loads_misses=config.cpu.hot_misses == "balance",
    )
    placement = make_placement_policy(config.cpu.policy, settings, cpu_layers)
    prefetch = make_prefetch_policy(config.prefetch.source, config.prefetch.setting)
    prefetch.check(shape, future is not None)
    modes = config.prefetch.modes(layers)
    parts = shape, capacity, policies, prefetch, config.prefetch.max_experts, modes, placement, log
    core = OffloadCore(*parts) if hot is None else UtilityCore(hot, *parts)
    core.preloaded = preloaded_keys(config.cache, capacity, shape, cpu_layers)
    core.streams_prefill = config.prefill.strategy == "stream"
    return core
