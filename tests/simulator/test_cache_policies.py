"""Conformance of every registered cache policy; a new policy is tested by being registered."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from simulator import simulate
from simulator.bounds import belady_hit_rates
from simulator.policies.belady import Belady, future_uses
from simulator.policies.cache import CACHE_POLICIES, Key, make_cache_policy
from simulator.policies.capacity import plan_capacity
from simulator.policies.config import OffloadConfig
from simulator.policies.core import OffloadCore
from simulator.policies.eviction import Leavers, Partition
from simulator.policies.prefetch import NoPrefetch
from simulator.policies.recency import Random
from simulator.policies.utility_config import UtilityConfig
from tests.simulator.builders import Only, make_config, make_hardware, make_shape, mixed_trace, room_for
from tests.simulator.driver import driver_for
from trace_capture.errors import ConfigError
from trace_capture.trace import Phase, Trace

ALL = sorted(CACHE_POLICIES)
EVICTING = [name for name in ALL if name != "resident"]


@pytest.mark.parametrize("name", EVICTING)
def test_victim_is_present_and_may_leave(name: str) -> None:
    """Driven as the core drives it: never a pinned or absent key, and None only when nothing may leave."""
    for seed in range(20):
        source = random.Random(seed)
        asked = [(source.randrange(2), source.randrange(12)) for _ in range(300)]
        hot = tuple((layer, expert) for expert in range(3) for layer in range(2))
        utility = UtilityConfig(gamma=0).make(make_shape(layers=2, experts=12), [4, 4])
        policy = make_cache_policy(name, Partition(8000, 24_000, 1000, hot, seed, future_uses(asked), utility))
        present: set[Key] = set()
        for key in asked:
            policy.routed(key[0], key[1:], (1,))
            if key not in present:
                if len(present) == 8:
                    pinned = set(source.sample(sorted(present), source.randrange(9)))
                    victim = policy.choose_victim(Only(lambda other, pinned=pinned: other not in pinned))
                    if pinned == present:
                        assert victim is None
                        continue
                    assert victim is not None and victim in present - pinned
                    assert policy.choose_victim(Only(victim.__eq__)) == victim, "asking must not remove"
                    present.discard(victim)
                    policy.removed(victim)
                policy.admitted(key)
                present.add(key)
            policy.used(key)


@pytest.mark.parametrize("name", EVICTING)
def test_several_keys_at_once_are_the_same_as_one_after_the_other(name: str) -> None:
    """Also that a policy which says it `evicts_ahead` chooses alike whether or not newcomers are admitted meanwhile."""
    for seed in range(10):
        source = random.Random(seed)
        steps = [[(0, expert) for expert in source.sample(range(12), source.randint(1, 4))] for _ in range(60)]
        asked = [key for keys in steps for key in keys]
        hot = tuple((0, expert) for expert in range(3))
        utilities = [UtilityConfig(gamma=0).make(make_shape(layers=1, experts=12), [6]) for _ in range(2)]
        batch, single = (
            make_cache_policy(name, Partition(6000, 12_000, 1000, hot, seed, future_uses(asked), utility))
            for utility in utilities
        )
        row = [(0, expert) for expert in range(12)]
        present: list[Key] = []
        for keys in steps:
            for policy in (batch, single):
                policy.routed(0, [expert for _, expert in keys], [1] * len(keys))
            absent = [key for key in keys if key not in present]
            count = max(0, len(present) + len(absent) - 6)
            newcomers = absent if batch.evicts_ahead else []
            left = [key for key in present if key not in keys]
            victims: list[Key] = []
            for place in range(count):
                victim = single.choose_victim(Only(lambda key, left=left: key in left))
                assert victim is not None
                single.removed(victim)
                left.remove(victim)
                victims.append(victim)
                for key in newcomers[place : place + 1]:
                    single.admitted(key)
            for key in newcomers[count:] if newcomers else absent:
                single.admitted(key)
            left = [key for key in present if key not in keys]
            assert batch.evict(count, Only(lambda key, left=left: key in left)) == victims
            batch.all_admitted(row, [expert for _, expert in absent])
            used = keys[: source.randint(0, len(keys))]
            for key in used:
                single.used(key)
            batch.all_used(row, [expert for _, expert in used])
            present = [key for key in present if key not in victims] + absent


@pytest.mark.parametrize("name", ALL)
def test_capacity_and_pins_hold_in_a_whole_run(name: str) -> None:
    trace = mixed_trace(make_shape(layers=5), seed=4)
    for scope in ("layer", "global"):
        budget = room_for(name, trace.shape, 20_000)
        driver_for(make_config(name, "quasi-hidden", scope=scope, budget_bytes=budget), trace, 4).run(trace)


@pytest.mark.parametrize("name", ALL)
def test_equal_inputs_give_equal_runs(name: str) -> None:
    trace = mixed_trace(make_shape(layers=5), seed=4)
    config = make_config(name, "quasi-hidden", budget_bytes=room_for(name, trace.shape, 20_000))
    first, second = (simulate(trace, make_hardware(), config, record_spans=True) for _ in range(2))
    assert first.info == second.info
    assert first.spans == second.spans
    assert first.token_ns.tolist() == second.token_ns.tolist()


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_no_policy_beats_belady_on_equal_sizes(name: str, scope: str) -> None:
    for seed in range(3):
        trace = mixed_trace(make_shape(), seed=seed)
        for slots in (4, 6, 9):
            config = make_config(name, scope=scope, budget_bytes=4000 * slots)
            run = simulate(trace, make_hardware(), config)
            assert run.metrics.hit_rate <= run.info.bounds["belady_hit_rate"] + 1e-12


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("sizes", [(1000,) * 4, (1000, 1300, 900, 1700)])
def test_lean_belady_equals_the_policy_in_the_core(scope: str, sizes: tuple[int, ...]) -> None:
    """The tight loop of the bound takes the decisions that the `Belady` class takes in an `OffloadCore`, waves
    of a prefill included."""
    for seed in range(4):
        trace = mixed_trace(make_shape(expert_bytes=sizes), seed=seed)
        budgets = [slots * sum(sizes) for slots in (3, 5, 8, 16)]
        if scope == "global":
            budgets += [3 * max(sizes) + more for more in (0, 400, 900, 2000)]
        for budget in budgets:
            config = make_config(scope=scope, budget_bytes=budget)
            overall, in_decode = _slow_belady(trace, config)
            rates = belady_hit_rates(trace, config)
            assert rates[0] == overall
            assert rates[1] >= in_decode or len(set(sizes)) > 1, "the best over decode may serve a prefill less well"


def _slow_belady(trace: Trace, config: OffloadConfig) -> tuple[float, float]:
    uses = future_uses(
        (layer, expert) for item in trace.passes for layer, ids in trace.iter_layers(item) for expert in ids
    )
    capacity = plan_capacity(config.cache, trace.shape)
    core = OffloadCore(
        trace.shape, capacity, [Belady(Partition(future=uses)) for _ in capacity.partition_bytes], NoPrefetch()
    )
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
    return (first.hits + later.hits) / (first.lookups + later.lookups), later.hits / later.lookups


def test_lru_in_the_core_is_lru_with_the_active_set_pinned() -> None:
    """An independent oracle of ten lines: same hits for every capacity."""
    trace = mixed_trace(make_shape(), seed=6)
    for slots in (3, 4, 7, 12):
        run = simulate(trace, make_hardware(), make_config(scope="global", budget_bytes=4000 * slots), bounds=False)
        decode = [item for item in trace.passes if item.phase != Phase.PREFILL]
        assert run.metrics.hits == pinned_lru_hits(trace, 4000 * slots)
        assert len(decode) == len(run.token_ns)


def pinned_lru_hits(trace: Trace, budget_bytes: int) -> int:
    """Hits of one LRU pool in which a layer's active experts stay until it has run; active sets must fit."""
    order: OrderedDict[Key, int] = OrderedDict()
    hits = 0
    for item in trace.passes:
        for layer, experts in trace.iter_layers(item):
            keys = [(layer, expert) for expert in experts]
            hits += sum(key in order for key in keys)
            for key in keys:
                size = trace.shape.expert_bytes[layer]
                while key not in order and sum(order.values()) + size > budget_bytes:
                    del order[next(other for other in order if other not in keys)]
                order[key] = size
            for key in keys:
                order.move_to_end(key)
    return hits


