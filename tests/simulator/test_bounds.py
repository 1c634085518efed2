"""Bounds: against exhaustive search, against the simulator where perfection is possible, and their order."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

import simulator.bounds
from simulator import simulate
from simulator.bounds import belady_hit_rates
from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.config import parse_config
from tests.simulator.builders import (
    decode_trace,
    make_config,
    make_hardware,
    make_shape,
    mixed_trace,
    room_for,
    trace_of,
)
from trace_capture.run import Run
from trace_capture.trace import NO_EXPERT, Phase, Trace


def fresh_trace(tokens: int = 12, layers: int = 4, experts: int = 60) -> Trace:
    """Every token asks every layer for three experts that the last twenty tokens did not use, and a predictor knows
    them."""
    shape = make_shape(layers=layers, experts=experts)
    rows = [[[(3 * token + place) % experts for place in range(3)] for _ in range(layers)] for token in range(tokens)]
    ids = np.asarray(rows, dtype=np.uint16)
    predicted = np.array(ids)
    predicted[:, 0] = NO_EXPERT
    return decode_trace(shape, rows, predicted=predicted)


@pytest.mark.parametrize(("source", "bound"), [("none", "on_demand_ms"), ("quasi-hidden", "look_ahead_ms")])
@pytest.mark.parametrize("bytes_per_s", [2e8, 1e9, 5e9])
def test_perfection_that_a_policy_can_reach_is_what_the_simulator_gives(
    source: str, bound: str, bytes_per_s: float
) -> None:
    """No expert returns soon enough for any cache, and the predictor is right, so LRU is a perfect eviction and
    the hints are a perfect prefetch one layer ahead; issue, wake-up and prediction cost nothing here."""
    hardware = make_hardware(bytes_per_s=bytes_per_s, latency_ns=17)
    run = simulate(fresh_trace(), hardware, make_config("lru", source, budget_bytes=4 * 9 * 1000))
    assert run.metrics.tpot_ms == pytest.approx(run.info.bounds[bound], rel=1e-12)
    assert run.metrics.tpot_terms_ms["stall"] > 0


def test_bounds_are_in_order_and_no_policy_is_below_the_lowest() -> None:
    for seed in range(2):
        trace = mixed_trace(make_shape(), seed=seed)
        for policy in CACHE_POLICIES:
            for source in ("none", "previous-token", "quasi-hidden"):
                config = make_config(policy, source, budget_bytes=room_for(policy, trace.shape, 20_000))
                run = simulate(trace, make_hardware(launch_ns=100), config, warmup_passes=seed * 9)
                bounds = run.info.bounds
                names = ("compute_ms", "max_ms", "prefetch_ms", "look_ahead_ms", "on_demand_ms")
                values = [bounds[name] for name in names]
                assert values == sorted(values) and bounds["transfer_ms"] <= bounds["max_ms"]
                assert bounds["max_ms"] <= run.metrics.tpot_ms
                assert (
                    run.regret_ratio == pytest.approx(run.metrics.tpot_ms / bounds["max_ms"]) and run.regret_ratio >= 1
                )
                if source == "none":
                    assert run.metrics.decode_hit_rate <= bounds["belady_decode_hit_rate"] + 1e-12


def test_no_look_ahead_reaches_across_a_prefill() -> None:
    """A perfect prefetch without limit runs ahead within a stretch of decode passes, from its start on."""
    shape = make_shape(layers=1, experts=16, top_k=1, expert_bytes=1000, dense_bytes=(0,))
    one = [(Phase.PREFILL, [[[0]]]), *((Phase.DECODE, [[[expert]]]) for expert in (1, 2, 3))]
    hardware = make_hardware(bytes_per_s=1e9, memory_bytes_per_s=1e9)
    together = simulate(trace_of(shape, one), hardware, make_config(budget_bytes=1000)).info.bounds
    assert together["transfer_ms"] == together["compute_ms"] == pytest.approx(1000 / 1e6)
    assert together["prefetch_ms"] == pytest.approx(4000 / 3 / 1e6), "only the first copy is exposed"
    assert together["look_ahead_ms"] == pytest.approx(2000 / 1e6), "the first layer of a pass is never foreseen"
    split = [one[0], one[1], one[0], one[2], one[0], one[3]]
    bounds = simulate(trace_of(shape, split), hardware, make_config(budget_bytes=1000)).info.bounds
    assert bounds["prefetch_ms"] == pytest.approx(2000 / 1e6)


@pytest.mark.parametrize("seed", range(8))
def test_decode_hit_rate_of_the_bound_is_what_exhaustive_search_finds(seed: int) -> None:
    source = random.Random(seed)
    shape = make_shape(layers=1, experts=5, top_k=1, expert_bytes=10)
    passes = [(Phase.PREFILL if source.random() < 0.4 else Phase.DECODE, source.randrange(5)) for _ in range(14)]
    trace = trace_of(shape, [(phase, [[[expert]]]) for phase, expert in passes])
    lookups = sum(phase == Phase.DECODE for phase, _ in passes)
    for slots in (1, 2, 3):
        best = _most_decode_hits(tuple(passes), slots)
        assert belady_hit_rates(trace, make_config(budget_bytes=10 * slots))[1] == best / lookups


def _most_decode_hits(passes: tuple[tuple[Phase, int], ...], slots: int) -> int:
    @cache
    def best(place: int, resident: frozenset[int]) -> int:
        if place == len(passes):
            return 0
        phase, expert = passes[place]
        if expert in resident:
            return best(place + 1, resident) + (phase == Phase.DECODE)
        if len(resident) < slots:
            return best(place + 1, resident | {expert})
        return max(best(place + 1, resident - {victim} | {expert}) for victim in resident)

    return best(0, frozenset())


def test_equal_questions_are_answered_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    slow = simulator.bounds.perfect_eviction
    monkeypatch.setattr(simulator.bounds, "perfect_eviction", lambda *args: asked.append(1) or slow(*args))
    monkeypatch.setattr(simulator.bounds, "_known_misses", {})
    trace = mixed_trace(make_shape(), seed=3)
    rates = [belady_hit_rates(trace, make_config(policy, budget_bytes=20_000)) for policy in ("lru", "lfu", "lru")]
    assert len(set(rates)) == 1 and len(asked) == 2, "once for all look-ups, once for those of decode"
    assert belady_hit_rates(trace, make_config(budget_bytes=24_000)) != rates[0]
    assert belady_hit_rates(trace, make_config(scope="global", budget_bytes=20_000)) != rates[0]
    assert belady_hit_rates(mixed_trace(make_shape(), seed=4), make_config(budget_bytes=20_000)) != rates[0]
    assert len(asked) == 8
    for slots in range(12, 40):
        belady_hit_rates(trace, make_config(scope="global", budget_bytes=1000 * slots))
    assert len(simulator.bounds._known_misses) == 16, "and memory has an end"


def test_bounds_of_committed_layers_are_those_of_what_they_ran() -> None:
    """Predictions that stay the same need one copy each; the routed experts, never run, would need one per token."""
    routed = fresh_trace()
    steady = np.array(routed.predicted["quasi-hidden"])
    steady[:, 1:] = (0, 1, 2)
    trace = decode_trace(routed.shape, routed.experts.tolist(), predicted=steady)
    config = {"cache": {"budget_bytes": 36_000}, "prefetch": {"source": "quasi-hidden", "mode": "commit"}}
    run: Run = simulate(trace, make_hardware(), parse_config(config))
    assert run.metrics.decode_hit_rate == run.info.bounds["belady_decode_hit_rate"] > 0.6
    assert run.info.bounds["max_ms"] <= run.metrics.tpot_ms
