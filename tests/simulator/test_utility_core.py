"""Loads by utility: what is planned when drafting begins, what is dropped, and that each part can be switched off."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.cost_model import CostModel
from simulator.expert_times import expert_times
from simulator.policies.config import OffloadConfig, parse_config
from simulator.policies.core import OffloadCore
from simulator.policies.plans import UTILITY
from simulator.policies.utility_core import UtilityCore
from simulator.replay import simulate
from tests.simulator.builders import make_hardware, make_host, make_shape
from tests.simulator.driver import COPY_NS, CheckingDriver, driver_for, times_of
from trace_capture.errors import ConfigError
from trace_capture.rewindow import rewindow
from trace_capture.synthetic import synthetic_trace
from trace_capture.trace import Trace

GAMMA = 4


@pytest.fixture(scope="module")
def spec() -> Trace:
    shape = make_shape(layers=3, experts=24, top_k=3)
    plain = synthetic_trace(shape, 2, 5, 60, reuse_ratio=0.5, skew=1.2, predictor_recall=0.7, seed=3)
    return rewindow(plain, GAMMA, 0.8, draft_bytes=10_000)


def config_of(pool: str = "layer", **utility: Any) -> OffloadConfig:
    cpu = utility.pop("cpu", {"policy": "balanced"})
    prefetch = {"source": utility.pop("source", "none")}
    return parse_config(
        {
            "cache": {"policy": "utility", "scope": pool, "budget_ratio": 0.4},
            "utility": {"gamma": GAMMA, "loads": "always"} | utility,
            "cpu": cpu,
            "prefetch": prefetch,
        }
    )


class Watching(CheckingDriver):
    """Checks what is planned at the start of drafting against the utilities of that moment."""

    planned = 0
    taus: set[int]

    def submit(self, loads: Any, pinned: Any) -> None:
        core = self.core
        assert isinstance(core, UtilityCore)
        states, thresholds = core.hot._signal.states, core.hot.thresholds
        self.taus = getattr(self, "taus", set()) | set(thresholds)
        hot = [load for load in loads if load.reason == UTILITY]
        levels = [int(states[load.key]) for load in hot]
        assert levels == sorted(levels, reverse=True), "the most useful first"
        for load, level in zip(hot, levels, strict=True):
            assert level >= thresholds[load.key[0]], "nothing below tau"
            assert all(states[gone] < level for gone in load.evicts), "only colder ones make room"
        if not pinned:
            waiting = len(self.queue) + (self.flying is not None)
            assert (len(hot) + waiting) * COPY_NS <= self.window_ns or not hot, "the copies take too long"
            self.planned += len(hot)
        super().submit(loads, pinned)

    def layer(self, layer: int, counts: dict[int, int], ahead: list[int]) -> None:
        super().layer(layer, counts, ahead)
        core = self.core
        assert isinstance(core, UtilityCore)
        assert not any(
            key[0] == layer + 1 and core.hot._queue._current[key][0] == -6 for key in core.hot._queue._current
        )


@pytest.mark.parametrize("pool", ["layer", "global"])
@pytest.mark.parametrize(
    "utility",
    [
        {},
        {"loads": "drafting"},
        {"scope": "layer"},
        {"cpu": {"policy": "balanced", "hot_misses": "load"}},
        {"cpu": {"policy": "balanced", "hot_misses": "balance"}},
        {"cpu": {"policy": "none"}, "source": "quasi-hidden"},
        {"source": "quasi-hidden", "tau": 2},
        {"signal": "recency", "objective": "difference"},
    ],
)
def test_loads_go_from_the_hottest_down_to_tau_within_time_and_room(
    spec: Trace, pool: str, utility: dict[str, Any]
) -> None:
    plain = driver_for(config_of(pool, **utility), spec)
    for seed in range(2):
        core = OffloadCore.from_config(config_of(pool, **utility), spec.shape, times=times_of(spec.shape, GAMMA))
        driver = Watching(core, spec.shape, plain.capacity, seed)
        driver.run(spec)
        awaits_hot = config_of(pool, **utility).cpu.hot_misses == "load"
        assert awaits_hot or any(load.reason == UTILITY for load in driver.loads)
        assert driver.planned > 0 or "cpu" in utility or "source" in utility, "others leave nothing to plan"
        assert len(driver.taus) == 1 if "tau" in utility else len(driver.taus) > 1


def test_a_log_replays_call_by_call(spec: Trace) -> None:
    config = config_of(source="quasi-hidden")
    log: list[Any] = []
    driver_for(config, spec, seed=5, log=log).run(spec)
    again: list[Any] = []
    core = OffloadCore.from_config(config, spec.shape, again, times=times_of(spec.shape))
    for entry in log:
        if entry[0] != "prefetch":
            getattr(core, "next_wave" if entry[0] == "wave" else entry[0])(*(() if entry[0] == "wave" else entry[1:]))
    assert again == log and any(entry[0] == "drafting_begins" for entry in log)


def log_of(config: OffloadConfig, trace: Trace) -> list[Any]:
    log: list[Any] = []
    driver_for(config, trace, at_once=True, log=log).run(trace)
    return log


def test_switching_a_part_off_leaves_the_other_as_it_is(spec: Trace) -> None:
    """Without predictions nothing enters above the top; with a tau that nothing reaches, predictions load what they
    load in the plain core."""
    cpu = {"policy": "none"}
    unreached = log_of(config_of(cpu=cpu, source="quasi-hidden", tau=6), spec)
    plain = log_of(config_of(cpu=cpu, source="quasi-hidden", loads="none"), spec)
    rounds = [n for n, entry in enumerate(unreached) if entry[0] == "drafting_begins"]
    assert all(unreached[n + 1] == ("prefetch", ()) for n in rounds)
    skipped = {*rounds, *(n + 1 for n in rounds)}
    assert [entry for n, entry in enumerate(unreached) if n not in skipped] == plain
    assert any(load.reason == "prefetch" for name, *rest in plain if name == "prefetch" for load in rest[0])
    alone = log_of(config_of(), spec)
    assert {load.reason for name, *rest in alone if name == "prefetch" for load in rest[0]} == {UTILITY}


def test_loads_planned_for_a_decode_pass_are_counted_with_it(spec: Trace) -> None:
    driver = driver_for(config_of(loads="drafting"), spec)
    driver.run(spec)
    tally = driver.core.tally
    assert tally.prefill.prefetch_loads == 0
    loads = [load for load in driver.loads if load.reason == UTILITY]
    assert tally.decode.prefetch_loads == len(loads) - driver.cancelled


def test_in_a_replay_loads_by_utility_beat_what_comes_too_late(spec: Trace) -> None:
    hardware = make_hardware(bytes_per_s=2e7, memory_bytes_per_s=2e9, host=make_host(ram=1e8, core_rate=1e8))

    def pass_ms(config: OffloadConfig) -> float:
        return simulate(spec, hardware, config, bounds=False).metrics.tpot_ms

    full = pass_ms(config_of())
    assert full < pass_ms(config_of(cpu={"policy": "none"}))
    assert full < pass_ms(config_of(loads="none", cpu={"policy": "balanced", "admissions": 0}))


def test_times_of_a_machine_are_those_of_its_cost_model() -> None:
    shape = make_shape(layers=2, experts=24, top_k=3, expert_bytes=(1000, 3000))
    hardware = make_hardware(host=make_host())
    costs = CostModel(hardware, shape)
    times = expert_times(costs, shape, GAMMA, has_cpu=True)
    assert times.device_ns.shape == (2, GAMMA + 2) and not times.device_ns[:, 0].any() and not times.cpu_ns[:, 0].any()
    assert times.copy_ns.tolist() == [costs.copy_ns(1000), costs.copy_ns(3000)]
    for layer in range(2):
        for served in (1, GAMMA + 1):
            tokens = served * 12 // 3
            whole = costs.compute.cpu_experts_ns(layer, tokens, 12, 12)
            assert times.cpu_base_ns[layer] + 12 * times.cpu_ns[layer, served] == pytest.approx(whole, rel=0.02)
    alone = expert_times(costs, shape, GAMMA, has_cpu=False)
    assert (alone.cpu_ns[:, 1:] == times.copy_ns[:, None] + times.device_ns[:, 1:]).all()


def test_what_does_not_go_together_is_refused(spec: Trace) -> None:
    for raw in ({"utility": {"loads": "always"}}, {"cpu": {"policy": "balanced"}}):
        with pytest.raises(ConfigError, match="cache.policy = 'utility'"):
            parse_config({"cache": {"budget_ratio": 0.5}} | raw)
    with pytest.raises(ConfigError, match="made without those times"):
        OffloadCore.from_config(config_of(), spec.shape)
