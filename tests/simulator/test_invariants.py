"""What holds for every strategy, trace, machine and budget."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from simulator import simulate
from simulator.policies.core import OffloadCore
from simulator.policies.plans import Load
from tests.simulator.builders import make_hardware
from tests.simulator.random_cases import (
    Case,
    Watched,
    budgets,
    bytes_per_partition,
    cases,
    complete,
    machines,
    replay,
    traces,
)
from trace_capture.trace import Phase, Trace

few = settings(derandomize=True, deadline=None, database=None, max_examples=80)
many = settings(few, max_examples=250)


@many
@given(cases())
def test_every_replay_keeps_the_laws(case: Case) -> None:
    def within_budget(core: OffloadCore) -> None:
        for held, size in bytes_per_partition(core, case):
            assert held <= size, "over budget"
        assert core.resident_bytes() == sum(held for held, _ in bytes_per_partition(core, case))

    watched = replay(case, within_budget)
    each_asked_expert_runs_once(watched)
    nothing_runs_before_it_has_landed(watched)
    tracks_are_serial_and_fill_the_time(watched)
    bytes_are_loads_times_size(watched)


def each_asked_expert_runs_once(watched: Watched) -> None:
    """And so each token is computed with each of its experts once: waves take whole experts."""
    asked: list[int] = []
    ran: list[int] = []
    for entry in watched.log:
        if entry[0] == "layer_routed":
            asked, ran = list(entry[2]), []
        elif entry[0] == "wave":
            ran += [*entry[1].experts, *entry[1].cpu_experts]
        elif entry[0] == "layer_done":
            assert sorted(ran) == sorted(asked)
    if watched.machine.passes and not any(entry[0] == "cancelled" for entry in watched.log):
        routed = sum(entry[0] == "layer_routed" for entry in watched.log)
        assert routed == sum(bool(ids) for item in watched.trace.passes for _, ids in watched.trace.iter_layers(item))


def nothing_runs_before_it_has_landed(watched: Watched) -> None:
    """The last load of an expert that began before a wave runs has ended by then."""
    runs = iter([span for span in watched.spans if span.track == "device" and span.kind == "experts"])
    loads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for span in watched.spans:
        if span.kind == "load":
            loads.setdefault((span.layer, span.expert), []).append((span.start_ns, span.end_ns))
    layer = -1
    for entry in watched.log:
        if entry[0] == "layer_routed":
            layer = entry[1]
        elif entry[0] == "wave" and entry[1].experts:
            run = next(runs)
            assert run.layer == layer
            for expert in entry[1].experts:
                begun = [times for times in loads[layer, expert] if times[0] <= run.start_ns and times[0] < run.end_ns]
                assert begun and max(begun)[1] <= run.start_ns
    assert next(runs, None) is None


def tracks_are_serial_and_fill_the_time(watched: Watched) -> None:
    """Time never goes back, nothing overlaps on a track, and the terms of a pass are its time to the nanosecond."""
    for track in ("link", "device", "host", "cpu"):
        end_ns = 0
        for span in watched.spans:
            if span.track == track:
                assert 0 <= span.start_ns <= span.end_ns
                assert span.kind == "evict" or span.start_ns >= end_ns, (span, end_ns)
                end_ns = max(end_ns, span.end_ns)
    begin_ns = 0
    busy = [span for span in watched.spans if span.track in ("device", "host") and span.kind != "evict"]
    for item, times in zip(watched.trace.passes, watched.machine.passes, strict=True):
        mine = [span for span in busy if span.pass_id == item.pass_id]
        assert min(span.start_ns for span in mine) == begin_ns
        begin_ns += times.total_ns
        assert max(span.end_ns for span in mine) == begin_ns
        assert sum(span.end_ns - span.start_ns for span in mine) == times.total_ns
        for kind in ("dense", "experts", "stall"):
            spent = sum(span.end_ns - span.start_ns for span in mine if span.kind == kind)
            assert spent == times.terms_ns[kind], kind


def bytes_are_loads_times_size(watched: Watched) -> None:
    sizes = watched.trace.shape.expert_bytes
    planned: Counter[tuple[int, int]] = Counter()
    for entry in watched.log:
        loads: tuple[Load, ...] = entry[1].loads if entry[0] == "wave" else entry[1] if entry[0] == "prefetch" else ()
        planned.update(load.key for load in loads)
        if entry[0] == "cancelled":
            planned[entry[1]] -= 1
    counters = watched.machine._core.prefill_counters, watched.machine._core.decode_counters
    total = sum(one.demand_loads + one.prefetch_loads + one.admission_loads for one in counters)
    assert planned.total() == total
    assert sum(count * sizes[key[0]] for key, count in planned.items()) == sum(one.bytes_loaded for one in counters)
    copied = Counter(
        (span.layer, span.expert) for span in watched.spans if span.kind == "load" and span.reason != "preload"
    )
    assert copied <= planned, "a copy that nobody planned"
    assert all(span.num_bytes == sizes[span.layer] for span in watched.spans if span.kind in ("load", "evict"))


@few
@given(
    traces(),
    machines(),
    st.sampled_from(["none", "static", "lru", "lfu", "lfu-ageing", "s3-fifo", "belady"]),
    st.data(),
)
def test_on_demand_loading_is_never_slower_over_a_faster_link(
    trace: Trace, hardware: Any, policy: str, data: st.DataObject
) -> None:
    scope = data.draw(st.sampled_from(["layer", "global"]))
    table = {"cache": {"policy": policy, "scope": scope, "budget_bytes": data.draw(budgets(trace, scope))}}
    config = complete(trace, table)
    link = hardware.link
    rate = link.h2d_bytes_per_s
    faster = rate.model_copy(update={"value": rate.value * data.draw(st.floats(1, 100))})
    better = hardware.model_copy(update={"link": link.model_copy(update={"h2d_bytes_per_s": faster})})
    slow, fast = (simulate(trace, machine, config, bounds=False) for machine in (hardware, better))
    assert fast.metrics.ttft_ms <= slow.metrics.ttft_ms
    assert (fast.token_ns <= slow.token_ns).all(), "not one pass is slower"
    assert fast.metrics.bytes_loaded == slow.metrics.bytes_loaded


@many
@given(traces(equal_sizes=True), st.sampled_from(["lru", "belady"]), st.sampled_from(["layer", "global"]), st.data())
def test_more_room_never_means_more_misses(trace: Trace, policy: str, scope: str, data: st.DataObject) -> None:
    """Of equal sizes, where every pass fits: a pass that runs in waves asks in an order that depends on the room."""
    shape = trace.shape
    most = max(len(ids) for item in trace.passes for _, ids in trace.iter_layers(item))
    unit = 1000 * (shape.num_moe_layers if scope == "layer" else 1)
    room = shape.total_expert_bytes // unit
    small = data.draw(st.integers(max(most, shape.top_k), room))
    large = data.draw(st.integers(small, room))
    misses = []
    for slots in (small, large):
        config = complete(trace, {"cache": {"policy": policy, "scope": scope, "budget_bytes": slots * unit}})
        metrics = simulate(trace, make_hardware(), config, bounds=False).metrics
        misses.append(metrics.lookups - metrics.hits)
    assert misses[1] <= misses[0]


@few
@given(cases())
def test_equal_inputs_give_equal_files(tmp_path_factory: Any, case: Case) -> None:
    folder: Path = tmp_path_factory.mktemp("equal")
    for name in ("one", "two"):
        simulate(*case, record_spans=True).save(folder, name)
    for suffix in (".run.json", ".spans.parquet"):
        assert (folder / f"one{suffix}").read_bytes() == (folder / f"two{suffix}").read_bytes()


@few
@given(cases(), st.integers(1, 4))
def test_warmup_leaves_out_its_passes_and_changes_nothing_else(case: Case, warmup: int) -> None:
    full = simulate(*case, record_spans=True)
    decode = sum(item.phase != Phase.PREFILL for item in split_passes(case))
    if warmup >= decode:
        return
    late = simulate(*case, record_spans=True, warmup_passes=warmup)
    assert late.spans == full.spans
    assert late.token_ns.tolist() == full.token_ns.tolist()[warmup:]
    assert late.metrics.ttft_ms == full.metrics.ttft_ms
    assert late.metrics.lookups <= full.metrics.lookups and late.metrics.bytes_loaded <= full.metrics.bytes_loaded


def split_passes(case: Case) -> Any:
    """Decode passes are the same whether prompts are cut up or not."""
    return case.trace.passes
