"""Timing laws of the simulated machine, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import simulate
from simulator.cost_model import TERMS
from simulator.policies.cache import CACHE_POLICIES
from tests.simulator.builders import (
    decode_trace,
    make_config,
    make_hardware,
    make_measured,
    make_shape,
    mixed_trace,
    room_for,
    trace_of,
)
from trace_capture.run import Run, Span
from trace_capture.trace import NO_EXPERT, Phase, Trace

OVERHEAD, DENSE, EXPERTS, DECIDE, PER_LOAD, PREDICT = 5000, 300, 700, 40, 10, 25
LATENCY, ISSUE, WAKEUP = 100, 7, 13


def toy_hardware(**link: float) -> Any:
    numbers = {"latency_ns": LATENCY, "issue_ns": ISSUE, "wakeup_ns": WAKEUP} | link
    return make_hardware(measured=make_measured(), **numbers)


def predicted_as_routed(trace: Trace) -> Trace:
    """The same trace with a predictor that is always right (and silent about the first layer)."""
    ids = trace.experts.copy()
    ids[:, 0] = NO_EXPERT
    trace.predicted["quasi-hidden"] = ids
    return trace


def one_expert_trace(layers: int, expert_bytes: int, tokens: int = 1) -> Trace:
    shape = make_shape(layers=layers, experts=4, top_k=1, expert_bytes=expert_bytes)
    return predicted_as_routed(decode_trace(shape, [[[step % 4]] * layers for step in range(tokens)]))


def test_on_demand_pass_is_the_sum_of_its_parts() -> None:
    layers, size = 5, 1000
    run = simulate(one_expert_trace(layers, size), toy_hardware(), make_config("none", budget_bytes=layers * size))
    each = DENSE + (DECIDE + PER_LOAD) + ISSUE + (LATENCY + size) + WAKEUP + EXPERTS
    assert run.token_ns.tolist() == [OVERHEAD + layers * each]


def test_copies_of_a_layer_follow_each_other_and_hide_later_issues() -> None:
    shape = make_shape(layers=1, top_k=3)
    run = simulate(decode_trace(shape, [[[4, 5, 6]]]), toy_hardware(), make_config(budget_bytes=3000))
    host = DECIDE + 3 * PER_LOAD + 3 * ISSUE
    landed = DECIDE + 3 * PER_LOAD + ISSUE + 3 * (LATENCY + 1000)
    assert run.token_ns.tolist() == [OVERHEAD + DENSE + landed + WAKEUP + EXPERTS]
    terms = run.metrics.tpot_terms_ms
    assert terms["stall"] == pytest.approx((landed - host + WAKEUP) / 1e6)
    assert terms["issue"] == pytest.approx(3 * ISSUE / 1e6)


def test_hits_cost_neither_link_nor_wakeup() -> None:
    shape = make_shape(layers=2, top_k=3)
    same = [[4, 5, 6], [1, 2, 3]]
    run = simulate(decode_trace(shape, [same, same]), toy_hardware(), make_config(budget_bytes=8000), record_spans=True)
    assert run.token_ns[1] == OVERHEAD + 2 * (DENSE + DECIDE + EXPERTS)
    assert {span.pass_id for span in run.spans if span.track == "link"} == {0}


@pytest.mark.parametrize("size", [1, 400, 899, 900, 901, 1500, 9000])
@pytest.mark.parametrize("exact", [True, False])
def test_perfect_prediction_follows_the_recurrence(size: int, exact: bool) -> None:
    """Look-ahead of one layer: copy(l+1) starts with experts(l), so S[l+1] = max(S[l] + copy, S[l] + experts + dense)
    where host work is free; and the full form where it is not."""
    layers = 6
    free = {"tokens": (1,), "decide_ns": 0.0, "decide_per_load_ns": 0.0, "predict_ns": 0.0}
    if exact:
        hardware = make_hardware(latency_ns=LATENCY, measured=make_measured(**free))
    else:
        hardware = toy_hardware()
    trace = one_expert_trace(layers, size)
    config = make_config("none", "quasi-hidden", budget_bytes=layers * size)
    run = simulate(trace, hardware, config)
    copy = LATENCY + size
    if exact:
        start = OVERHEAD + DENSE + copy
        for _ in range(1, layers):
            start = max(start + copy, start + EXPERTS + DENSE)
        expected = start + EXPERTS
        on_demand = simulate(trace, hardware, make_config("none", budget_bytes=layers * size))
        saving = on_demand.token_ns[0] - run.token_ns[0]
        assert 0 <= saving <= layers * min(copy, EXPERTS + DENSE)
        assert saving == (layers - 1) * min(copy, EXPERTS + DENSE)
    else:
        expected = _full_recurrence(layers, copy)
    assert run.token_ns.tolist() == [expected]
    assert run.metrics.prefetch_used == layers - 1 == run.metrics.prefetch_loads


def _full_recurrence(layers: int, copy: int) -> int:
    routed = OVERHEAD + DENSE
    host = routed + DECIDE + PER_LOAD + ISSUE
    landed = host + copy
    end = 0
    for layer in range(layers):
        if layer > 0:
            host = routed + DECIDE
        if layer < layers - 1:
            host += PREDICT + PER_LOAD + ISSUE
        next_landed = max(landed, host) + copy
        start = host if landed <= host else landed + WAKEUP
        end = start + EXPERTS
        routed, landed = end + DENSE, next_landed
    return end


def test_demand_overtakes_queued_prefetch_but_not_the_copy_in_flight() -> None:
    shape = make_shape(layers=2, experts=8, top_k=3)
    trace = decode_trace(shape, [[[0, 1, 2], [3, 4, 5]]])
    ids = trace.experts.copy()
    ids[0, 0] = NO_EXPERT
    ids[0, 1] = [6, 7, 3]
    trace.predicted["quasi-hidden"] = ids
    hardware = make_hardware(measured=make_measured(dense_ns=(1.0,), experts_ns=(1.0,)))
    run = simulate(trace, hardware, make_config("lru", "quasi-hidden", budget_bytes=16_000), record_spans=True)
    order = [(span.layer, span.expert, span.reason) for span in run.spans if span.track == "link"]
    demand = [(0, 0, "demand"), (0, 1, "demand"), (0, 2, "demand")]
    assert order == [*demand, (1, 6, "prefetch"), (1, 4, "demand"), (1, 5, "demand"), (1, 3, "prefetch")]
    assert run.metrics.prefetch_loads == 2, "7 was withdrawn before it began"
    assert run.metrics.late_prefetches == 1


def test_copy_that_ends_at_a_moment_has_landed_at_it() -> None:
    """The prefetch ends in the nanosecond in which the next layer is routed: a hit without a stall."""
    compute = make_measured(decide_ns=0.0, decide_per_load_ns=0.0, predict_ns=0.0)
    hardware = make_hardware(wakeup_ns=WAKEUP, measured=compute)
    trace = one_expert_trace(2, DENSE + EXPERTS + WAKEUP)
    config = make_config("none", "quasi-hidden", budget_bytes=4 * (DENSE + EXPERTS + WAKEUP))
    run = simulate(trace, hardware, config, record_spans=True)
    assert run.metrics.hits == 1 and run.metrics.late_prefetches == 0
    assert [span.layer for span in run.spans if span.kind == "stall"] == [0]


def test_waves_of_a_prefill_share_the_compute_and_never_cost_less_than_one_token() -> None:
    shape = make_shape(layers=1, experts=8, top_k=2)
    tokens = [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    measured = make_measured(
        tokens=(1, 4),
        dense_ns=(300.0, 400.0),
        experts_ns=(700.0, 1600.0),
        cpu_experts_ns=(1.0, 1.0),
        pass_overhead_ns=(5000.0, 5000.0),
    )
    hardware = make_hardware(measured=measured)
    trace = trace_of(shape, [(Phase.PREFILL, tokens)])
    run = simulate(trace, hardware, make_config(budget_bytes=3000), record_spans=True)
    pieces = [span.end_ns - span.start_ns for span in run.spans if span.kind == "experts"]
    assert pieces == [700, 700, 700], "3/8 and 2/8 of 1600 are below the one-token call"
    whole = simulate(trace, hardware, make_config(budget_bytes=8000), record_spans=True)
    assert [span.end_ns - span.start_ns for span in whole.spans if span.kind == "experts"] == [1600]


@pytest.mark.parametrize("source", ["none", "previous-token", "quasi-hidden"])
@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("policy", sorted(CACHE_POLICIES))
def test_terms_add_up_and_spans_tell_the_same_times(policy: str, source: str, serial: bool) -> None:
    trace = mixed_trace(make_shape(layers=5), seed=5)
    config = make_config(policy, source, budget_bytes=room_for(policy, trace.shape, 25_000), serial=serial)
    run = simulate(trace, toy_hardware(), config, record_spans=True)
    assert set(run.metrics.tpot_terms_ms) == set(TERMS)
    assert sum(run.metrics.tpot_terms_ms.values()) == pytest.approx(run.metrics.tpot_ms, rel=1e-12)
    assert run.metrics.tpot_ms == pytest.approx(run.token_ns.sum() / run.metrics.decode_tokens / 1e6, rel=1e-12)
    starts = {span.pass_id: span.start_ns for span in run.spans if span.kind == "overhead"}
    end_ns = max(span.end_ns for span in run.spans if span.track != "link")
    bounds = [*(starts[item.pass_id] for item in trace.passes), end_ns]
    lengths = [later - earlier for earlier, later in zip(bounds, bounds[1:])]  # noqa: B905
    decode = [item.phase != Phase.PREFILL for item in trace.passes]
    assert [length for length, keep in zip(lengths, decode, strict=True) if keep] == run.token_ns.tolist()
    assert _busy(run, "device", "host") == end_ns, "device and host fill the time without gap or overlap"


def _busy(run: Run, *tracks: str) -> int:
    spans = sorted((span for span in run.spans if span.track in tracks), key=lambda span: (span.start_ns, span.end_ns))
    end_ns = 0
    for span in spans:
        if span.kind != "evict":
            assert span.start_ns == end_ns, (span, end_ns)
            end_ns = span.end_ns
    return end_ns


def test_serial_mode_overlaps_nothing() -> None:
    trace = mixed_trace(make_shape(layers=5), seed=5)
    config = make_config("lru", "quasi-hidden", budget_bytes=25_000, serial=True)
    serial = simulate(trace, toy_hardware(), config, record_spans=True)
    copies = [span for span in serial.spans if span.track == "link"]
    working = [span for span in serial.spans if span.track != "link" and span.kind in ("dense", "experts", "overhead")]
    assert copies and not any(_overlap(copy, work) for copy in copies for work in working)
    parallel = simulate(trace, toy_hardware(), make_config("lru", "quasi-hidden", budget_bytes=25_000))
    assert parallel.token_ns.sum() < serial.token_ns.sum()


def _overlap(one: Span, other: Span) -> bool:
    return one.start_ns < other.end_ns and other.start_ns < one.end_ns


def test_link_carries_one_copy_at_a_time_and_all_bytes() -> None:
    trace = mixed_trace(make_shape(layers=5), seed=5)
    hardware = toy_hardware()
    run = simulate(trace, hardware, make_config("lfu", "quasi-hidden", budget_bytes=25_000), record_spans=True)
    copies = sorted(span for span in run.spans if span.track == "link")
    for before, after in zip(copies, copies[1:]):  # noqa: B905
        assert before.end_ns <= after.start_ns
    assert all(span.end_ns - span.start_ns == LATENCY + span.num_bytes for span in copies)
    assert run.metrics.loads - len(copies) in range(3), "only copies still queued at the end are missing"


def test_recording_spans_changes_nothing() -> None:
    trace = mixed_trace(make_shape(layers=5), seed=5)
    config = make_config("lru", "quasi-hidden", budget_bytes=25_000)
    with_spans = simulate(trace, toy_hardware(), config, record_spans=True)
    without = simulate(trace, toy_hardware(), config, bounds=False)
    assert with_spans.token_ns.tolist() == without.token_ns.tolist()
    parts = with_spans.metrics.stall_parts_ms
    assert sum(parts.values()) == pytest.approx(with_spans.metrics.tpot_terms_ms["stall"], rel=1e-12)
    assert without.metrics == with_spans.metrics.model_copy(update={"stall_parts_ms": {}, "dense_parts_ms": {}})
    assert without.info.bounds == {} and with_spans.info.bounds["max_ms"] <= with_spans.metrics.tpot_ms


def test_time_lost_after_a_stall_follows_its_length() -> None:
    """In proportion below the shortest measured stall, between its neighbours, and constant beyond the longest."""
    costs = {"stall_ns": (1000.0, 3000.0), "wakeup_ns": (100.0, 300.0)}
    hardware = make_hardware(wakeup_ns=WAKEUP, measured=make_measured(**costs))
    found = []
    for size in (500, 2000, 9000):
        config = make_config("none", budget_bytes=size)
        run = simulate(one_expert_trace(1, size), hardware, config)
        found.append(run.token_ns[0] - (OVERHEAD + DENSE + DECIDE + PER_LOAD + size + EXPERTS))
    assert found == [50, 200, 300]


def test_the_first_load_of_a_layer_costs_more_than_the_next() -> None:
    hardware = make_hardware(measured=make_measured(decide_first_load_ns=77.0))
    plain = make_hardware(measured=make_measured())
    shape = make_shape(layers=2, top_k=3)
    trace = decode_trace(shape, [[[4, 5, 6], [1, 2, 3]], [[4, 5, 6], [1, 2, 3]]])
    config = make_config(budget_bytes=8000)
    extra = simulate(trace, hardware, config).token_ns - simulate(trace, plain, config).token_ns
    assert extra.tolist() == [2 * 77, 0]
