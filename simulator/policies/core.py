"""The offload core: it sees routing, predictions and landings, and says what to load, evict, cancel and wait for.

It is written like a sans-I/O protocol: calls in, plans out. It never sleeps and knows no tensors, files or clock.
Two drivers carry its plans out, the SimPy machine and the live engine, with the same calls in the same order:

    preload                             once -> loads to carry out before the first pass, then landed for each

    drafting_begins                     if the core plans then: before each pass that generates -> loads to submit
    begin_pass
    for each MoE layer:
        landed ...                      every copy that has finished since, in order of landing
        layer_routed                    -> stale loads; the driver tries to cancel, reports `cancelled`
        until next_wave gives None:
            next_wave                   -> experts to start on the CPU, loads to submit, keys to wait for,
                                           experts to run on the device
            plan_prefetch               once, after the first wave's loads were submitted -> loads to submit
            landed ...                  until everything waited for is there
            wave_done
        layer_done                      when the CPU's experts have run as well

A layer normally is one wave. It is several when its active experts do not fit its partition at once (prefill). What a
layer runs on the CPU is handed out with its first wave and takes no part in residency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulator.policies.balancer import ExpertTimes
from simulator.policies.capacity import Capacity
from simulator.policies.config import Mode, OffloadConfig
from simulator.policies.eviction import CachePolicy, FutureUses, Key, Leavers
from simulator.policies.placement import AllOnDevice, PlacementPolicy, make_asked
from simulator.policies.plans import (
    ADMISSION,
    BEHIND_PRIORITY,
    DEMAND_PRIORITY,
    LANDED,
    PREFETCH_PRIORITY,
    Load,
    Wave,
    make_wave,
)
from simulator.policies.plans import Counters as Counters
from simulator.policies.prefetch import PrefetchPolicy
from simulator.policies.residency import Residency, Unforeseen, Unneeded, for_look_ups
from simulator.policies.tally import Tally
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
        placement: what runs on the CPU; None for nothing.
        log: if given, every call and every plan is appended to it as a tuple.

    Attributes:
        tally: counts what is decided; a driver may set its `warmup_passes`.
        plans_when_drafting: whether a driver must call `drafting_begins` before every pass that generates.
        needs_token_counts: whether `layer_routed` must be told how many tokens ask for each expert.
    """

    plans_when_drafting = False

    def __init__(
        self,
        shape: ModelShape,
        capacity: Capacity,
        cache: Sequence[CachePolicy],
        prefetch: PrefetchPolicy,
        max_prefetch: int | None = None,
        modes: Sequence[Mode] | None = None,
        placement: PlacementPolicy | None = None,
        log: list[tuple[Any, ...]] | None = None,
    ) -> None:
        self._partition_of_layer = list(capacity.partition_of_layer)
        self._residency = Residency(shape, capacity, cache)
        self._places = self._residency.places
        self._cache = list(cache)
        self._expires = [type(policy).expired is not CachePolicy.expired for policy in self._cache]
        self._hears = [type(policy).routed is not CachePolicy.routed for policy in self._cache]
        self.prefetch = prefetch
        self._observes = type(prefetch).observe is not PrefetchPolicy.observe
        self._max_prefetch = max_prefetch
        self.modes = tuple(modes or ("hint",) * shape.num_moe_layers)
        self.placement = placement or AllOnDevice()
        self.needs_token_counts = self.placement.needs_token_counts or any(one.needs_token_counts for one in cache)
        self._cpu_layers = self.placement.cpu_layers
        self._splits = not isinstance(self.placement, AllOnDevice)
        self.log = log
        self._unneeded = Unneeded(self._places, self._residency.under_way)
        """Who may be evicted for a load on demand."""
        self._unforeseen = Unforeseen(self._unneeded, shape.num_experts)
        """Who may be evicted for a load ahead."""
        self._remaining: Sequence[int] = ()
        """Experts of the routed layer that have yet to run on the device."""
        self._awaited: list[int] = []
        """Those of them whose copies have yet to land or to be planned."""
        self._absent: list[int] = []
        """Those of these without a place."""
        self._wave: tuple[int, ...] = ()
        self._cpu_part: tuple[int, ...] = ()
        """The CPU's experts of the routed layer, until they are handed out."""
        self._missed: tuple[int, ...] = ()
        """Those of them that have no place on the device, until some are admitted."""
        self._layer = -1
        self._prefill = False
        self.preloaded: Sequence[Key] = ()
        """Keys to have on the device before the first pass, as far as they fit, the most wanted first."""
        self.streams_prefill = False
        """Load all experts of the next layer ahead in a prefill, whatever its router will say."""
        self.tally = Tally(shape.num_moe_layers, shape.num_experts)

    @property
    def prefill_counters(self) -> Counters:
        """What came of the passes that read prompts."""
        return self.tally.prefill

    @property
    def decode_counters(self) -> Counters:
        """What came of the passes that generate, without those of the warm-up."""
        return self.tally.decode

    @staticmethod
    def from_config(
        config: OffloadConfig,
        shape: ModelShape,
        log: list[tuple[Any, ...]] | None = None,
        future: FutureUses | None = None,
        times: ExpertTimes | None = None,
    ) -> OffloadCore:
        """The core that a configuration describes.

        `log` is that of the class; `future` holds all look-ups to come (of `future_uses`), which no live engine knows;
        `times` are what experts cost, if the configuration `needs_expert_times`.

        Raises:
            ConfigError: the budget is too small, or a policy's name is unknown, or what it needs is not there.
        """
        from simulator.policies.assembly import make_core

        return make_core(config, shape, log, future, times)

    @property
    def first_uses(self) -> Sequence[int]:
        """Experts of the routed layer that were prefetched and are asked for the first time since."""
        return self.tally.first_uses

    def preload(self) -> tuple[Load, ...]:
        """Loads that fill the device before the first pass; counted nowhere, since no pass waits for them."""
        if not self.preloaded:
            return ()
        if self.log is not None:
            self.log.append(("preload",))
        loads: list[Load] = []
        for layer, expert in self.preloaded:
            if self._residency.has_room(layer):
                loads += self._load(layer, [expert], "preload", DEMAND_PRIORITY, self._unneeded)
        return tuple(loads)

    def begin_pass(self, is_prefill: bool) -> None:
        """A forward pass starts. In a prefill, where nearly every expert is active, predictions are not used."""
        if self.log is not None:
            self.log.append(("begin_pass", is_prefill))
        self._prefill = is_prefill
        self.tally.begin_pass(is_prefill)
        self.placement.begin_pass(is_prefill)

    def drafting_begins(self, window_ns: int) -> tuple[Load, ...]:
        """The next pass is being drafted, which takes about `window_ns`; loads to submit (see `UtilityCore`)."""
        return ()

    def landed(self, *keys: Key) -> None:
        """The copies of `keys` have finished, in this order."""
        self.all_landed(keys)

    def all_landed(self, keys: Sequence[Key]) -> None:
        """As `landed`."""
        if self.log is not None:
            for key in keys:
                self.log.append(("landed", key))
        self._residency.land(keys)

    def cancelled(self, key: Key) -> None:
        """A queued copy of `key` was withdrawn before it began."""
        if self.log is not None:
            self.log.append(("cancelled", key))
        self.tally.cancelled(self._residency.coming_load(key))
        self._residency.leave(key)

    def layer_routed(self, layer: int, experts: Sequence[int], tokens: Sequence[int] = ()) -> tuple[Key, ...]:
        """A layer is about to run; gives queued copies for it that are no longer wanted.

        Args:
            layer: MoE layer index.
            experts: what it runs, distinct and in order: its router's choice, or in mode `commit` the predicted ones.
            tokens: how many tokens of the pass go to each of them, if the core `needs_token_counts`.

        Returns:
            copies that the driver may cancel if they have not begun.
        """
        if self.log is not None:
            self.log.append(("layer_routed", layer, tuple(experts), *([tuple(tokens)] if tokens else ())))
        self._layer = self._unneeded.layer = layer
        self._unforeseen.foresee(())
        if self._observes:
            self.prefetch.observe(layer, experts)
        partition = self._partition_of_layer[layer]
        if self._hears[partition]:
            self._cache[partition].routed(layer, experts, tokens)
        self._remain(experts)
        awaited = self._awaited
        late = len(awaited) - len(self._absent)
        self.tally.looked_up(layer, experts, self._absent, late)
        if self._splits:
            self._place(layer, experts, tokens)
        if len(self._residency.under_way[layer]) == late or self.modes[layer] != "hint":
            return ()
        return () if self._prefill and self.streams_prefill else self._residency.not_asked(layer, awaited)

    def next_wave(self) -> Wave | None:
        """What the routed layer does next, or None when all its experts have run."""
        cpu_experts, self._cpu_part = self._cpu_part, ()
        if not self._remaining and not cpu_experts:
            return None
        layer = self._layer
        row, places = self._residency.key_of[layer], self._places[layer]
        experts = tuple(self._remaining)
        loads: tuple[Load, ...] = ()
        if self._absent:
            loads = tuple(self._load(layer, self._absent, "demand", DEMAND_PRIORITY, self._unneeded))
            if len(loads) < len(self._absent):
                experts = tuple([expert for expert in experts if places[expert]])
        wait: list[Key] = []
        for expert in self._awaited:
            if places[expert]:
                wait.append(row[expert])
        if not experts and self._remaining:
            wait = self._residency.strays(layer)
        policy = self._cache[self._partition_of_layer[layer]]
        policy.all_used(row, experts)
        self._wave = experts
        wave = make_wave(experts, loads, tuple(wait), cpu_experts)
        if self.log is not None:
            self.log.append(("wave", wave))
        return wave

    def plan_prefetch(self, predicted: Sequence[int]) -> tuple[Load, ...]:
        """Loads for the layer after the routed one; `predicted` are the ids of `prefetch.prediction`, if it has one.

        Experts are taken in order until no room can be made without touching what this layer or the next needs.
        Behind them come experts that this layer runs on the CPU, for the passes to come.
        """
        if self.log is not None:
            self.log.append(("plan_prefetch", tuple(predicted)))
        target = self._layer + 1
        loads: list[Load] = []
        if target < len(self._places) and not (self._cpu_layers and target in self._cpu_layers):
            loads = self._plan_ahead(target, predicted)
        self._plan_behind(loads)
        if self.log is not None:
            self.log.append(("prefetch", tuple(loads)))
        return tuple(loads)

    def wave_done(self) -> None:
        """The experts of the last wave have run."""
        if self.log is not None:
            self.log.append(("wave_done",))
        if len(self._wave) == len(self._remaining):
            self._remaining = self._unneeded.active = ()
        else:
            self._drop_of_remaining(self._wave)

    def layer_done(self) -> tuple[Key, ...]:
        """All experts of the layer have run. Gives keys that the cache policy drops now."""
        if self.log is not None:
            self.log.append(("layer_done",))
        partition = self._partition_of_layer[self._layer]
        if not self._expires[partition]:
            return ()
        dropped = tuple(self._cache[partition].expired(self._residency.landed(self._layer)))
        for key in dropped:
            self._residency.leave(key)
        self.tally.evicted(len(dropped))
        return dropped

    def is_landed(self, key: Key) -> bool:
        """Whether `key` is on the device and its copy has finished."""
        return self._places[key[0]][key[1]] == LANDED

    def resident_bytes(self) -> int:
        """Bytes of device memory taken by experts, those on their way included."""
        return self._residency.num_bytes()

    def resident(self) -> list[Key]:
        """Keys with a place on the device, those on their way included."""
        return self._residency.keys()

    def _remain(self, experts: Sequence[int]) -> None:
        """These experts of the routed layer have yet to run on the device."""
        self._remaining, self._unneeded.active = experts, for_look_ups(experts)
        places = self._places[self._layer]
        awaited: list[int] = []
        absent: list[int] = []
        landed_place = LANDED
        for expert in experts:
            place = places[expert]
            if place != landed_place:
                awaited.append(expert)
                if not place:
                    absent.append(expert)
        self._awaited, self._absent = awaited, absent

    def _drop_of_remaining(self, experts: Sequence[int]) -> None:
        """Of those that had yet to run on the device, these have run, or run on the CPU."""
        gone = for_look_ups(experts)
        remaining: list[int] = []
        for expert in self._remaining:
            if expert not in gone:
                remaining.append(expert)
        self._remain(remaining)

    def _plan_ahead(self, target: int, predicted: Sequence[int]) -> list[Load]:
        """Loads for the next layer, in order, until there is no room: in a prefill for all of its experts or none,
        else for what the policy selects."""
        wanted: Sequence[int]
        if self._prefill:
            wanted = range(len(self._residency.key_of[target])) if self.streams_prefill else ()
        else:
            wanted = self.prefetch.select(target, predicted)
            if self._max_prefetch is not None:
                wanted = wanted[: self._max_prefetch]
        absent = self._residency.without_place(target, wanted)
        if absent or self._missed:
            self._unforeseen.foresee(wanted)
        if not absent:
            return []
        is_hint = not self._prefill and self.modes[target] == "hint"
        priority = PREFETCH_PRIORITY if is_hint else DEMAND_PRIORITY
        return self._load(target, absent, "prefetch", priority, self._unforeseen)

    def _place(self, layer: int, experts: Sequence[int], tokens: Sequence[int]) -> None:
        """Take the CPU's part of a routed layer out of what the device runs."""
        places = self._places[layer]
        part = self.placement.cpu_part(make_asked(layer, experts, tokens, places))
        self._cpu_part, self._missed = tuple(part), ()
        if not part:
            return
        self._drop_of_remaining(part)
        self.tally.ran_on_cpu(len(part))
        policy, row = self._cache[self._partition_of_layer[layer]], self._residency.key_of[layer]
        for expert in part:
            if places[expert]:
                policy.used(row[expert])
        if self.placement.max_admissions and layer not in self._cpu_layers:
            self._missed = tuple(self._residency.without_place(layer, part))

    def _plan_behind(self, loads: list[Load]) -> None:
        """Add loads for later passes, behind everything that this pass needs."""
        if self._missed:
            self._admit(loads)

    def _admit(self, loads: list[Load]) -> None:
        """Load experts that the layer runs on the CPU, behind everything else, as far as the policy allows.

        The link is kept busy and no more: a longer queue would hold places empty that its copies reach too late. A
        prompt asks for nearly every expert, so in a prefill these take free room only.
        """
        layer = self._layer
        missed, self._missed = self._missed, ()
        used = self._cache[self._partition_of_layer[layer]].used
        for expert in missed[: max(0, self.placement.max_admissions - self._residency.num_behind)]:
            if self._prefill and not self._residency.has_room(layer):
                return
            load = self._load(layer, [expert], ADMISSION, BEHIND_PRIORITY, self._unforeseen)
            if not load:
                return
            loads += load
            used((layer, expert))

    def _load(self, layer: int, experts: Sequence[int], reason: str, priority: int, leavers: Leavers) -> list[Load]:
        """Loads of absent experts of a layer, in order, until no room can be made."""
        loads, evicted = self._residency.take(layer, experts, reason, priority, leavers)
        if len(loads) < len(experts):
            experts = experts[: len(loads)]
        if loads:
            self.tally.loaded(layer, experts, self._residency.expert_bytes[layer], reason, evicted)
        return loads
