"""The offload core's promises, checked at every call under random landing orders."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import simulate
from simulator.policies.core import OffloadCore
from simulator.policies.prefetch import PREFETCH_POLICIES
from tests.simulator.builders import decode_trace, make_config, make_hardware, make_shape, mixed_trace, trace_of
from tests.simulator.driver import driver_for
from trace_capture.trace import Phase

UNEQUAL = (1000, 1300, 900, 1700, 1000)


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("source", sorted(PREFETCH_POLICIES))
@pytest.mark.parametrize("ratio", [0.19, 0.3, 0.7, 1.0])
def test_promises_hold_under_random_landings(scope: str, source: str, ratio: float) -> None:
    """Budget, pinning, prefetch's restraint and one run per expert: asserted in the driver after every call."""
    for seed in range(2):
        trace = mixed_trace(make_shape(layers=5, expert_bytes=UNEQUAL), seed=seed)
        budget = max(round(ratio * trace.shape.total_expert_bytes), 3 * sum(UNEQUAL))
        driver = driver_for(make_config("lru", source, scope=scope, budget_bytes=budget), trace, seed)
        driver.run(trace)
        assert driver.loads


def test_the_random_driver_reaches_cancels_waves_and_strays() -> None:
    """The cases that the test above is for do occur in it."""
    trace = mixed_trace(make_shape(layers=5, expert_bytes=UNEQUAL), seed=3, right=0.3)
    tight = driver_for(make_config("lru", "quasi-hidden", budget_bytes=4 * sum(UNEQUAL)), trace, 3)
    tight.run(trace)
    assert tight.cancelled > 0
    assert max(tight.waves) > 1
    single = mixed_trace(make_shape(layers=5, top_k=1), seed=3, right=0.3)
    one_slot = driver_for(make_config("lru", "quasi-hidden", budget_bytes=5000), single, 3)
    one_slot.run(single)
    assert one_slot.empty_waves > 0


def test_counters_add_up_over_hits_late_and_loads() -> None:
    for seed in range(4):
        trace = mixed_trace(make_shape(layers=5), seed=seed)
        driver = driver_for(make_config("lfu", "quasi-hidden", budget_bytes=25_000), trace, seed)
        driver.run(trace)
        prefill, decode = driver.core.prefill_counters, driver.core.decode_counters
        for one in (prefill, decode):
            assert one.lookups == one.hits + one.late + one.demand_loads
            assert one.prefetch_used <= one.hits + one.late
        loads = sum(one.demand_loads + one.prefetch_loads for one in (prefill, decode))
        assert loads == len(driver.loads) - driver.cancelled
        assert loads - prefill.evictions - decode.evictions == len(driver.core.resident())
        assert prefill.bytes_loaded + decode.bytes_loaded == 1000 * loads
        assert prefill.prefetch_loads == 0


def test_layer_with_more_active_experts_than_slots_runs_in_waves() -> None:
    shape = make_shape(layers=1, experts=8, top_k=2)
    trace = trace_of(shape, [(Phase.PREFILL, [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]])])
    driver = driver_for(make_config(budget_bytes=3000), trace, at_once=True)
    driver.run(trace)
    assert driver.waves == [3]
    assert [load.key[1] for load in driver.loads] == list(range(8))
    assert driver.core.prefill_counters.evictions == 5


def test_first_wave_runs_what_is_resident_before_it_is_evicted() -> None:
    """Experts 2 and 3 are there; a prefill that also wants four others must run them from where they are."""
    shape = make_shape(layers=1, experts=8, top_k=2)
    trace = trace_of(shape, [(Phase.DECODE, [[[2, 3]]]), (Phase.PREFILL, [[[0, 1]], [[4, 5]], [[2, 3]]])])
    driver = driver_for(make_config(budget_bytes=3000), trace, at_once=True)
    driver.run(trace)
    assert driver.core.prefill_counters.hits == 2
    assert [load.key[1] for load in driver.loads] == [2, 3, 0, 1, 4, 5]


def test_demand_may_evict_a_wrong_prefetch_but_prefetch_not_the_active_set() -> None:
    shape = make_shape(layers=2, experts=6, top_k=2)
    core = OffloadCore.from_config(make_config("lru", "quasi-hidden", scope="global", budget_bytes=4000), shape)
    core.begin_pass(False)
    core.layer_routed(0, [0, 1])
    wave = core.next_wave()
    assert wave is not None and [load.key for load in wave.loads] == [(0, 0), (0, 1)]
    first = core.plan_prefetch([2, 3, 4])
    assert [load.key for load in first] == [(1, 2), (1, 3)], "no third: it would push out what runs now"
    for key in [(0, 0), (0, 1), (1, 2), (1, 3)]:
        core.landed(key)
    core.wave_done()
    core.layer_done()
    assert core.layer_routed(1, [4, 2]) == ()
    wave = core.next_wave()
    assert wave is not None
    assert [(load.key, load.evicts) for load in wave.loads] == [((1, 4), ((0, 0),))]
    assert core.decode_counters.prefetch_used == 1


