"""Which experts run on the CPU, and that the core's promises hold with every placement."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.policies.capacity import plan_capacity
from simulator.policies.config import CpuConfig, parse_config
from simulator.policies.core import OffloadCore
from simulator.policies.placement import FewTokensOnCpu, MissesOnCpu, PlacementSettings, make_asked
from simulator.policies.plans import BEHIND_PRIORITY
from tests.simulator.builders import decode_trace, make_config, make_shape, mixed_trace, places_of, trace_of
from tests.simulator.driver import driver_for
from trace_capture.errors import ConfigError
from trace_capture.trace import Phase

PLACEMENTS: dict[str, dict[str, Any]] = {
    "misses": {"policy": "misses"},
    "misses, never admitted": {"policy": "misses", "admissions": 0},
    "threshold": {"policy": "threshold", "max_tokens": 1},
    "two layers": {"layers": 2},
    "two layers and misses": {"policy": "misses", "layers": [1, 3], "admissions": 5},
    "all": {"layers": "all"},
}


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("source", ["none", "quasi-hidden"])
@pytest.mark.parametrize("cpu", PLACEMENTS)
def test_promises_hold_and_every_expert_runs_once(cpu: str, source: str, scope: str) -> None:
    """Budget, pinning and one run per expert are asserted in the driver after every call."""
    for seed in range(2):
        trace = mixed_trace(make_shape(layers=5, expert_bytes=(1000, 1300, 900, 1700, 1000)), seed=seed)
        config = make_config("lru", source, scope=scope, budget_bytes=25_000, cpu=PLACEMENTS[cpu])
        driver = driver_for(config, trace, seed)
        driver.run(trace)
        assert driver.cpu_runs
        for one in (driver.core.prefill_counters, driver.core.decode_counters):
            missed = one.lookups - one.hits - one.late
            assert one.demand_loads <= missed <= one.demand_loads + one.cpu_runs <= missed + one.late
        prefill, decode = driver.core.prefill_counters, driver.core.decode_counters
        assert prefill.cpu_runs + decode.cpu_runs == len(driver.cpu_runs)
        loads = sum(one.demand_loads + one.prefetch_loads + one.admission_loads for one in (prefill, decode))
        assert loads == len(driver.loads) - driver.cancelled
        sizes = sum(trace.shape.expert_bytes[load.key[0]] for load in driver.loads)
        assert driver.cancelled or prefill.bytes_loaded + decode.bytes_loaded == sizes


def test_misses_split_by_what_has_landed() -> None:
    asked = make_asked(0, [4, 5, 6], (), places_of({4: True, 5: False}, 8))
    assert MissesOnCpu(PlacementSettings()).cpu_part(asked) == [5, 6]


def test_threshold_splits_misses_by_their_tokens() -> None:
    asked = make_asked(0, [4, 5, 6, 7], [1, 9, 2, 3], places_of({4: True, 5: False}, 8))
    assert FewTokensOnCpu(PlacementSettings(max_tokens=2)).cpu_part(asked) == [6]
    assert FewTokensOnCpu(PlacementSettings(max_tokens=9)).cpu_part(asked) == [5, 6, 7]


def test_threshold_loads_what_many_tokens_ask_for() -> None:
    shape = make_shape(layers=1, experts=8, top_k=2)
    trace = trace_of(shape, [(Phase.VERIFY, [[[0, 1]], [[0, 2]], [[0, 2]]])])
    config = make_config(budget_bytes=3000, cpu={"policy": "threshold", "max_tokens": 2, "admissions": 0})
    driver = driver_for(config, trace, at_once=True)
    driver.run(trace)
    assert [load.key for load in driver.loads] == [(0, 0)]
    assert driver.cpu_runs == [(0, 1), (0, 2)]


def core_for(cpu: dict[str, Any], budget_bytes: int = 3000, layers: int = 1, **more: Any) -> OffloadCore:
    shape = make_shape(layers=layers, experts=8, top_k=2)
    return OffloadCore.from_config(make_config(budget_bytes=budget_bytes, cpu=cpu, **more), shape)


def test_what_ran_on_the_cpu_is_admitted_behind_everything_else() -> None:
    core = core_for({"policy": "misses", "admissions": 1})
    core.begin_pass(False)
    assert core.layer_routed(0, [3, 4]) == ()
    wave = core.next_wave()
    assert wave is not None
    assert (wave.experts, wave.loads, wave.wait, wave.cpu_experts) == ((), (), (), (3, 4))
    loads = core.plan_prefetch(())
    assert [(load.key, load.reason, load.priority) for load in loads] == [((0, 3), "admission", BEHIND_PRIORITY)]
    core.wave_done()
    assert core.next_wave() is None
    core.layer_done()
    core.layer_routed(0, [3, 5])
    wave = core.next_wave()
    assert wave is not None and wave.cpu_experts == (3, 5), "3 is on its way and not waited for"
    assert core.plan_prefetch(()) == (), "one admission is under way already"
    core.wave_done()
    core.layer_done()
    core.landed((0, 3))
    core.layer_routed(0, [3, 5])
    wave = core.next_wave()
    assert wave is not None and (wave.experts, wave.cpu_experts) == ((3,), (5,))
    assert [load.key for load in core.plan_prefetch(())] == [(0, 5)]
    counters = core.decode_counters
    assert (counters.lookups, counters.hits, counters.late, counters.cpu_runs) == (6, 1, 1, 5)
    assert counters.admission_loads == 2 and counters.demand_loads == counters.prefetch_loads == 0


def test_a_queued_admission_that_is_not_asked_for_again_may_be_withdrawn() -> None:
    core = core_for({"policy": "misses"})
    core.begin_pass(False)
    core.layer_routed(0, [3, 4])
    core.next_wave()
    assert len(core.plan_prefetch(())) == 2
    core.wave_done()
    core.layer_done()
    assert core.layer_routed(0, [4, 5]) == ((0, 3),)
    core.cancelled((0, 3))
    assert core.decode_counters.admission_loads == 1 and core.decode_counters.bytes_loaded == 1000
    assert core.resident() == [(0, 4)]


def test_a_prefill_admits_into_free_room_only() -> None:
    core = core_for({"policy": "misses", "admissions": 8}, budget_bytes=2000)
    core.begin_pass(True)
    core.layer_routed(0, [0, 1, 2, 3])
    core.next_wave()
    assert [load.key[1] for load in core.plan_prefetch(())] == [0, 1]


def test_admission_evicts_nothing_that_the_layer_or_the_next_needs() -> None:
    core = core_for({"policy": "misses"}, budget_bytes=4000, layers=2, source="previous-token", scope="global")
    core.begin_pass(False)
    for layer, experts in enumerate(([0, 1], [2, 3])):
        core.layer_routed(layer, experts)
        core.next_wave()
        for load in core.plan_prefetch(()):
            core.landed(load.key)
        core.wave_done()
        core.layer_done()
    core.begin_pass(False)
    core.layer_routed(0, [0, 5])
    wave = core.next_wave()
    assert wave is not None and (wave.experts, wave.cpu_experts) == ((0,), (5,))
    (load,) = core.plan_prefetch(())
    assert load.key == (0, 5) and load.evicts == ((0, 1),), "0 computes, and 2 and 3 are foreseen in layer 1"


def test_layers_on_the_cpu_take_no_slots_and_are_never_loaded_for() -> None:
    shape = make_shape(layers=3, experts=8, top_k=2)
    config = make_config("lru", "quasi-hidden", budget_bytes=9000, cpu={"layers": [1]})
    capacity = plan_capacity(config.cache, shape, config.cpu.whole_layers(3))
    assert capacity.partition_bytes == (5000, 0, 4000)
    trace = mixed_trace(shape, seed=2)
    driver = driver_for(config, trace)
    driver.run(trace)
    assert {load.key[0] for load in driver.loads} == {0, 2}
    assert {key[0] for key in driver.cpu_runs} == {1}


def test_budget_is_checked_against_the_layers_on_the_device() -> None:
    shape = make_shape(layers=4, top_k=3)
    assert plan_capacity(make_config(budget_bytes=6000).cache, shape, frozenset({0, 1})).total_bytes == 6000
    with pytest.raises(ConfigError, match="9,000 bytes"):
        plan_capacity(make_config(budget_bytes=6000).cache, shape, frozenset({0}))
    assert plan_capacity(make_config(budget_bytes=1).cache, shape, frozenset(range(4))).total_bytes == 0
    cache = make_config(slots_per_layer=(0, 3, 3, 3)).cache
    assert plan_capacity(cache, shape, frozenset({0})).partition_bytes[0] == 0
    with pytest.raises(ConfigError, match=r"layer 1 gets 3 expert slots and runs on the CPU.*to 0"):
        plan_capacity(cache, shape, frozenset({0, 1}))


@pytest.mark.parametrize(
    ("layers", "expected"), [(0, []), (2, [0, 1]), ((1, 3), [1, 3]), ("all", [0, 1, 2, 3]), ((), [])]
)
def test_layers_by_number_by_name_or_all(layers: Any, expected: list[int]) -> None:
    config = CpuConfig(layers=layers)
    assert sorted(config.whole_layers(4)) == expected
    assert config.is_used == bool(expected)


@pytest.mark.parametrize("layers", [5, (4,)])
def test_layers_that_the_model_lacks_are_refused(layers: Any) -> None:
    with pytest.raises(ConfigError, match=r"cpu.layers names MoE layer 4, and the model has 4"):
        CpuConfig(layers=layers).whole_layers(4)


def test_unknown_policy_is_named_with_its_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown CPU policy 'mises'; did you mean 'misses'\?"):
        parse_config({"cache": {"budget_ratio": 0.5}, "cpu": {"policy": "mises"}})


def test_title_tells_what_the_cpu_does() -> None:
    assert make_config(budget_ratio=0.5).title == "lru/layer"
    assert make_config(budget_ratio=0.5, cpu={"policy": "misses"}).title == "lru/layer + CPU: misses"
    cpu = {"policy": "threshold", "max_tokens": 3, "layers": 2}
    assert make_config(budget_ratio=0.5, cpu=cpu).title == "lru/layer + CPU: 2 layers and misses of up to 3 tokens"


def test_counts_of_a_pass_are_its_experts_with_their_tokens() -> None:
    shape = make_shape(layers=2, experts=8, top_k=2)
    trace = trace_of(shape, [(Phase.PREFILL, [[[5, 1], []], [[1, 2], []], [[1, 5], [3, 4]]])])
    assert trace.pass_counts(trace.passes[0]) == [{5: 2, 1: 3, 2: 1}, {3: 1, 4: 1}]
    mixed = mixed_trace(shape)
    for item in mixed.passes:
        counts = mixed.pass_counts(item)
        assert [list(layer) for layer in counts] == mixed.pass_experts(item)
        rows = mixed.experts[item.start : item.stop]
        assert sum(sum(layer.values()) for layer in counts) == int((rows < 8).sum())


def test_counts_are_asked_for_by_the_policy_that_needs_them() -> None:
    log: list[Any] = []
    trace = decode_trace(make_shape(layers=1, experts=8, top_k=2), [[[0, 1]]])
    for policy, expected in (("misses", 3), ("threshold", 4)):
        core = OffloadCore.from_config(make_config(budget_bytes=3000, cpu={"policy": policy}), trace.shape, log)
        assert core.needs_token_counts == (policy == "threshold")
        core.begin_pass(False)
        core.layer_routed(0, [0, 1], [1, 1] if core.needs_token_counts else ())
        assert len(log[-1]) == expected
