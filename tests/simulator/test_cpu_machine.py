"""Timing laws of experts on the CPU, beside the device and the link, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import simulate
from simulator.policies.config import OffloadConfig
from simulator.policies.prefetch import PREFETCH_POLICIES
from simulator.stalls import STALL_PARTS
from tests.simulator.builders import (
    decode_trace,
    make_config,
    make_hardware,
    make_host,
    make_measured,
    make_shape,
    mixed_trace,
    trace_of,
)
from tests.simulator.test_placement import PLACEMENTS
from trace_capture.run import Run
from trace_capture.trace import Phase, Trace

OVERHEAD, DENSE, EXPERTS, CPU_EXPERTS, DECIDE, PER_LOAD = 5000, 300, 700, 9000, 40, 10
SHAPE = make_shape(layers=1, experts=8, top_k=3)


def toy(cpu_experts_ns: float = CPU_EXPERTS, **link: float) -> Any:
    return make_hardware(measured=make_measured(cpu_experts_ns=(cpu_experts_ns,)), **link)


def config(cpu: dict[str, Any], **more: Any) -> OffloadConfig:
    return make_config(cpu=cpu, **({"budget_bytes": 4000} | more))


def only_misses() -> dict[str, Any]:
    return {"policy": "misses", "admissions": 0}


def twice(second: list[int], **more: Any) -> Trace:
    """Experts 0, 1 and 2 in the first pass, `second` in the second."""
    return decode_trace(SHAPE, [[[0, 1, 2]], [second]], **more)


def test_layer_on_the_cpu_takes_the_cpu_s_time_and_nothing_of_device_or_link() -> None:
    run = simulate(decode_trace(SHAPE, [[[0, 1, 2]]]), toy(), config({"layers": 1}), record_spans=True)
    assert run.token_ns.tolist() == [OVERHEAD + DENSE + DECIDE + CPU_EXPERTS]
    assert [(span.start_ns, span.end_ns) for span in run.spans if span.track == "cpu"] == [(5340, 14340)]
    assert not [span for span in run.spans if span.track == "link" or (span.track, span.kind) == ("device", "experts")]
    metrics = run.metrics
    assert metrics.tpot_terms_ms["cpu_experts"] == pytest.approx(CPU_EXPERTS / 1e6)
    assert (metrics.cpu_runs, metrics.lookups, metrics.hits, metrics.loads) == (3, 3, 0, 0)


@pytest.mark.parametrize(("second", "on_cpu"), [([0, 1, 2], 0), ([0, 1, 5], 1), ([0, 5, 6], 2), ([5, 6, 7], 3)])
@pytest.mark.parametrize("cpu_ns", [300.0, 9000.0])
def test_layer_ends_when_the_slower_of_both_parts_is_there(second: list[int], on_cpu: int, cpu_ns: float) -> None:
    """The first pass admits 0, 1 and 2; the second finds them."""
    run = simulate(twice(second), toy(cpu_ns), config({"policy": "misses", "admissions": 3}), record_spans=True)
    device_ns = EXPERTS if on_cpu < 3 else 0
    part_ns = round(cpu_ns * on_cpu / 3)
    device_ns += PER_LOAD * on_cpu  # the loads that admit them are planned while the CPU runs
    assert run.token_ns[1] == OVERHEAD + DENSE + DECIDE + max(device_ns, part_ns)
    waits = [span for span in run.spans if span.kind == "cpu_experts" and span.pass_id == 1]
    assert sum(span.end_ns - span.start_ns for span in waits) == max(0, part_ns - device_ns)
    assert run.metrics.demand_loads == 0


def test_cpu_starts_before_loads_are_issued_and_runs_beside_them() -> None:
    """A threshold loads expert 0 on demand; the CPU's part is done when that has landed and been computed."""
    trace = trace_of(SHAPE, [(Phase.VERIFY, [[[0, 1, 2]], [[0, 3, 4]]])])
    cpu = {"policy": "threshold", "max_tokens": 1, "admissions": 0}
    measured = make_measured(
        tokens=(1, 2),
        dense_ns=(DENSE, DENSE),
        experts_ns=(EXPERTS, 5 * EXPERTS),
        cpu_experts_ns=(1.0, 1000.0),
        pass_overhead_ns=(OVERHEAD, OVERHEAD),
    )
    hardware = make_hardware(issue_ns=7, wakeup_ns=13, measured=measured)
    run = simulate(trace, hardware, config(cpu), record_spans=True)
    routed = OVERHEAD + DENSE + DECIDE + PER_LOAD
    assert run.token_ns.tolist() == [routed + 7 + 1000 + 13 + EXPERTS]
    (cpu_span,) = [span for span in run.spans if span.track == "cpu"]
    assert (cpu_span.start_ns, cpu_span.end_ns) == (routed, routed + 800)
    assert run.metrics.tpot_terms_ms["cpu_experts"] == 0