def test_cancelled_prefetch_leaves_no_trace_in_residency_or_bytes() -> None:
    shape = make_shape(layers=2, experts=6, top_k=2)
    core = OffloadCore.from_config(make_config("lru", "quasi-hidden", budget_bytes=8000), shape)
    core.begin_pass(False)
    core.layer_routed(0, [0, 1])
    core.next_wave()
    core.plan_prefetch([2, 3])
    for key in [(0, 0), (0, 1)]:
        core.landed(key)
    core.wave_done()
    core.layer_done()
    assert core.layer_routed(1, [2, 5]) == ((1, 3),)
    core.cancelled((1, 3))
    assert sorted(core.resident()) == [(0, 0), (0, 1), (1, 2)]
    assert core.decode_counters.prefetch_loads == 1
    assert core.decode_counters.bytes_loaded == 3000
    assert core.decode_counters.late == 1
    assert not core.is_landed((1, 3))


def test_partition_full_of_strays_gives_an_empty_wave_that_waits_for_them() -> None:
    shape = make_shape(layers=2, experts=8, top_k=2)
    core = OffloadCore.from_config(make_config("lru", "quasi-hidden", budget_bytes=4000), shape)
    core.begin_pass(False)
    core.layer_routed(0, [0, 1])
    core.next_wave()
    assert len(core.plan_prefetch([2, 3])) == 2
    core.landed((0, 0))
    core.landed((0, 1))
    core.wave_done()
    core.layer_done()
    core.layer_routed(1, [6, 7])  # both prefetches are wrong and have begun, so they are not cancelled
    wave = core.next_wave()
    assert wave is not None
    assert wave.experts == () and wave.loads == ()
    assert wave.wait == ((1, 2), (1, 3))
    core.landed((1, 2))
    core.landed((1, 3))
    core.wave_done()
    wave = core.next_wave()
    assert wave is not None and wave.experts == (6, 7)
    assert [load.evicts for load in wave.loads] == [((1, 2),), ((1, 3),)]


def test_max_experts_limits_a_prefetch() -> None:
    trace = mixed_trace(make_shape(), right=1.0)
    few = driver_for(make_config("lru", "quasi-hidden", budget_bytes=50_000, max_experts=1), trace)
    few.run(trace)
    for place, load in enumerate(few.loads[1:]):
        before = few.loads[place]
        assert not (load.reason == before.reason == "prefetch" and load.key[0] == before.key[0])


def test_log_fed_to_a_fresh_core_gives_the_same_plans() -> None:
    """Any recorded run can be replayed offline, decision by decision."""
    trace = mixed_trace(make_shape(layers=5, expert_bytes=UNEQUAL), seed=2)
    config = make_config("lfu-ageing", "quasi-hidden", scope="global", budget_bytes=25_000)
    log: list[tuple[Any, ...]] = []
    run = simulate(trace, make_hardware(bytes_per_s=1e9, latency_ns=300), config, log=log)
    assert {entry[0] for entry in log} >= {"landed", "cancelled", "wave", "prefetch", "layer_done"}
    again: list[tuple[Any, ...]] = []
    core = OffloadCore.from_config(config, trace.shape, again)
    for call, *args in log:
        if call == "wave":
            core.next_wave()
        elif call != "prefetch":
            getattr(core, call)(*args)
    assert again == log
    assert core.decode_counters.hits + core.prefill_counters.hits == run.metrics.hits


def test_prediction_for_the_layer_that_runs_last_is_ignored() -> None:
    shape = make_shape(layers=2)
    core = OffloadCore.from_config(make_config("lru", "quasi-hidden", budget_bytes=30_000), shape)
    core.begin_pass(False)
    core.layer_routed(1, [0, 1, 2])
    core.next_wave()
    assert core.plan_prefetch([3, 4, 5]) == ()


def test_no_prefetch_in_a_prefill() -> None:
    trace = decode_trace(make_shape(layers=2), [[[0, 1, 2], [0, 1, 2]]])
    core = OffloadCore.from_config(make_config("lru", "quasi-hidden", budget_bytes=30_000), trace.shape)
    core.begin_pass(True)
    core.layer_routed(0, [0, 1, 2])
    core.next_wave()
    assert core.plan_prefetch([3, 4, 5]) == ()


@pytest.mark.parametrize("call", ["landed", "cancelled"])
def test_a_copy_that_is_not_under_way_can_neither_land_nor_be_withdrawn(call: str) -> None:
    core = OffloadCore.from_config(make_config("lru", budget_bytes=8000), make_shape(layers=2, experts=6, top_k=2))
    core.begin_pass(False)
    core.layer_routed(0, [0, 1])
    core.next_wave()
    core.landed((0, 0))
    for key in [(0, 0), (0, 5)]:
        with pytest.raises(KeyError):
            getattr(core, call)(key)
