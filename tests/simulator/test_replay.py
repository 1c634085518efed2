"""`simulate` from outside: golden integers, units of the cost model, and what it refuses."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from simulator import simulate
from simulator.cost_model import CostModel, interpolate_ns
from tests.simulator.builders import (
    decode_trace,
    make_config,
    make_hardware,
    make_measured,
    make_shape,
    mixed_trace,
)
from trace_capture.errors import ConfigError, ProfileError, TraceError

GOLDEN = {
    ("none", "layer", "none"): (0, 0, 1112, 1112, 0, 1314400, 1479153),
    ("none", "layer", "quasi-hidden"): (279, 348, 1253, 1253, 627, 1482800, 1127502),
    ("none", "global", "previous-token"): (188, 229, 1403, 1403, 417, 1655700, 1242912),
    ("lru", "layer", "none"): (694, 0, 418, 389, 0, 493200, 914488),
    ("lru", "layer", "quasi-hidden"): (803, 66, 593, 564, 247, 702200, 826635),
    ("lru", "global", "previous-token"): (652, 3, 470, 440, 10, 552800, 937302),
    ("lfu", "layer", "none"): (742, 0, 370, 341, 0, 436500, 874079),
    ("lfu", "layer", "quasi-hidden"): (830, 42, 554, 525, 191, 659600, 817332),
    ("lfu", "global", "previous-token"): (719, 16, 586, 557, 76, 692400, 875927),
    ("lfu-ageing", "layer", "none"): (734, 0, 378, 349, 0, 445500, 880593),
    ("lfu-ageing", "layer", "quasi-hidden"): (834, 50, 556, 527, 210, 658100, 810521),
    ("lfu-ageing", "global", "previous-token"): (695, 6, 485, 455, 28, 568500, 903094),
    ("random", "layer", "none"): (680, 0, 432, 403, 0, 511800, 927763),
    ("random", "layer", "quasi-hidden"): (783, 71, 628, 599, 259, 751500, 842338),
    ("random", "global", "previous-token"): (625, 16, 689, 659, 144, 818300, 961463),
    ("lru", "global", "none"): (652, 0, 460, 430, 0, 542500, 938869),
    ("lfu", "global", "quasi-hidden"): (806, 73, 593, 564, 235, 699500, 809703),
}
"""(policy, scope, source) -> hits, late, loads, evictions, used prefetches, bytes, decode ns of the trace below."""


@pytest.mark.parametrize("case", sorted(GOLDEN), ids="/".join)
def test_golden_decisions_and_times(case: tuple[str, str, str]) -> None:
    policy, scope, source = case
    sizes = (1000, 1300, 900, 1700, 1000)
    trace = mixed_trace(make_shape(layers=5, expert_bytes=sizes, kv_bytes_per_token=77, head_bytes=3333), seed=1)
    hardware = make_hardware(bytes_per_s=1.7e9, latency_ns=139, issue_ns=59, wakeup_ns=83, launch_ns=307)
    run = simulate(trace, hardware, make_config(policy, source, scope=scope, budget_bytes=35_000))
    metrics = run.metrics
    found = (metrics.hits, metrics.late_prefetches, metrics.loads, metrics.evictions, metrics.prefetch_used,
             metrics.bytes_loaded, int(run.token_ns.sum()))  # fmt: skip
    assert found == GOLDEN[case]
    assert metrics.lookups == 1112


def test_link_time_is_latency_plus_bytes_over_rate() -> None:
    costs = CostModel(make_hardware(bytes_per_s=25e9, latency_ns=10_000), make_shape())
    assert costs.copy_ns(25_000_000) == 10_000 + 1_000_000
    assert costs.copy_ns(0) == 10_000


def test_roofline_takes_the_larger_of_bytes_and_operations() -> None:
    shape = make_shape(layers=2, kv_bytes_per_token=200, head_bytes=30_000, dense_bytes=(10_000, 20_000))
    hardware = make_hardware(memory_bytes_per_s=1e9, flops_per_s=1e9, launch_ns=5.0)
    compute = CostModel(hardware, shape).compute
    assert compute.dense_ns(0, 1, 0) == 10_000 + 5, "one token: 10,000 operations, 10,000 bytes"
    assert compute.dense_ns(0, 3, 0) == 30_000 + 5, "three tokens: operations, two per weight of two bytes"
    assert compute.dense_ns(1, 1, 40) == 20_000 + 100 * 40 + 5, "context of 40 tokens: half of 200 bytes each"
    assert compute.experts_ns(0, 1, 3, 3) == 3000 + 5
    assert compute.experts_ns(0, 4, 6, 6) == 6000 * 2 + 5, "four tokens' twelve rows on six experts: two rows each"
    assert compute.overhead_ns(7) == 30_000 + 5


def test_measured_costs_serve_the_model_they_were_measured_with() -> None:
    hardware = make_hardware(measured=make_measured())
    assert CostModel(hardware, make_shape()).is_measured
    other = make_shape().model_copy(update={"name": "other"})
    assert not CostModel(hardware, other).is_measured
    compute = CostModel(hardware, make_shape()).compute
    assert (compute.decide_ns(0), compute.decide_ns(3), compute.predict_ns(0)) == (40, 70, 25)


def test_interpolation_between_and_beyond_points() -> None:
    points, values = (1, 4, 8), (100.0, 400.0, 1000.0)
    assert [interpolate_ns(points, values, at) for at in (1, 2, 4, 6, 8, 16)] == [100, 200, 400, 700, 1000, 2000]
    assert interpolate_ns((2, 4), (100.0, 200.0), 1) == 100


@pytest.mark.parametrize("field", ["link", "memory", "flops"])
def test_rate_of_zero_is_refused_by_name(field: str) -> None:
    trace = decode_trace(make_shape(layers=1), [[[0, 1, 2]]])
    rates = {"link": {"bytes_per_s": 0.0}, "memory": {"memory_bytes_per_s": 0.0}, "flops": {"flops_per_s": 0.0}}
    with pytest.raises(ProfileError, match=r"'toy machine' has \w+\.\w+_per_s = 0"):
        simulate(trace, make_hardware(**rates[field]), make_config(budget_bytes=3000))


def test_empty_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="no rows"):
        simulate(decode_trace(make_shape(layers=1), []), make_hardware(), make_config(budget_bytes=3000))


def test_missing_predictions_are_named_with_the_mend() -> None:
    trace = decode_trace(make_shape(layers=1), [[[0, 1, 2]]])
    with pytest.raises(TraceError, match=r"no predictions of 'quasi-hidden'.*--predict quasi-hidden"):
        simulate(trace, make_hardware(), make_config("lru", "quasi-hidden", budget_bytes=3000))


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({"budget_bytes": 11_999}, r"11,999 bytes cannot hold the top-3 .*at least 12,000 bytes"),
        ({"budget_bytes": 2_999, "scope": "global"}, r"at least 3,000 bytes"),
        ({"budget_ratio": 0.01}, r"at least 12,000 bytes \(0\.188 of all experts\)"),
        ({"slots_per_layer": [3, 3, 3]}, r"3 entries, toy has 4 MoE layers"),
        ({"slots_per_layer": [3, 3, 2, 3]}, r"layer 2 gets 2 expert slots; it needs at least its top-k of 3"),
        ({"slots_per_layer": [3, 3, 17, 3]}, r"layer 2 gets 17 expert slots.*has 16 experts"),
    ],
)
def test_budgets_that_do_not_fit_are_refused(cache: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        simulate(mixed_trace(make_shape()), make_hardware(), make_config(**cache))


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown cache policy 'lruu'; did you mean 'lru'"):
        make_config("lruu", budget_bytes=3000)
    with pytest.raises(ConfigError, match="unknown prefetch source 'previous'; did you mean 'previous-token'"):
        make_config("lru", "previous", budget_bytes=3000)


def test_run_says_what_it_is_and_can_be_stored(tmp_path: Path) -> None:
    trace = mixed_trace(make_shape())
    hardware = make_hardware().model_copy(update={"emulated": True})
    run = simulate(trace, hardware, make_config(budget_bytes=20_000), record_spans=True)
    assert run.info.kind == "simulated" and run.info.emulated
    assert run.info.trace_digest == trace.digest and run.info.hardware_digest == hardware.digest
    assert any("emulated" in note for note in run.info.notes)
    assert any("synthetic" in note for note in run.info.notes)
    again = type(run).load(run.save(tmp_path, "one"))
    assert again.info == run.info and again.spans == run.spans
    assert np.array_equal(again.token_ns, run.token_ns)


def test_decode_only_figures_leave_the_prefill_out() -> None:
    trace = mixed_trace(make_shape())
    run = simulate(trace, make_hardware(), make_config(budget_bytes=20_000))
    decode = int((trace.phase != 0).sum())
    assert run.metrics.decode_tokens == decode
    assert run.metrics.prefill_tokens == trace.num_tokens - decode
    assert run.metrics.tpot_ms == pytest.approx(run.token_ns.sum() / decode / 1e6)
    assert len(run.token_ns) == sum(item.phase != 0 for item in trace.passes)


def test_compute_and_transfer_bounds_are_below_every_policy() -> None:
    for seed in range(3):
        trace = mixed_trace(make_shape(), seed=seed)
        for source in ("none", "previous-token", "quasi-hidden"):
            run = simulate(trace, make_hardware(), make_config("lru", source, budget_bytes=20_000))
            assert 0 < run.info.bounds["compute_ms"] <= run.metrics.tpot_ms
            assert run.info.bounds["transfer_ms"] <= run.metrics.tpot_ms


def test_a_replay_keeps_little_of_a_pass() -> None:
    """Beside the trace: a pass's place in it and its length, not its parts or its decisions."""
    shape, hardware, config = make_shape(layers=4, top_k=2), make_hardware(), make_config("lru", budget_bytes=20_000)
    tokens = [[[(token + layer) % 8, (token * 3 + layer) % 8] for layer in range(4)] for token in range(2400)]
    peaks = []
    for count in (400, 400, 2400):  # the first one fills what is remembered between replays
        trace = decode_trace(shape, tokens[:count])
        tracemalloc.start()
        simulate(trace, hardware, config, bounds=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[2] - peaks[1]) / 2000 < 600, "bytes per pass"