def test_policies_differ_where_they_should() -> None:
    """LFU keeps the expert that was used often, LRU the one that was used lately."""

    def victim(name: str) -> Key | None:
        policy = make_cache_policy(name)
        for key in [(0, 1), (0, 2)]:
            policy.admitted(key)
        for key in [(0, 1), (0, 1), (0, 1), (0, 2)]:
            policy.used(key)
        return policy.choose_victim(Only(lambda key: True))

    assert victim("lru") == (0, 1)
    assert victim("lfu") == (0, 2)
    assert victim("lfu-ageing") == (0, 2)


def test_ageing_forgets_what_was_hot_long_ago() -> None:
    def survivors(name: str) -> set[Key]:
        policy = make_cache_policy(name)
        present = {(0, 0)}
        policy.admitted((0, 0))
        for _ in range(20):
            policy.used((0, 0))
        for expert in range(1, 80):
            key = (0, 1 + expert % 5)
            if key not in present:
                if len(present) == 3:
                    victim = policy.choose_victim(Only(lambda key: True))
                    assert victim is not None
                    present.discard(victim)
                    policy.removed(victim)
                policy.admitted(key)
                present.add(key)
            policy.used(key)
        return present

    assert (0, 0) in survivors("lfu")
    assert (0, 0) not in survivors("lfu-ageing")


