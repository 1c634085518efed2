"""How a budget becomes partitions of device memory: one per layer, or one for all."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.config import CacheConfig, OffloadConfig
from simulator.policies.eviction import FutureUses, Key, Partition
from simulator.policies.popularity import hot_keys
from simulator.policies.utility import UtilitySignal
from trace_capture.errors import ConfigError
from trace_capture.model_shape import ModelShape


@dataclass(frozen=True)
class Capacity:
    """Partitions of device memory.

    Attributes:
        partition_of_layer: partition of each MoE layer [L].
        partition_bytes: size of each partition; 0 for that of a layer which runs on the CPU.
    """

    partition_of_layer: tuple[int, ...]
    partition_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Device memory for experts."""
        return sum(self.partition_bytes)


def plan_capacity(cache: CacheConfig, shape: ModelShape, cpu_layers: frozenset[int] = frozenset()) -> Capacity:
    """Turn the sizes of a cache configuration into partitions for a model.

    Args:
        cache: sizes.
        shape: of the model.
        cpu_layers: MoE layers that run on the CPU altogether and have no slots.

    Raises:
        ConfigError: a partition could not hold the top-k experts of one of its layers.
    """
    layers = shape.num_moe_layers
    if cache.slots_per_layer is not None:
        if len(cache.slots_per_layer) != layers:
            raise ConfigError(
                f"cache.slots_per_layer has {len(cache.slots_per_layer)} entries, {shape.name} has {layers} MoE layers"
            )
        slots = list(cache.slots_per_layer)
    else:
        budget = _budget_bytes(cache, shape)
        if cache.scope == "global":
            on_device = [size for layer, size in enumerate(shape.expert_bytes) if layer not in cpu_layers]
            _check_room(budget, max(on_device, default=0) * shape.top_k, budget, shape)
            return Capacity((0,) * layers, (budget if on_device else 0,))
        slots = even_slots(budget, shape, cpu_layers)
    for layer, count in enumerate(slots):
        _check_slots(layer, count, layer in cpu_layers, shape)
    sizes = tuple(count * size for count, size in zip(slots, shape.expert_bytes, strict=True))
    return Capacity(tuple(range(layers)), sizes)


def describe_partitions(
    config: OffloadConfig,
    capacity: Capacity,
    shape: ModelShape,
    cpu_layers: frozenset[int] = frozenset(),
    future: FutureUses | None = None,
    utility: UtilitySignal | None = None,
) -> list[Partition]:
    """What a cache policy may know of each partition; layers on the CPU need none of it.

    Raises:
        ConfigError: `cache.hot_experts` does not fit the model.
    """
    cache = config.cache
    hot = hot_keys(cache.hot_experts, shape)
    if utility is None and CACHE_POLICIES[cache.policy].needs_utility:
        utility = config.utility.make(shape, room_of_layers(capacity, shape))
    layers_of: list[list[int]] = [[] for _ in capacity.partition_bytes]
    for layer, owner in enumerate(capacity.partition_of_layer):
        if layer not in cpu_layers:
            layers_of[owner].append(layer)
    partitions = []
    for capacity_bytes, layers in zip(capacity.partition_bytes, layers_of, strict=True):
        needed_bytes = shape.num_experts * sum(shape.expert_bytes[layer] for layer in layers)
        partitions.append(
            Partition(
                capacity_bytes=capacity_bytes,
                needed_bytes=needed_bytes,
                expert_bytes=needed_bytes // (shape.num_experts * max(1, len(layers))) or 1,
                hot_experts=None if hot is None else tuple(key for key in hot if key[0] in layers),
                seed=cache.seed,
                future=future,
                utility=utility,
            )
        )
    return partitions


def room_of_layers(capacity: Capacity, shape: ModelShape) -> list[int]:
    """Experts that each layer has room for [L], its share of the partition where several layers have one."""
    owners = capacity.partition_of_layer
    return [
        capacity.partition_bytes[owner] // (owners.count(owner) * size)
        for owner, size in zip(owners, shape.expert_bytes, strict=True)
    ]


def preloaded_keys(
    cache: CacheConfig, capacity: Capacity, shape: ModelShape, cpu_layers: frozenset[int] = frozenset()
) -> list[Key]:
    """Experts that a run starts with on the device, as far as there is room, the most wanted first.

    Raises:
        ConfigError: experts are to be preloaded and nothing says which.
    """
    wanted = CACHE_POLICIES[cache.policy].starts_full if cache.preload is None else cache.preload
    if not wanted:
        return []
    on_device = [layer for layer in range(shape.num_moe_layers) if layer not in cpu_layers]
    if capacity.total_bytes >= shape.num_experts * sum(shape.expert_bytes[layer] for layer in on_device):
        return [(layer, expert) for layer in on_device for expert in range(shape.num_experts)]
    hot = hot_keys(cache.hot_experts, shape)
    if hot is None:
        raise ConfigError(
            "cache.preload needs cache.hot_experts, the experts of each layer to start with; 'moe-studio simulate "
            "TRACE --preload --save-config FILE' makes a configuration with them"
        )
    return [key for key in hot if key[0] not in cpu_layers]


def even_slots(budget_bytes: int, shape: ModelShape, cpu_layers: frozenset[int] = frozenset()) -> list[int]:
    """Slots per layer [L] that differ by at most one between layers and fit the budget; none for `cpu_layers`.

    Raises:
        ConfigError: the budget does not hold the top-k experts of every layer.
    """
    one_each = sum(size for layer, size in enumerate(shape.expert_bytes) if layer not in cpu_layers)
    if not one_each:
        return [0] * shape.num_moe_layers
    _check_room(budget_bytes, one_each * shape.top_k, budget_bytes, shape)
    base = min(budget_bytes // one_each, shape.num_experts)
    slots = [0 if layer in cpu_layers else base for layer in range(shape.num_moe_layers)]
    left = budget_bytes - base * one_each
    for layer, size in enumerate(shape.expert_bytes):
        if layer not in cpu_layers and base < shape.num_experts and size <= left:
            slots[layer] += 1
            left -= size
    return slots


def _check_slots(layer: int, count: int, is_on_cpu: bool, shape: ModelShape) -> None:
    name = f"layer {shape.moe_layer_ids[layer]}"
    if is_on_cpu:
        if count:
            raise ConfigError(
                f"{name} gets {count} expert slots and runs on the CPU, where it needs none: set its entry of "
                "cache.slots_per_layer to 0, or take the layer out of cpu.layers"
            )
    elif not shape.top_k <= count <= shape.num_experts:
        raise ConfigError(
            f"{name} gets {count} expert slots; it needs at least its top-k of {shape.top_k} (and has "
            f"{shape.num_experts} experts): change cache.slots_per_layer"
        )


def _budget_bytes(cache: CacheConfig, shape: ModelShape) -> int:
    if cache.budget_bytes is not None:
        return cache.budget_bytes
    return round((cache.budget_ratio or 0.0) * shape.total_expert_bytes)


def _check_room(have_bytes: int, need_bytes: int, budget_bytes: int, shape: ModelShape) -> None:
    if have_bytes < need_bytes:
        raise ConfigError(
            f"a budget of {budget_bytes:,} bytes cannot hold the top-{shape.top_k} experts that {shape.name} needs at "
            f"once; give at least {need_bytes:,} bytes ({need_bytes / shape.total_expert_bytes:.3f} of all experts)"
        )
