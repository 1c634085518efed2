"""A driver of the offload core for tests: carries plans out with copies that land at random moments, and checks at
every call what the protocol promises."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from simulator.executed import executed_routing
from simulator.hot_experts import with_hot_experts
from simulator.policies.balancer import ExpertTimes
from simulator.policies.belady import future_uses
from simulator.policies.capacity import Capacity
from simulator.policies.core import OffloadCore
from simulator.policies.plans import Load
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Phase, Trace

COPY_NS = 1000


def times_of(shape: ModelShape, gamma: int = 8, cpu_ns: int = 60) -> ExpertTimes:
    """Experts that the device runs in 10 ns, the CPU in `cpu_ns`, and that land after `COPY_NS`."""
    layers = shape.num_moe_layers
    served = np.minimum(np.arange(gamma + 2), 1)
    rows = [np.tile(served * each, (layers, 1)) for each in (10, cpu_ns)]
    zero = np.zeros(layers, dtype=np.int64)
    return ExpertTimes(*rows, zero, zero, zero + COPY_NS, np.array(shape.expert_bytes))


class CheckingDriver:
    """Drives `core` through a trace; `held` is what is on the device according to the plans alone.

    Args:
        at_once: copies land the moment they are submitted; otherwise at random, most urgent first.
    """

    def __init__(
        self, core: OffloadCore, shape: ModelShape, capacity: Capacity, seed: int, at_once: bool = False
    ) -> None:
        self.core, self.shape, self.capacity = core, shape, capacity
        self.random = random.Random(seed)
        self.at_once = at_once
        self.held: dict[tuple[int, int], bool] = {}
        self.queue: list[tuple[int, int, Load]] = []
        self.flying: Load | None = None
        self.sequence = 0
        self.waves: list[int] = []
        self.empty_waves = 0
        self.cancelled = 0
        self.loads: list[Load] = []
        self.cpu_runs: list[tuple[int, int]] = []
        self.window_ns = 20 * COPY_NS

    def run(self, trace: Trace) -> None:
        for load in self.core.preload():
            self.held[load.key] = True
            self.core.landed(load.key)
        self.check()
        for item in trace.passes:
            if self.core.plans_when_drafting and item.phase != Phase.PREFILL:
                self.maybe_land()
                self.submit(self.core.drafting_begins(self.window_ns), set())
            self.core.begin_pass(item.phase == Phase.PREFILL)
            for layer, counts in enumerate(trace.pass_counts(item)):
                if counts:
                    predicted = trace.pass_experts(item, "quasi-hidden") if trace.predicted else []
                    ahead = predicted[layer + 1] if layer + 1 < len(predicted) else []
                    self.layer(layer, counts, ahead)

    def layer(self, layer: int, counts: dict[int, int], ahead: list[int]) -> None:
        experts = list(counts)
        self.maybe_land()
        tokens = list(counts.values()) if self.core.needs_token_counts else ()
        for key in self.core.layer_routed(layer, experts, tokens):
            assert key[0] == layer and key[1] not in experts
            if self.cancel(key):
                self.core.cancelled(key)
                del self.held[key]
                self.cancelled += 1
                self.check()
        ran: list[int] = []
        on_cpu: list[int] = []
        waves = 0
        while (wave := self.core.next_wave()) is not None:
            waves += 1
            assert not (waves > 1 and wave.cpu_experts), "the CPU starts with the first wave"
            on_cpu += wave.cpu_experts
            self.cpu_runs += [(layer, expert) for expert in wave.cpu_experts]
            pinned = {(layer, expert) for expert in experts if expert not in ran and expert not in on_cpu}
            self.submit(wave.loads, pinned)
            if waves == 1:
                wanted = self.core.prefetch.select(layer + 1, ahead) if layer + 1 < self.shape.num_moe_layers else ()
                foreseen = {(layer + 1, expert) for expert in wanted}
                self.submit(self.core.plan_prefetch(ahead), pinned | foreseen)
            for key in wave.wait:
                while not self.core.is_landed(key):
                    self.land()
            assert all(self.held[layer, expert] for expert in wave.experts), "a wave ran with an expert missing"
            self.empty_waves += not wave.experts and bool(wave.wait)
            ran += wave.experts
            self.maybe_land()
            self.core.wave_done()
        assert sorted(ran + on_cpu) == sorted(experts), "each expert runs exactly once"
        self.waves.append(waves)
        for key in self.core.layer_done():
            assert self.held.pop(key), "only what has landed can be dropped"
        self.check()

    def submit(self, loads: tuple[Load, ...], pinned: set[tuple[int, int]]) -> None:
        for load in loads:
            for key in load.evicts:
                assert key not in pinned, f"{load.reason} load of {load.key} evicts {key}, which is needed"
                assert self.held.pop(key), "a copy under way was evicted"
            assert load.key not in self.held
            self.held[load.key] = False
            self.check_bytes()
            self.loads.append(load)
            self.sequence += 1
            self.queue.append((load.priority, self.sequence, load))
            if self.at_once:
                self.land()
        self.check()

    def cancel(self, key: tuple[int, int]) -> bool:
        found = [entry for entry in self.queue if entry[2].key == key]
        for entry in found:
            self.queue.remove(entry)
        return bool(found)

    def maybe_land(self) -> None:
        while (self.flying or self.queue) and self.random.random() < 0.5:
            self.land()
            self.check()

    def land(self) -> None:
        if self.flying is None:
            self.queue.sort()
            self.flying = self.queue.pop(0)[2]
        self.core.landed(self.flying.key)
        self.held[self.flying.key] = True
        self.flying = None
        if self.queue:
            self.queue.sort()
            self.flying = self.queue.pop(0)[2]

    def check_bytes(self) -> None:
        used = [0] * len(self.capacity.partition_bytes)
        for layer, _ in self.held:
            used[self.capacity.partition_of_layer[layer]] += self.shape.expert_bytes[layer]
        for have, limit in zip(used, self.capacity.partition_bytes, strict=True):
            assert have <= limit, "over budget"

    def check(self) -> None:
        self.check_bytes()
        assert sorted(self.core.resident()) == sorted(self.held)
        assert self.core.resident_bytes() == sum(self.shape.expert_bytes[layer] for layer, _ in self.held)


def driver_for(
    config: Any, trace: Trace, seed: int = 0, at_once: bool = False, log: list[Any] | None = None
) -> CheckingDriver:
    """A driver with a fresh core of a configuration."""
    from simulator.policies.capacity import plan_capacity

    config = with_hot_experts(config, trace)
    future = future_uses(executed_routing(trace, config).lookups())
    core = OffloadCore.from_config(config, trace.shape, log, future, times_of(trace.shape))
    capacity = plan_capacity(config.cache, trace.shape, config.cpu.whole_layers(trace.shape.num_moe_layers))
    return CheckingDriver(core, trace.shape, capacity, seed, at_once)
