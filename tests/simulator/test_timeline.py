"""Perfetto files: structure, slices that do not overlap, counters that agree with the cache."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simulator import simulate
from simulator.counters import can_tell_queue, can_tell_residency, link_busy, queue_length, residency
from simulator.policies.config import parse_config
from simulator.timeline import perfetto_document, write_perfetto
from tests.simulator.builders import make_config, make_hardware, make_measured, make_shape, mixed_trace
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
def test_slices_of_a_thread_nest_or_follow_each_other(window: tuple[int, int] | None) -> None:
    document = perfetto_document([make_run(), make_run("none", "none"), make_run(serial=True), on_cpu()], window)
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in of_phase(document, "X"):
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(threads) == 13, "link, device and host of each, and one CPU"
    for events in threads.values():
        parents = parents_of(events)
        on_device = events[0]["cat"] == "device"
        for event, parent in zip(events, parents, strict=True):
            if not on_device or event["name"].split()[0] in ("prefill", "token", "tokens"):
                assert parent is None
            elif event["name"].startswith("layer"):
                assert "layer" not in parent["args"] and parent["args"]["pass"] == event["args"]["pass"]
            else:
                assert parent["name"] == f"layer {event['args']['layer']}"
                assert parent["args"]["pass"] == event["args"]["pass"]


def on_cpu() -> Run:
    """The CPU runs what is missing, beside device and copies."""
    raw = {"cache": {"budget_bytes": BUDGET}, "cpu": {"policy": "misses", "admissions": 2}}
    hardware = make_hardware(measured=make_measured(cpu_experts_ns=(2500.0,)))
    return simulate(mixed_trace(make_shape(layers=5), seed=2), hardware, parse_config(raw), record_spans=True)


def parents_of(events: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """The slice that directly holds each one; fails where two slices overlap without one holding the other."""
    parents: dict[int, dict[str, Any] | None] = {}
    open_slices: list[tuple[int, dict[str, Any]]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"], events.index(event))):
        start_ns = round(event["ts"] * 1000)
        end_ns = start_ns + round(event["dur"] * 1000)
        while open_slices and open_slices[-1][0] <= start_ns:
            open_slices.pop()
        assert end_ns > start_ns and all(end_ns <= outer_ns for outer_ns, _ in open_slices)
        parents[id(event)] = open_slices[-1][1] if open_slices else None
        open_slices.append((end_ns, event))
    return [parents[id(event)] for event in events]


@pytest.mark.parametrize("window", [None, (7, 12)])
def test_counters_run_forward_and_agree_with_the_slices(window: tuple[int, int] | None) -> None:
    document = perfetto_document([make_run()], window)
    series: dict[str, list[tuple[int, int]]] = {}
    for event in of_phase(document, "C"):
        (value,) = event["args"].values()
        series.setdefault(event["name"], []).append((round(event["ts"] * 1000), value))
    assert set(series) == {"link busy", "copies waiting for the link", "experts on device", "expert bytes on device"}
    for values in series.values():
        times = [at_ns for at_ns, _ in values]
        assert times == sorted(set(times)) and times[0] == 0
        assert all(value >= 0 for _, value in values)
    assert max(value for _, value in series["copies waiting for the link"]) > 1
    loads = [event for event in of_phase(document, "X") if event["cat"] == "link"]
    assert {value for _, value in series["link busy"]} == {0, 1}
    end_ns = max(round((event["ts"] + event["dur"]) * 1000) for event in of_phase(document, "X"))
    busy_ns = 0
    for (at_ns, value), (next_ns, _) in zip(series["link busy"], [*series["link busy"][1:], (end_ns, 0)], strict=True):
        busy_ns += value * (next_ns - at_ns)
    assert busy_ns == sum(round(event["dur"] * 1000) for event in loads)


def test_queue_holds_what_was_submitted_and_has_not_begun() -> None:
    info = make_run().info
    moments = ((10, 10, 30), (12, 30, 50), (30, 50, 70))  # submitted, begun, landed
    spans = tuple(
        Span("link", "load", start_ns, end_ns, 0, 1, number, 5, "demand", submit_ns)
        for number, (submit_ns, start_ns, end_ns) in enumerate(moments)
    )
    run = Run(info, make_run().token_ns, spans)
    assert queue_length(run) == [(12, 1), (50, 0)], "at 30 one begins and one is submitted"
    assert link_busy(run) == [(10, 1), (70, 0)]
    old = Run(info, run.token_ns, tuple(span._replace(submit_ns=-1) for span in spans))
    assert not can_tell_queue(old) and can_tell_queue(run)


@pytest.mark.parametrize("window", [None, (7, 12)])
def test_arrows_lead_from_every_used_prefetch_to_its_layer(window: tuple[int, int] | None) -> None:
    runs = [make_run(), make_run("lfu")]
    document = perfetto_document(runs, window)
    begins = {event["id"]: event for event in of_phase(document, "s")}
    ends = {event["id"]: event for event in of_phase(document, "f")}
    assert begins.keys() == ends.keys() and len(begins) == len(of_phase(document, "s"))
    if window is None:
        assert len(begins) == sum(run.metrics.prefetch_used for run in runs) > 0
    slices: dict[tuple[int, int, float], dict[str, Any]] = {}
    for event in of_phase(document, "X"):
        slices[event["pid"], event["tid"], event["ts"]] = event  # the innermost of those that begin together
    for number, begin in begins.items():
        end = ends[number]
        load, work = (slices[event["pid"], event["tid"], event["ts"]] for event in (begin, end))
        assert load["name"] == "prefetch load" and work["name"] == "experts" and end["bp"] == "e"
        assert load["args"]["layer"] == work["args"]["layer"] and load["pid"] == work["pid"]
        assert begin["ts"] < end["ts"] and load["ts"] + load["dur"] <= end["ts"] + 1e-6


def test_token_window_covers_the_passes_that_make_the_tokens() -> None:
    run = make_run()
    assert _frames_of(run)[:6] == [
        "prefill of 7 tokens, prompt 0", "token 0", "token 1", "token 2", "token 3", "tokens 4 to 6, 2 drafts",
    ]  # fmt: skip
    assert _frames_of(run, (4, 9)) == ["tokens 4 to 6, 2 drafts", "token 7", "token 8"]
    assert _frames_of(run, (5, 6)) == ["tokens 4 to 6, 2 drafts"]
    assert _frames_of(run, (25, 27)) == ["token 25", "prefill of 7 tokens, prompt 1", "token 26"]
    with pytest.raises(TraceError, match=r"has 78 output tokens, so there is no window from 70 to 79"):
        perfetto_document([run], tokens=(70, 79))
    with pytest.raises(TraceError, match=r"does not say which of its passes make tokens"):
        perfetto_document([Run(run.info, run.token_ns, run.spans)], tokens=(0, 1))


def _frames_of(run: Run, tokens: tuple[int, int] | None = None) -> list[str]:
    events = of_phase(perfetto_document([run], tokens=tokens), "X")
    return [event["name"] for event in events if event["cat"] == "device" and "layer" not in event["args"]]


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
    first = next(event for event in of_phase(document, "C") if event["name"] == "experts on device")
    expected = [sample for sample in residency(run) if sample[0] <= starts[7]][-1]
    assert first["ts"] == 0 and first["args"]["experts"] == expected[1] > 0


def test_run_without_recorded_evictions_gets_no_counters_and_says_so() -> None:
    run = make_run()
    bare = Run(run.info, run.token_ns, tuple(span for span in run.spans if span.kind != "evict"))
    document = perfetto_document([bare])
    assert {event["name"] for event in of_phase(document, "C")} == {"link busy", "copies waiting for the link"}
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
    assert names == ["link", "link 2", "device", "host"]
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
