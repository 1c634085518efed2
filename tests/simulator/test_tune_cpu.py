"""The tuner where the CPU may run experts."""

from __future__ import annotations

from typing import Any

from optuna.trial import FixedTrial

from simulator import tune
from simulator.policies.config import DeviceConfig
from simulator.tune_cpu import cpu_threads_for, with_cpu_layers
from simulator.tune_space import Space
from tests.simulator.builders import make_hardware, make_host, make_measured, make_shape, mixed_trace
from trace_capture.hardware import CpuThreadCosts
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


def test_threads_are_searched_and_as_few_taken_as_bring_the_most() -> None:
    """A core works through 1.25 bytes per nanosecond; memory gives what four of them take."""
    host = make_host(ram=5e9, cores=8, core_rate=1.25e9, contended_ratio=1.0)
    numbers = {"latency_ns": 137, "issue_ns": 53, "wakeup_ns": 71, "memory_bytes_per_s": 1e12}
    found = tune(skewed_trace(), make_hardware(bytes_per_s=1e9, host=host, **numbers), budget_bytes=24_000)
    tried = {candidate.config.cpu.threads for candidate in found.candidates if candidate.config.cpu.is_used}
    assert tried == {1, 2, 4, 8}
    assert found.config.cpu.is_used and found.config.cpu.threads == 4
    assert "4 CPU threads" in found.config.title
    assert any(note.startswith("CPU threads: derived") for note in found.notes)
    others = [one.config for one in found.candidates if not one.config.cpu.is_used]
    assert {config.cpu.threads for config in others} == {None}


def test_threads_that_were_measured_slower_are_not_taken() -> None:
    """Three threads take less for a layer alone and much more beside the device."""
    slow_beside = CpuThreadCosts(threads=3, cpu_experts_ns=(300.0,), cpu_beside_ns=90_000.0)
    best_alone = CpuThreadCosts(threads=2, cpu_experts_ns=(350.0,))
    costs = make_measured(experts_ns=(100.0,), cpu_experts_ns=(800.0,), cpu_by_threads=(best_alone, slow_beside))
    found = tune(skewed_trace(), make_hardware(bytes_per_s=1e9, measured=costs), budget_bytes=24_000)
    assert found.config.cpu.policy == "misses" and found.config.cpu.threads == 2
    assert any("measured with 1, 2 or 3 threads" in note for note in found.notes)
    alone = make_measured(cpu_experts_ns=(800.0,))
    found = tune(skewed_trace(), make_hardware(bytes_per_s=1e9, measured=alone), budget_bytes=24_000)
    assert {one.config.cpu.threads for one in found.candidates} == {None}
    assert any("CPU threads: not searched" in note for note in found.notes)


def test_the_optimiser_proposes_threads() -> None:
    host = make_host(ram=4e9, cores=4, core_rate=1e9, contended_ratio=1.0)
    space = Space(
        skewed_trace(),
        skewed_trace(),
        ("lru",),
        ("even",),
        ("none",),
        24_000,
        DeviceConfig(),
        lambda *_: (6,) * 4,
        cpu_threads=(1, 2, 4),
    )
    on_cpu = {"cpu.policy": "misses", "cpu.layers": 0, "cpu.admissions": 2}
    trial = FixedTrial(on_cpu | {"cpu.threads": 2})
    choices = space.choose(trial)
    assert space.config_of(choices).cpu.threads == 2
    assert set(trial.distributions["cpu.threads"].choices) == {1, 2, 4}
    without = space.choose(FixedTrial({"cpu.policy": "none", "cpu.layers": 0}))
    assert "cpu.threads" not in without and space.config_of(without).cpu.threads is None
    hardware = make_hardware(bytes_per_s=1e9, host=host)
    assert cpu_threads_for(hardware, skewed_trace().shape).counts == (1, 2, 4)