def shared(cpu_rate: float, copy_rate: float, ram: float) -> Any:
    """A machine whose memory gives `ram` bytes/s to cores and copies together; device work takes no time."""
    host = make_host(ram=ram, cores=1, core_rate=cpu_rate)
    fast = {"memory_bytes_per_s": 1e18, "flops_per_s": 1e24}
    return make_hardware(bytes_per_s=copy_rate, host=host, **fast)


def test_copies_and_cores_slow_each_other_down_for_as_long_as_both_run() -> None:
    """Cores and copies want 1 GB/s each and get 1 GB/s together: twice the time while both run."""
    shape = make_shape(layers=1, experts=8, top_k=3, dense_bytes=(0,))
    trace = decode_trace(shape, [[[0, 1, 2]]])
    for admissions, cpu_ns, ends in [
        (0, 3000, []),
        (1, 4000, [2000]),
        (2, 5000, [2000, 4000]),
        (3, 6000, [2000, 4000, 6000]),
    ]:
        chosen = config({"policy": "misses", "admissions": admissions})
        run = simulate(trace, shared(1e9, 1e9, 1e9), chosen, record_spans=True)
        assert [span.end_ns for span in run.spans if span.track == "cpu"] == [cpu_ns]
        assert run.token_ns.tolist() == [cpu_ns]
        landed = [span.end_ns for span in run.spans if span.track == "link"]
        assert landed == ends[: len(landed)] and len(landed) >= min(1, admissions)


def test_a_copy_that_outlives_the_cpu_s_part_goes_on_undisturbed() -> None:
    """Cores need 400 ns alone and the copy 2000; both take twice as long together. 100 ns lie between the layers."""
    shape = make_shape(layers=2, experts=8, top_k=3, dense_bytes=(1000, 1000))
    trace = decode_trace(shape, [[[0, 1, 2], [4, 5, 6]]] * 3)
    host = make_host(ram=8e9, cores=1, core_rate=7.5e9, contended_ratio=0.5)
    hardware = make_hardware(bytes_per_s=0.5e9, host=host, flops_per_s=1e24)
    chosen = config({"policy": "misses", "admissions": 1}, budget_bytes=8000)
    run = simulate(trace, hardware, chosen, record_spans=True)
    parts = [(span.start_ns, span.end_ns) for span in run.spans if span.track == "cpu"]
    assert parts[:4] == [(100, 900), (1000, 1800), (1900, 2700), (2800, 3600)]
    copy = next(span for span in run.spans if span.track == "link")
    assert (copy.start_ns, copy.end_ns) == (100, 3700), "four times 400 of its 2000 ns beside the CPU, four times 100"
    assert run.metrics.hits == 1


def test_enough_memory_for_both_disturbs_nothing() -> None:
    trace = mixed_trace(make_shape(layers=5), seed=5)
    cpu = {"policy": "misses", "admissions": 4}
    runs = [
        simulate(trace, shared(1e9, 1e9, ram), config(cpu, budget_bytes=25_000), bounds=False) for ram in (2e9, 1e12)
    ]
    assert runs[0].token_ns.tolist() == runs[1].token_ns.tolist()
    slowed = simulate(trace, shared(1e9, 1e9, 1.5e9), config(cpu, budget_bytes=25_000), bounds=False)
    assert slowed.token_ns.sum() > runs[0].token_ns.sum()


