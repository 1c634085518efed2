"""Fill the hot lists of a configuration from the load that a trace counts, or from counts alone."""

from __future__ import annotations

from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.capacity import plan_capacity
from simulator.policies.config import CacheConfig, OffloadConfig
from simulator.policies.popularity import HotLists, hottest_of_all, hottest_per_layer
from simulator.policies.prefetch import make_prefetch_policy
from trace_capture.errors import ConfigError
from trace_capture.expert_counts import ExpertCounts, popularity
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Trace


def needs_hot_experts(config: OffloadConfig) -> bool:
    """Whether a configuration decides by hot lists that it does not have."""
    return _cache_needs(config.cache) or _prefetch_needs(config)


def with_hot_experts(
    config: OffloadConfig, profile: Trace | ExpertCounts, shape: ModelShape | None = None
) -> OffloadConfig:
    """The configuration with the hot lists that its policies need and that it does not have, else as it is.

    Policy `static` keeps as many experts as there is room for beside the top-k that pass through; `preload` with
    another policy fills the device; prefetch by popularity names `max_experts` per layer, or the top-k.

    Args:
        config: cache, preload and prefetch source.
        profile: a trace whose generated tokens are counted (all tokens where none was generated), or counts.
        shape: the model that the configuration is for, which gives the bytes; by default the profile's.

    Raises:
        ConfigError: the budget does not hold a layer's top-k, or the profile is of a model of another size.
    """
    if not needs_hot_experts(config):
        return config
    shape = shape or profile.shape
    _check_same_size(profile.shape, shape)
    load: list[list[int]] = popularity(profile).tolist()
    cache, prefetch = config.cache, config.prefetch
    if _cache_needs(cache):
        cpu_layers = config.cpu.whole_layers(shape.num_moe_layers)
        load = [[0] * shape.num_experts if layer in cpu_layers else row for layer, row in enumerate(load)]
        cache = cache.model_copy(update={"hot_experts": _hot_experts(cache, shape, load, cpu_layers)})
    if _prefetch_needs(config):
        count = prefetch.max_experts or shape.top_k
        lists = hottest_per_layer(load, [count] * shape.num_moe_layers)
        prefetch = prefetch.model_copy(update={"hot_experts": lists})
    return config.model_copy(update={"cache": cache, "prefetch": prefetch})


def _check_same_size(counted: ModelShape, shape: ModelShape) -> None:
    have, want = ((one.num_moe_layers, one.num_experts) for one in (counted, shape))
    if have != want:
        raise ConfigError(
            f"popular experts were counted on {counted.name} ({have[0]} MoE layers x {have[1]} experts) and are for "
            f"{shape.name} ({want[0]} x {want[1]}); give a profile of the same model"
        )


def _cache_needs(cache: CacheConfig) -> bool:
    policy = CACHE_POLICIES[cache.policy]
    return cache.hot_experts is None and (policy.needs_hot_experts or bool(cache.preload and not policy.starts_full))


def _prefetch_needs(config: OffloadConfig) -> bool:
    source = make_prefetch_policy(config.prefetch.source)
    return config.prefetch.hot_experts is None and source.needs_hot_experts


def _hot_experts(cache: CacheConfig, shape: ModelShape, load: list[list[int]], cpu_layers: frozenset[int]) -> HotLists:
    capacity = plan_capacity(cache, shape, cpu_layers)
    passing = shape.top_k if CACHE_POLICIES[cache.policy].needs_hot_experts else 0
    if cache.scope == "global":
        passing_bytes = passing * max(shape.expert_bytes)
        everything = capacity.total_bytes >= shape.total_expert_bytes
        budget_bytes = capacity.total_bytes - (0 if everything else passing_bytes)
        return hottest_of_all(load, budget_bytes, shape.expert_bytes)
    slots = [size // each for size, each in zip(capacity.partition_bytes, shape.expert_bytes, strict=True)]
    return hottest_per_layer(load, [count if count == shape.num_experts else count - passing for count in slots])
