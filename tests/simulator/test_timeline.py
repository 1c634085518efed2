"""Perfetto files: structure, slices that do not overlap, counters that agree with the cache."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simulator import simulate
from simulator.timeline import can_tell_residency, perfetto_document, residency, write_perfetto
from tests.simulator.builders import make_config, make_hardware, make_shape, mixed_trace
from trace_capture.errors import TraceError
from trace_capture.run import Run, Span

BUDGET = 25_000


def make_run(policy: str = "lru", source: str = "quasi-hidden", **more: Any) -> Run:
    trace = mixed_trace(make_shape(layers=5), seed=2)
    hardware = make_hardware(latency_ns=137, issue_ns=53, wakeup_ns=71, launch_ns=211)
    return simulate(trace, hardware, make_config(policy, source, budget_bytes=BUDGET, **more), record_spans=True)


def of_phase(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_tracks_are_named_and_sorted() -> None:
    document = perfetto_document([make_run(), make_run("lfu")])
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in of_phase(document, "M")
             if event["name"] == "thread_name"}  # fmt: skip
    assert sorted(names.values()) == ["device", "device", "host", "host", "link", "link"]
    processes = [event["args"]["name"] for event in of_phase(document, "M") if event["name"] == "process_name"]
    assert processes == ["simulated: lru/layer + quasi-hidden (toy on toy machine)",
                         "simulated: lfu/layer + quasi-hidden (toy on toy machine)"]  # fmt: skip
    sorted_ids = {(event["pid"], event["tid"]) for event in of_phase(document, "M")
                  if event["name"] == "thread_sort_index"}  # fmt: skip
    assert sorted_ids == set(names)
    assert {(event["pid"], event["tid"]) for event in of_phase(document, "X")} == set(names)
    assert len({event["pid"] for event in document["traceEvents"]}) == 2


@pytest.mark.parametrize("window", [None, (0, 3), (7, 12)])
def test_slices_never_overlap_on_a_track(window: tuple[int, int] | None) -> None:
    document = perfetto_document([make_run(), make_run("none", "none"), make_run(serial=True)], window)
    last: dict[tuple[int, int], int] = {}
    for event in of_phase(document, "X"):
        start_ns, length_ns = round(event["ts"] * 1000), round(event["dur"] * 1000)
        assert length_ns > 0 and start_ns >= last.get((event["pid"], event["tid"]), 0)
        last[event["pid"], event["tid"]] = start_ns + length_ns
    assert len(last) == 9


def test_every_load_is_a_slice_with_its_arguments() -> None:
    run = make_run()
    loads = [event for event in of_phase(perfetto_document([run]), "X") if event["cat"] == "link"]
    assert len(loads) == sum(span.kind == "load" for span in run.spans)
    assert {event["name"] for event in loads} == {"demand load", "prefetch load"}
    span = next(span for span in run.spans if span.kind == "load")
    assert loads[0]["args"] == {
        "pass": span.pass_id, "layer": span.layer, "expert": span.expert, "bytes": 1000, "reason": span.reason,
    }  # fmt: skip
    assert loads[0]["ts"] == span.start_ns / 1000


@pytest.mark.parametrize(("policy", "more"), [("lru", {}), ("lfu", {"scope": "global"}), ("none", {})])
def test_counters_agree_with_the_cache(policy: str, more: dict[str, Any]) -> None:
    run = make_run(policy, **more)
    assert can_tell_residency(run)
    samples = residency(run)
    assert all(0 <= experts * 1000 == num_bytes <= BUDGET for _, experts, num_bytes in samples)
    assert [sample[0] for sample in samples] == sorted({sample[0] for sample in samples})
    landed = sum(span.kind == "load" for span in run.spans)
    assert samples[-1][1] == landed - run.metrics.evictions
    if policy != "none":
        assert max(sample[1] for sample in samples) == 25, "a warm cache is full"
    counters = [event for event in of_phase(perfetto_document([run]), "C") if event["name"] == "experts on device"]
    assert [event["args"]["experts"] for event in counters] == [0, *(sample[1] for sample in samples)]


def test_every_eviction_is_a_moment_after_its_load_landed() -> None:
    run = make_run()
    instants = of_phase(perfetto_document([run]), "i")
    assert len(instants) == run.metrics.evictions > 0
    on_device: set[tuple[int, int]] = set()
    moments = [(span.end_ns, 0, (span.layer, span.expert)) for span in run.spans if span.kind == "load"]
    moments += [(span.start_ns, 1, (span.layer, span.expert)) for span in run.spans if span.kind == "evict"]
    for _, is_eviction, key in sorted(moments):
        assert (key in on_device) == bool(is_eviction)
        on_device ^= {key}


def test_window_starts_at_zero_with_the_counters_of_that_moment() -> None:
    run = make_run()
    starts = sorted(span.start_ns for span in run.spans if span.kind == "overhead")
    document = perfetto_document([run], (7, 9))
    slices = of_phase(document, "X")
    assert min(event["ts"] for event in slices) == 0
    assert max(round((event["ts"] + event["dur"]) * 1000) for event in slices) == starts[9] - starts[7]
    assert {event["args"]["pass"] for event in slices if event["cat"] == "host"} == {7, 8}
    first = of_phase(document, "C")[0]
    expected = [sample for sample in residency(run) if sample[0] <= starts[7]][-1]
    assert first["ts"] == 0 and first["args"]["experts"] == expected[1] > 0


def test_run_without_recorded_evictions_gets_no_counters_and_says_so() -> None:
    run = make_run()
    bare = Run(run.info, run.token_ns, tuple(span for span in run.spans if span.kind != "evict"))
    document = perfetto_document([bare])
    assert of_phase(document, "C") == []
    assert any("did not record its evictions" in note for note in document["otherData"]["notes"])


def test_overlapping_spans_of_a_measured_run_go_to_a_second_lane() -> None:
    run = make_run()
    info = run.info.model_copy(update={"kind": "measured", "emulated": True})
    spans = (Span("link", "load", 0, 100, 0, 0, 1, 10, "demand"), Span("link", "load", 99, 150, 0, 0, 2, 10, "demand"),
             Span("link", "load", 100, 160, 0, 0, 3, 10, "demand"), Span("host", "decide", 0, 5, 0, 0))  # fmt: skip
    document = perfetto_document([Run(info, run.token_ns, spans)])
    link = [(event["args"]["expert"], event["tid"]) for event in of_phase(document, "X") if event["cat"] == "link"]
    assert link == [(1, 1), (2, 2), (3, 1)]
    names = [event["args"]["name"] for event in of_phase(document, "M") if "thread_name" == event["name"]]
    assert names == ["link", "link 2", "host"]
    assert of_phase(document, "M")[0]["args"]["name"].startswith("measured, emulated: ")


def test_file_is_json_or_gzip_by_its_name(tmp_path: Path) -> None:
    run = make_run()
    write_perfetto(run, tmp_path / "a.json")
    write_perfetto([run], tmp_path / "a.json.gz")
    plain = (tmp_path / "a.json").read_bytes()
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert gzip.decompress(packed) == plain
    assert set(json.loads(plain)) == {"traceEvents", "displayTimeUnit", "otherData"}
    write_perfetto([run], tmp_path / "b.json.gz")
    assert (tmp_path / "b.json.gz").read_bytes() == packed, "the same run gives the same file"


def test_mistakes_are_named() -> None:
    run = make_run()
    with pytest.raises(TraceError, match=r"has no timeline; record it with --spans"):
        perfetto_document([Run(run.info, run.token_ns)])
    with pytest.raises(TraceError, match=r"has 63 passes, so there is no window from 60 to 64 in it"):
        perfetto_document([run], (60, 64))