@pytest.mark.parametrize("source", ["none", "quasi-hidden"])
@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("cpu", PLACEMENTS)
@pytest.mark.parametrize("is_shared", [False, True])
def test_terms_add_up_and_tracks_never_overlap(cpu: str, serial: bool, source: str, is_shared: bool) -> None:
    assert source in PREFETCH_POLICIES
    trace = mixed_trace(make_shape(layers=5), seed=5)
    hardware = shared(1e9, 1e9, 1.2e9) if is_shared else toy(latency_ns=100, issue_ns=7, wakeup_ns=13)
    chosen = config(PLACEMENTS[cpu], source=source, budget_bytes=25_000, serial=serial)
    run = simulate(trace, hardware, chosen, record_spans=True)
    metrics = run.metrics
    assert sum(metrics.tpot_terms_ms.values()) == pytest.approx(metrics.tpot_ms, rel=1e-12)
    assert metrics.cpu_runs > 0 and metrics.tpot_terms_ms["cpu_experts"] > 0
    if metrics.stall_parts_ms:
        stalls = sum(metrics.stall_parts_ms[part] for part in STALL_PARTS)
        assert stalls == pytest.approx(metrics.tpot_terms_ms["stall"], rel=1e-12)
    for track in ("cpu", "link"):
        spans = _of(run, track)
        assert all(before.end_ns <= after.start_ns for before, after in zip(spans, spans[1:], strict=False))
    end_ns = 0
    for span in sorted((*_of(run, "device"), *_of(run, "host")), key=lambda span: (span.start_ns, span.end_ns)):
        assert span.start_ns == end_ns, "device and host fill the time without gap or overlap"
        end_ns = span.end_ns
    assert all(span.end_ns <= end_ns for span in _of(run, "cpu"))
    if PLACEMENTS[cpu].get("policy") == "misses" and not PLACEMENTS[cpu].get("layers"):
        assert metrics.demand_loads == 0 and metrics.tpot_terms_ms["stall"] == 0 or serial
    assert run.info.bounds["max_ms"] <= metrics.tpot_ms


def _of(run: Run, track: str) -> list[Any]:
    return [span for span in run.spans if span.track == track and span.kind != "evict"]


def test_recording_spans_and_bounds_change_nothing() -> None:
    trace = mixed_trace(make_shape(layers=5), seed=5)
    chosen = config({"policy": "misses"}, source="quasi-hidden", budget_bytes=25_000)
    hardware = shared(1e9, 1e9, 1.2e9)
    plain = simulate(trace, hardware, chosen, bounds=False)
    recorded = simulate(trace, hardware, chosen, record_spans=True)
    assert plain.token_ns.tolist() == recorded.token_ns.tolist()


def test_a_layer_s_fixed_cost_on_the_cpu_its_start_and_the_split_are_charged_where_they_occur() -> None:
    fixed = {"cpu_layer_ns": 600.0, "cpu_start_ns": 21.0, "cpu_split_ns": 130.0, "cpu_beside_ns": 45.0}
    hardware = make_hardware(measured=make_measured(cpu_experts_ns=(900.0,), **fixed))
    whole = simulate(decode_trace(SHAPE, [[[0, 1, 2]]]), hardware, config({"layers": 1}))
    assert whole.token_ns.tolist() == [OVERHEAD + DENSE + DECIDE + 21 + 900]
    split = simulate(twice([0, 1, 5]), hardware, config({"policy": "misses", "admissions": 3}))
    on_device, on_cpu = EXPERTS + 130, 600 + 300 // 3 + 45
    assert split.token_ns[1] == OVERHEAD + DENSE + DECIDE + 21 + max(PER_LOAD + on_device, on_cpu)
    resident = simulate(twice([0, 1, 2]), hardware, config({"policy": "misses", "admissions": 3}))
    assert resident.token_ns[1] == OVERHEAD + DENSE + DECIDE + EXPERTS