def test_heap_of_scored_policies_holds_each_expert_once() -> None:
    """A long run of hits must not grow memory without end."""
    policy = make_cache_policy("lfu")
    for expert in range(8):
        policy.admitted((0, expert))
    for step in range(10_000):
        policy.used((0, step % 8))
    policy.used((0, 3))
    assert len(policy._heap.ranks) == 8  # type: ignore[attr-defined]
    assert policy.choose_victim(Only(lambda key: key[1] in (3, 4))) == (0, 4)


class Checking(Random):
    """Checks at each eviction that those who may not leave are told alike one by one and all at once."""

    def __init__(self, partition: Partition) -> None:
        super().__init__(partition)
        self.held: set[Key] = set()
        self.kept: list[set[Key]] = []

    def admitted(self, key: Key) -> None:
        super().admitted(key)
        self.held.add(key)

    def removed(self, key: Key) -> None:
        super().removed(key)
        self.held.discard(key)

    def evict(self, count: int, leavers: Leavers) -> list[Key]:
        told = leavers.kept_back()
        assert told is not None
        self.kept.append(self.held & set(told))
        assert self.kept[-1] == {key for key in self.held if not leavers.allow(key)}
        return super().evict(count, leavers)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_who_may_not_leave_is_told_alike_one_by_one_and_all_at_once(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CACHE_POLICIES, "random", Checking)
    for seed in range(4):
        trace = mixed_trace(make_shape(layers=5), seed=seed)
        driver = driver_for(make_config("random", "quasi-hidden", scope=scope, budget_bytes=20_000), trace, 4)
        driver.run(trace)
        kept = [keys for policy in driver.core._cache if isinstance(policy, Checking) for keys in policy.kept]
        assert any(kept) and len(kept) > 20


def test_no_cache_keeps_nothing_after_its_layer() -> None:
    trace = mixed_trace(make_shape(), seed=1)
    driver = driver_for(make_config("none", budget_bytes=40_000), trace, at_once=True)
    driver.run(trace)
    assert driver.core.resident() == []
    counters = driver.core.decode_counters
    assert counters.hits == 0 and counters.demand_loads == counters.lookups == counters.evictions


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown cache policy 'lru2'; did you mean 'lru'.*lfu-ageing"):
        make_cache_policy("lru2")


@pytest.mark.parametrize("held", [(), (0,)])
def test_lru_refuses_the_use_of_what_it_does_not_hold(held: tuple[int, ...]) -> None:
    policy = make_cache_policy("lru")
    for expert in held:
        policy.admitted((0, expert))
        policy.removed((0, expert))
    with pytest.raises(KeyError):
        policy.used((0, 0))
    with pytest.raises(KeyError):
        policy.all_used([(0, 0), (0, 1)], [0])
