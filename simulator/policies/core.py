"""The offload core: it sees routing, predictions and landings, and says what to load, evict, cancel and wait for.

It is written like a sans-I/O protocol: calls in, plans out. It never sleeps and knows no tensors, files or clock.
Two drivers carry its plans out, the SimPy machine and the live engine, with the same calls in the same order:

    begin_pass
    for each MoE layer:
        landed ...                      every copy that has finished since, in order of landing
        layer_routed                    -> stale prefetches; the driver tries to cancel, reports `cancelled`
        until next_wave gives None:
            next_wave                   -> loads to submit, keys to wait for, experts to run
            plan_prefetch               once, after the first wave's loads were submitted -> loads to submit
            landed ...                  until everything waited for is there
            wave_done
        layer_done

A layer normally is one wave. It is several when its active experts do not fit its partition at once (prefill).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from simulator.policies.cache import CachePolicy, Key, make_cache_policy
from simulator.policies.capacity import Capacity, plan_capacity
from simulator.policies.config import Mode, OffloadConfig
from simulator.policies.prefetch import PrefetchPolicy, make_prefetch_policy
from trace_capture.model_shape import ModelShape

DEMAND_PRIORITY = 0
PREFETCH_PRIORITY = 1


class Load(NamedTuple):
    """Copy one expert to the device. `evicts` have left by the time the copy may start."""

    key: Key
    num_bytes: int
    reason: str
    priority: int
    evicts: tuple[Key, ...]


class Wave(NamedTuple):
    """Experts of a layer that are computed together once everything in `wait` has landed.

    `experts` is empty when the layer must first wait for stray copies to land before it can make room.
    """

    experts: tuple[int, ...]
    loads: tuple[Load, ...]
    wait: tuple[Key, ...]


@dataclass
class Counters:
    """What the decisions came to. `hits` were resident when asked for, `late` were on their way."""

    lookups: int = 0
    hits: int = 0
    late: int = 0
    demand_loads: int = 0
    prefetch_loads: int = 0
    prefetch_used: int = 0
    evictions: int = 0
    bytes_loaded: int = 0


class OffloadCore:
    """Residency and decisions for one model.

    Args:
        shape: layers and bytes per expert.
        capacity: partitions of device memory.
        cache: makes one eviction policy per partition.
        prefetch: what to load ahead.
        max_prefetch: at most so many experts are named per layer; None for no limit.
        modes: what each layer does with a prediction [L]; None for hints throughout.
        log: if given, every call and every plan is appended to it as a tuple.
    """

    def __init__(
        self,
        shape: ModelShape,
        capacity: Capacity,
        cache: Sequence[CachePolicy],
        prefetch: PrefetchPolicy,
        max_prefetch: int | None = None,
        modes: Sequence[Mode] | None = None,
        log: list[tuple[Any, ...]] | None = None,
    ) -> None:
        self._expert_bytes = shape.expert_bytes
        self._num_layers = shape.num_moe_layers
        self._partition_of_layer = capacity.partition_of_layer
        self._free_bytes = list(capacity.partition_bytes)
        self._cache = list(cache)
        self._expires = [type(policy).expired is not CachePolicy.expired for policy in self._cache]
        self.prefetch = prefetch
        self._max_prefetch = max_prefetch
        self.modes = tuple(modes or ("hint",) * shape.num_moe_layers)
        self.log = log
        self._resident: list[dict[int, bool]] = [{} for _ in shape.expert_bytes]
        """Per layer: experts with a place on the device; True when the copy has landed, False until then."""
        self._pending: dict[Key, None] = {}
        """Copies that are queued or in flight, in order of submission."""
        self._reason: dict[Key, str] = {}
        """Why a key was loaded, until its first use."""
        self._leaving: list[Key] = []
        """Victims chosen for the load being planned."""
        self._active: set[Key] = set()
        self._foreseen: set[Key] = set()
        """Keys that the next layer is expected to ask for; a prefetch must not evict them."""
        self._remaining: list[int] = []
        self._wave: tuple[int, ...] = ()
        self._layer = -1
        self._prefill = False
        self.prefill_counters = Counters()
        self.decode_counters = Counters()
        self._counters = self.decode_counters

    @staticmethod
    def from_config(config: OffloadConfig, shape: ModelShape, log: list[tuple[Any, ...]] | None = None) -> OffloadCore:
        """The core that a configuration describes.

        Raises:
            ConfigError: the budget is too small, or a policy's name is unknown.
        """
        capacity = plan_capacity(config.cache, shape)
        policies = [make_cache_policy(config.cache.policy) for _ in capacity.partition_bytes]
        prefetch = make_prefetch_policy(config.prefetch.source)
        modes = config.prefetch.modes(shape.num_moe_layers)
        return OffloadCore(shape, capacity, policies, prefetch, config.prefetch.max_experts, modes, log)

    def begin_pass(self, is_prefill: bool) -> None:
        """A forward pass starts. Nothing is prefetched in a prefill, where nearly every expert is active."""
        if self.log is not None:
            self.log.append(("begin_pass", is_prefill))
        self._prefill = is_prefill
        self._counters = self.prefill_counters if is_prefill else self.decode_counters

    def landed(self, key: Key) -> None:
        """The copy of `key` has finished."""
        if self.log is not None:
            self.log.append(("landed", key))
        self._resident[key[0]][key[1]] = True
        del self._pending[key]

    def cancelled(self, key: Key) -> None:
        """A queued copy of `key` was withdrawn before it began."""
        if self.log is not None:
            self.log.append(("cancelled", key))
        self._leave(key)
        self._counters.bytes_loaded -= self._expert_bytes[key[0]]
        self._counters.prefetch_loads -= 1

    def layer_routed(self, layer: int, experts: Sequence[int]) -> tuple[Key, ...]:
        """`layer` runs `experts` (distinct, in order): its router's choice, or in mode `commit` the predicted ones.
        Gives queued copies for this layer that are
        no longer wanted; the driver may cancel those that have not begun."""
        if self.log is not None:
            self.log.append(("layer_routed", layer, tuple(experts)))
        self._layer = layer
        self._remaining = list(experts)
        active = self._active = {(layer, expert) for expert in experts}
        self._foreseen.clear()
        self.prefetch.observe(layer, experts)
        self._count_lookups(layer, experts)
        if not self._pending or self.modes[layer] != "hint":
            return ()
        return tuple(key for key in self._pending if key[0] == layer and key not in active)

    def next_wave(self) -> Wave | None:
        """What the routed layer does next, or None when all its experts have run."""
        if not self._remaining:
            return None
        layer = self._layer
        resident = self._resident[layer]
        partition = self._partition_of_layer[layer]
        loads, experts = self._load_remaining(layer)
        if self._pending:
            wait = tuple((layer, expert) for expert in experts if not resident[expert])
        else:
            wait = ()
        if not experts:  # copies nobody asked for fill the partition: once landed, they can be evicted
            wait = tuple(key for key in self._pending if self._partition_of_layer[key[0]] == partition)
            if not wait:
                raise RuntimeError(f"MoE layer {layer} can neither run an expert nor wait for a copy")
        used = self._cache[partition].used
        for expert in experts:
            used((layer, expert))
        self._wave = experts
        wave = Wave(experts, tuple(loads), wait)
        if self.log is not None:
            self.log.append(("wave", wave))
        return wave

    def plan_prefetch(self, predicted: Sequence[int]) -> tuple[Load, ...]:
        """Loads for the layer after the routed one; `predicted` are the ids of `prefetch.prediction`, if it has one.

        Experts are taken in order until no room can be made without touching what this layer or the next needs.
        """
        if self.log is not None:
            self.log.append(("plan_prefetch", tuple(predicted)))
        target = self._layer + 1
        if self._prefill or target >= self._num_layers:
            return ()
        wanted = self.prefetch.select(target, predicted)
        if not wanted:
            loads: tuple[Load, ...] = ()
        else:
            loads = self._load_ahead(target, wanted[: self._max_prefetch])
        if self.log is not None:
            self.log.append(("prefetch", loads))
        return loads

    def wave_done(self) -> None:
        """The experts of the last wave have run."""
        if self.log is not None:
            self.log.append(("wave_done",))
        if len(self._wave) == len(self._remaining):
            self._remaining = []
            self._active = set()
        else:
            done = set(self._wave)
            self._remaining = [expert for expert in self._remaining if expert not in done]
            self._active = {(self._layer, expert) for expert in self._remaining}
        self._wave = ()

    def layer_done(self) -> tuple[Key, ...]:
        """All experts of the layer have run. Gives keys that the cache policy drops now."""
        if self.log is not None:
            self.log.append(("layer_done",))
        self._active = set()
        layer = self._layer
        partition = self._partition_of_layer[layer]
        if not self._expires[partition]:
            return ()
        present = [(layer, expert) for expert, landed in self._resident[layer].items() if landed]
        dropped = tuple(self._cache[partition].expired(present))
        for key in dropped:
            self._leave(key)
            self._counters.evictions += 1
        return dropped

    def is_landed(self, key: Key) -> bool:
        """Whether `key` is on the device and its copy has finished."""
        return self._resident[key[0]].get(key[1], False)

    def resident_bytes(self) -> int:
        """Bytes of device memory taken by experts, those on their way included."""
        sizes = zip(self._resident, self._expert_bytes, strict=True)
        return sum(len(resident) * size for resident, size in sizes)

    def resident(self) -> list[Key]:
        """Keys with a place on the device, those on their way included."""
        return [(layer, expert) for layer, resident in enumerate(self._resident) for expert in resident]

    def _count_lookups(self, layer: int, experts: Sequence[int]) -> None:
        counters = self._counters
        resident = self._resident[layer]
        present = [expert for expert in experts if expert in resident]
        late = 0
        if self._pending:
            late = sum(not resident[expert] for expert in present)
        counters.lookups += len(experts)
        counters.late += late
        counters.hits += len(present) - late
        if self._reason:
            reasons = [self._reason.pop((layer, expert), "") for expert in present]
            counters.prefetch_used += reasons.count("prefetch")

    def _load_remaining(self, layer: int) -> tuple[list[Load], tuple[int, ...]]:
        """Loads for experts of the layer that still have to run, as far as there is room, and those that can run."""
        resident = self._resident[layer]
        loads: list[Load] = []
        missing = [expert for expert in self._remaining if expert not in resident]
        for expert in missing:
            key = (layer, expert)
            evicts = self._make_room(key, self._can_leave)
            if evicts is None:
                return loads, tuple(expert for expert in self._remaining if expert in resident)
            loads.append(self._load(key, "demand", DEMAND_PRIORITY, evicts))
        return loads, tuple(self._remaining)

    def _load_ahead(self, target: int, wanted: Sequence[int]) -> tuple[Load, ...]:
        """Prefetches of `wanted` experts of the layer `target`, in order, until there is no room."""
        keys = [(target, expert) for expert in wanted]
        self._foreseen.update(keys)
        resident = self._resident[target]
        priority = PREFETCH_PRIORITY if self.modes[target] == "hint" else DEMAND_PRIORITY
        loads: list[Load] = []
        for key in keys:
            if key[1] in resident:
                continue
            evicts = self._make_room(key, self._can_leave_unforeseen)
            if evicts is None:
                break
            loads.append(self._load(key, "prefetch", priority, evicts))
        return tuple(loads)

    def _load(self, key: Key, reason: str, priority: int, evicts: tuple[Key, ...]) -> Load:
        layer, expert = key
        size = self._expert_bytes[layer]
        partition = self._partition_of_layer[layer]
        self._resident[layer][expert] = False
        self._pending[key] = None
        self._free_bytes[partition] -= size
        self._cache[partition].admitted(key)
        counters = self._counters
        counters.bytes_loaded += size
        if reason == "demand":
            counters.demand_loads += 1
        else:
            counters.prefetch_loads += 1
            self._reason[key] = reason
        return Load(key, size, reason, priority, evicts)

    def _make_room(self, key: Key, can_leave: Callable[[Key], bool]) -> tuple[Key, ...] | None:
        """Evict until `key` fits; None, with nothing evicted, when it cannot."""
        partition = self._partition_of_layer[key[0]]
        size = self._expert_bytes[key[0]]
        freed = self._free_bytes[partition]
        if freed >= size:
            return ()
        policy = self._cache[partition]
        victims: list[Key] = []
        self._leaving = victims
        while freed < size:
            victim = policy.choose_victim(can_leave)
            if victim is None:
                return None
            victims.append(victim)
            freed += self._expert_bytes[victim[0]]
        for victim in victims:
            self._leave(victim)
        self._counters.evictions += len(victims)
        return tuple(victims)

    def _can_leave(self, key: Key) -> bool:
        """Copies under way stay, and so does what this layer still needs."""
        return key not in self._pending and key not in self._active and key not in self._leaving

    def _can_leave_unforeseen(self, key: Key) -> bool:
        """As `_can_leave`; for a prefetch, what the next layer may need stays as well."""
        return self._can_leave(key) and key not in self._foreseen

    def _leave(self, key: Key) -> None:
        layer, expert = key
        partition = self._partition_of_layer[layer]
        del self._resident[layer][expert]
        if self._pending:
            self._pending.pop(key, None)
        if self._reason:
            self._reason.pop(key, None)
        self._free_bytes[partition] += self._expert_bytes[layer]
        self._cache[partition].removed(key)
