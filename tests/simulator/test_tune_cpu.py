"""The tuner where the CPU may run experts."""

from __future__ import annotations

from typing import Any

from simulator import tune
from simulator.policies.config import DeviceConfig
from simulator.tune_cpu import with_cpu_layers
from tests.simulator.builders import make_hardware, make_host, make_measured, make_shape, mixed_trace
from trace_capture.trace import Trace


def skewed_trace() -> Trace:
    return mixed_trace(make_shape(layers=4), seed=8, sequences=3, decode=8)


def machine(core_rate: float, **more: Any) -> Any:
    """A link of one byte per nanosecond, and cores at `core_rate`."""
    host = make_host(ram=1e12, cores=1, core_rate=core_rate, layer_ns=200)
    numbers = {"latency_ns": 137, "issue_ns": 53, "wakeup_ns": 71, "memory_bytes_per_s": 1e12}
    return make_hardware(bytes_per_s=1e9, host=host, **numbers, **more)


def test_misses_go_to_a_cpu_that_is_faster_than_the_link_and_to_no_other() -> None:
    fast = tune(skewed_trace(), machine(10e9), budget_bytes=24_000)
    assert fast.config.cpu.policy == "misses"
    assert fast.chosen.metrics.cpu_runs > 0 and fast.chosen.metrics.tpot_ms < fast.baseline.metrics.tpot_ms
    assert fast.regret_ms >= 0
    slow = tune(skewed_trace(), machine(0.05e9), budget_bytes=24_000)
    assert not slow.config.cpu.is_used
    assert {candidate.config.cpu.policy for candidate in slow.candidates} == {"none", "misses"}


def test_candidates_with_the_cpu_need_a_profile_that_knows_its_cost() -> None:
    trace = skewed_trace()
    without = tune(trace, make_hardware(bytes_per_s=1e9), budget_bytes=24_000)
    assert not any(candidate.config.cpu.is_used for candidate in without.candidates)
    calibrated = tune(trace, make_hardware(bytes_per_s=1e9, measured=make_measured()), budget_bytes=24_000)
    assert any(candidate.config.cpu.layers for candidate in calibrated.candidates)
    other = make_measured().model_copy(update={"model": "another"})
    foreign = tune(trace, make_hardware(bytes_per_s=1e9, measured=other), budget_bytes=24_000)
    assert not any(candidate.config.cpu.is_used for candidate in foreign.candidates)


def test_an_emulated_device_has_a_cpu_of_its_own_where_that_is_paced() -> None:
    for paced_ns, has_cpu in ((0.0, False), (450.0, True)):
        costs = make_measured().model_copy(update={"cpu_experts_ns": (700.0,), "cpu_paced_ns": paced_ns})
        emulated = make_hardware(bytes_per_s=1e9, measured=costs).model_copy(update={"emulated": True})
        found = tune(skewed_trace(), emulated, budget_bytes=24_000)
        assert any(candidate.config.cpu.is_used for candidate in found.candidates) == has_cpu
        assert any("experts on the CPU were not tried" in note for note in found.notes) != has_cpu


def test_layers_go_to_the_cpu_until_the_others_fit() -> None:
    trace = skewed_trace()
    named = with_cpu_layers(trace, 40_000, DeviceConfig())
    assert [config.cpu.layers for _, config in named] == [1, 2, 3, 4], "16 experts of 1000 bytes: two layers fit"
    assert [config.cpu.layers for _, config in with_cpu_layers(trace, 20_000, DeviceConfig())] == [1, 2, 3, 4]
    wide = mixed_trace(make_shape(layers=9), seed=8, sequences=2, decode=5)
    assert [config.cpu.layers for _, config in with_cpu_layers(wide, 100_000, DeviceConfig())] == [2, 3, 4, 7, 9]


def test_progress_counts_every_simulation() -> None:
    steps: list[tuple[int, int]] = []
    result = tune(skewed_trace(), machine(10e9), budget_bytes=24_000, progress=lambda *step: steps.append(step))
    total = steps[-1][1]
    assert total == len(result.candidates) + 3
    assert steps == [(done, total) for done in range(1, total + 1)]
    full = [one for one in result.candidates if "eighths of the budget" not in one.config.label]
    assert sum(candidate.config.cpu.is_used for candidate in full) == 4 * 3 + 4
