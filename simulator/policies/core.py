"""The offload core: it sees routing, predictions and landings, and says what to load, evict, cancel and wait for.

It is written like a sans-I/O protocol: calls in, plans out. It never sleeps and knows no tensors, files or clock.
Two drivers carry its plans out, the SimPy machine and the live engine, with the same calls in the same order:

    preload                             once -> loads to carry out before the first pass, then landed for each

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
from typing import Any

from simulator.policies.cache import CachePolicy, Key, make_cache_policy
from simulator.policies.capacity import Capacity, describe_partitions, plan_capacity, preloaded_keys
from simulator.policies.config import Mode, OffloadConfig
from simulator.policies.eviction import FutureUses
from simulator.policies.plans import DEMAND_PRIORITY, PREFETCH_PRIORITY
from simulator.policies.plans import Counters as Counters
from simulator.policies.plans import Load as Load
from simulator.policies.plans import Wave as Wave
from simulator.policies.prefetch import PrefetchPolicy, make_prefetch_policy
from trace_capture.model_shape import ModelShape


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
        preloaded: keys to have on the device before the first pass, as far as they fit, the most wanted first.
        stream_prefill: load all experts of the next layer ahead in a prefill, whatever its router will say.

    Attributes:
        warmup_passes: so many decode passes at the start are counted in `warmup_counters`; set by the driver.
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
        *,
        preloaded: Sequence[Key] = (),
        stream_prefill: bool = False,
    ) -> None:
        self._expert_bytes = shape.expert_bytes
        self._num_layers = shape.num_moe_layers
        self._all_experts = range(shape.num_experts)
        self._partition_of_layer = capacity.partition_of_layer
        self._free_bytes = list(capacity.partition_bytes)
        self._cache = list(cache)
        self._expires = [type(policy).expired is not CachePolicy.expired for policy in self._cache]
        self._hears = [type(policy).routed is not CachePolicy.routed for policy in self._cache]
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
        self._preloaded = preloaded
        self._stream_prefill = stream_prefill
        self.warmup_passes = 0
        self._decode_passes = 0
        self.prefill_counters = Counters()
        self.warmup_counters = Counters()
        self.decode_counters = Counters()
        self._counters = self.decode_counters

    @staticmethod
    def from_config(
        config: OffloadConfig,
        shape: ModelShape,
        log: list[tuple[Any, ...]] | None = None,
        future: FutureUses | None = None,
    ) -> OffloadCore:
        """The core that a configuration describes.

        Args:
            config: what was chosen.
            shape: the model it is for.
            log: see the class.
            future: all look-ups to come, of `future_uses`; None in the live engine, which cannot know them.

        Raises:
            ConfigError: the budget is too small, a policy's name is unknown, or a policy needs a future or a profile
                that is not there.
        """
        capacity = plan_capacity(config.cache, shape)
        partitions = describe_partitions(config.cache, capacity, shape, future)
        policies = [make_cache_policy(config.cache.policy, partition) for partition in partitions]
        prefetch = make_prefetch_policy(config.prefetch.source, config.prefetch.setting)
        prefetch.check(shape, future is not None)
        return OffloadCore(
            shape,
            capacity,
            policies,
            prefetch,
            config.prefetch.max_experts,
            config.prefetch.modes(shape.num_moe_layers),
            log,
            preloaded=preloaded_keys(config.cache, capacity, shape),
            stream_prefill=config.prefill.strategy == "stream",
        )

    def preload(self) -> tuple[Load, ...]:
        """Loads that fill the device before the first pass; counted nowhere, since no pass waits for them."""
        if not self._preloaded:
            return ()
        if self.log is not None:
            self.log.append(("preload",))
        counters, self._counters = self._counters, Counters()
        loads = []
        for key in self._preloaded:
            if self._free_bytes[self._partition_of_layer[key[0]]] >= self._expert_bytes[key[0]]:
                loads.append(self._load(key, "preload", DEMAND_PRIORITY, ()))
        self._counters = counters
        return tuple(loads)

    def begin_pass(self, is_prefill: bool) -> None:
        """A forward pass starts. In a prefill, where nearly every expert is active, predictions are not used."""
        if self.log is not None:
            self.log.append(("begin_pass", is_prefill))
        self._prefill = is_prefill
        if is_prefill:
            self._counters = self.prefill_counters
        else:
            is_warm = self._decode_passes >= self.warmup_passes
            self._counters = self.decode_counters if is_warm else self.warmup_counters
            self._decode_passes += 1

    def continue_counting(self, other: OffloadCore) -> None:
        """Go on with the counts of a core that this one replaces."""
        self.warmup_passes, self._decode_passes = other.warmup_passes, other._decode_passes
        self.prefill_counters, self.warmup_counters = other.prefill_counters, other.warmup_counters
        self.decode_counters = other.decode_counters

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
        partition = self._partition_of_layer[layer]
        if self._hears[partition]:
            self._cache[partition].routed(layer, experts)
        self._count_lookups(layer, experts)
        if not self._pending or self.modes[layer] != "hint" or (self._prefill and self._stream_prefill):
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
        if target >= self._num_layers or (self._prefill and not self._stream_prefill):
            return ()
        if self._prefill:
            loads = self._load_ahead(target, self._all_experts, DEMAND_PRIORITY)
        else:
            wanted = self.prefetch.select(target, predicted)[: self._max_prefetch]
            priority = PREFETCH_PRIORITY if self.modes[target] == "hint" else DEMAND_PRIORITY
            loads = self._load_ahead(target, wanted, priority) if wanted else ()
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

    def _load_ahead(self, target: int, wanted: Sequence[int], priority: int) -> tuple[Load, ...]:
        """Prefetches of `wanted` experts of the layer `target`, in order, until there is no room."""
        keys = [(target, expert) for expert in wanted]
        self._foreseen.update(keys)
        resident = self._resident[target]
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
        elif reason == "prefetch":
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
