"""What comes back from a run: a rescaled profile, and whether its routing was like the trace's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from runtime.cli import register_verbs
from runtime.cli.app import app
from simulator import simulate, tune
from simulator.config_file import load_config, save_config
from simulator.routing_drift import RoutingDrift, RoutingWatch, routing_reference
from simulator.tune_feedback import profile_from_run
from tests.simulator.builders import decode_trace, make_config, make_hardware, make_measured, make_shape, mixed_trace
from trace_capture.band import ErrorBand
from trace_capture.errors import TraceError
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Run
from trace_capture.statistics import GENERATING
from trace_capture.trace import Phase, Trace

SHAPE = make_shape(layers=3)
CONFIG = make_config(budget_bytes=18_000)


def machine(bytes_per_s: float = 1e9, **changes: Any) -> HardwareProfile:
    hardware = make_hardware(bytes_per_s=bytes_per_s, latency_ns=100, measured=changes.pop("measured", make_measured()))
    return hardware.model_copy(update={"emulated": True} | changes)


def measured_run(trace: Trace, hardware: HardwareProfile, **info: Any) -> Run:
    """What an engine would report that takes exactly as long as `hardware` says."""
    run = simulate(trace, hardware, CONFIG, record_spans=True)
    return Run(run.info.model_copy(update={"kind": "measured"} | info), run.token_ns, run.spans, passes=run.passes)


def test_a_profile_learns_link_and_compute_from_a_run() -> None:
    trace = mixed_trace(SHAPE)
    band = ErrorBand(low_ratio=0.9, high_ratio=1.1)
    believed = machine(error_band=band)
    truth = machine(0.4e9, measured=make_measured().slowed(1.7))
    run = measured_run(trace, truth)
    rescaled = profile_from_run(believed, run, trace)
    rate = rescaled.hardware.link.h2d_bytes_per_s
    assert rate.value == pytest.approx(0.4e9) and rate.kind == "measured"
    costs, wanted = rescaled.hardware.measured, truth.measured
    assert costs is not None and wanted is not None
    for name in ("dense_ns", "experts_ns", "pass_overhead_ns", "decide_ns", "decide_per_load_ns"):
        assert getattr(costs, name) == pytest.approx(getattr(wanted, name), rel=0.02), name
    again = simulate(trace, rescaled.hardware, CONFIG).metrics
    assert again.tpot_ms == pytest.approx(run.metrics.tpot_ms, rel=0.02)
    assert rescaled.hardware.error_band is None and any("band was dropped" in note for note in rescaled.notes)
    assert costs.cpu_experts_ns == make_measured().cpu_experts_ns, "a run does not tell what experts on the CPU cost"


def test_a_data_sheet_is_rescaled_as_a_whole_and_a_real_clock_gives_one_ratio() -> None:
    trace = mixed_trace(SHAPE)
    sheet = make_hardware(bytes_per_s=1e9, launch_ns=211)
    slower = {name: getattr(sheet.device, name) for name in ("memory_bytes_per_s", "flops_per_s", "launch_ns")}
    update = {name: one.model_copy(update={"value": one.value / 3}) for name, one in slower.items()}
    update["launch_ns"] = slower["launch_ns"].model_copy(update={"value": 3 * 211})
    truth = sheet.model_copy(update={"device": sheet.device.model_copy(update=update)})
    found = profile_from_run(sheet, measured_run(trace, truth), trace).hardware.device
    assert found.launch_ns.value == pytest.approx(633, rel=0.02) and found.launch_ns.kind == "measured"
    assert found.memory_bytes_per_s.value == pytest.approx(sheet.device.memory_bytes_per_s.value / 3, rel=0.02)


def test_runs_that_teach_nothing_are_refused() -> None:
    trace = mixed_trace(SHAPE)
    run = measured_run(trace, machine())
    for info, message in (
        ({"kind": "simulated"}, "the run is simulated"),
        ({"model": "another"}, "of another and the trace of toy"),
        ({"emulated": False}, "a real one"),
    ):
        other = Run(run.info.model_copy(update=info), run.token_ns, run.spans)
        with pytest.raises(TraceError, match=message):
            profile_from_run(machine(), other, trace)
    silent = Run(run.info, run.token_ns)
    kept = profile_from_run(machine(2e9), silent, trace)
    assert kept.hardware.link == machine(2e9).link and "0 copies, too few" in kept.notes[0]


def test_tune_from_run_says_what_it_took_over(tmp_path: Path) -> None:
    trace = mixed_trace(SHAPE)
    trace.save(tmp_path / "t.parquet")
    machine().save(tmp_path / "hardware.toml")
    run = measured_run(trace, machine(0.5e9)).save(tmp_path, "measured")
    register_verbs()
    arguments = ["tune", tmp_path / "t.parquet", "--hardware", tmp_path / "hardware.toml", "--from-run", run]
    options = ["--trials", "2", "--study", tmp_path / "study.sqlite", "--out", tmp_path / "tuned.toml"]
    result = CliRunner().invoke(app, [*map(str, [*arguments, *options])])
    assert result.exit_code == 0, result.output
    assert "link 0.500 GB/s from" in result.stdout and "instead of 1.000" in result.stdout
    assert "regret:" in result.stdout
    config = load_config(tmp_path / "tuned.toml")
    assert config.provenance is not None and "(from a run)" in config.provenance.hardware
    assert config.device.h2d_bytes_per_s == 1e9, "the emulated link is paced as it was"


def watched(reference: Any, trace: Trace, order: np.ndarray | None = None) -> RoutingDrift:
    """What a watch says of the generated tokens of a trace."""
    watch = RoutingWatch(reference)
    rows = trace.rows(np.isin(trace.phase, list(GENERATING)))
    for sequence in rows.sequences():
        watch.begin_prompt()
        places = np.flatnonzero(rows.sequence == sequence)
        for place in places if order is None else order[places]:
            for layer in range(trace.shape.num_moe_layers):
                watch.routed(layer, rows.experts[place, layer].tolist(), is_next=True)
    drift = watch.drift()
    assert drift is not None
    return drift


def parts_of(trace: Trace, first: int) -> tuple[Trace, Trace]:
    return trace.rows(trace.sequence < first), trace.rows(trace.sequence >= first)


def test_prompts_like_the_trace_are_like_it_and_others_are_not() -> None:
    trace = mixed_trace(SHAPE, seed=5, sequences=12, decode=24)
    before, later = parts_of(trace, 8)
    reference = routing_reference(before)
    assert reference is not None and reference.parts == 8
    same = watched(reference, later)
    assert not same.is_unlike and same.prompts == 4 and "is like that" in same.text()
    other = watched(reference, mixed_trace(SHAPE, seed=6, sequences=4, decode=24))
    assert other.is_unlike and other.popularity < reference.popularity - other.popularity_margin
    assert f"{other.popularity:.2f} (there {reference.popularity:.2f} +-" in other.text()


def test_alarms_are_rare_for_the_trace_s_own_sequences() -> None:
    trace = mixed_trace(SHAPE, seed=5, sequences=12, decode=24)
    alarms = 0
    for sequence in trace.sequences():
        reference = routing_reference(trace.rows(trace.sequence != sequence))
        alarms += watched(reference, trace.rows(trace.sequence == sequence)).is_unlike
    assert alarms <= 1


def test_the_same_experts_in_another_order_are_told_by_their_overlap() -> None:
    trace = mixed_trace(SHAPE, seed=5, sequences=12, decode=24)
    before, later = parts_of(trace, 8)
    reference = routing_reference(before)
    assert reference is not None
    count = int(np.isin(later.phase, list(GENERATING)).sum())
    drift = watched(reference, later, np.random.default_rng(1).permutation(count))
    assert abs(drift.popularity - reference.popularity) < drift.popularity_margin
    assert drift.is_unlike and drift.overlap is not None and drift.overlap < reference.overlap - drift.overlap_margin


def test_each_part_is_held_against_the_others_and_not_against_itself() -> None:
    """Four tokens in two parts of one layer: the first always uses expert 0, the second expert 1."""
    shape = make_shape(layers=1, experts=4, top_k=1)
    trace = decode_trace(shape, [[[0]], [[0]], [[1]], [[1]]], sequences=[0, 0, 1, 1])
    assert routing_reference(trace) is None, "pieces of one token"
    longer = decode_trace(shape, [[[0]]] * 4 + [[[1]]] * 4, sequences=[0] * 4 + [1] * 4)
    reference = routing_reference(longer)
    assert reference is not None and reference.parts == 4 and reference.part_tokens == 2
    assert reference.popularity == pytest.approx(4 * 2 / 6), "two of the six other tokens use the same expert"
    assert reference.overlap == 1 and reference.load == ("5000 5000 0 0",)


def test_verify_passes_tell_popularity_alone() -> None:
    reference = routing_reference(mixed_trace(SHAPE, sequences=6))
    assert reference is not None
    watch = RoutingWatch(reference)
    assert watch.drift() is None
    watch.begin_prompt()
    for _ in range(3):
        watch.routed(0, [1, 2, 99], is_next=False)
    drift = watch.drift()
    assert drift is not None and drift.overlap is None and drift.as_json()["overlap"] is None
    shares = reference.shares()[0]
    assert drift.popularity == pytest.approx((shares[1] + shares[2]) / 2), "an unknown id counts nothing"


def test_a_tuned_configuration_carries_the_reference(tmp_path: Path) -> None:
    trace = mixed_trace(SHAPE)
    config = tune(trace, machine(), budget_bytes=18_000).config
    assert config.provenance is not None and config.provenance.routing == routing_reference(trace)
    save_config(config, tmp_path / "tuned.toml")
    assert load_config(tmp_path / "tuned.toml") == config
    assert (trace.phase == Phase.PREFILL).any()


def test_experts_on_the_cpu_are_said_to_keep_their_times() -> None:
    trace, hardware = mixed_trace(SHAPE), machine()
    config = make_config(budget_bytes=18_000, cpu={"policy": "misses"})
    for chosen, said in ((config, True), (CONFIG, False)):
        run = simulate(trace, hardware, chosen, record_spans=True)
        measured = Run(run.info.model_copy(update={"kind": "measured"}), run.token_ns, run.spans, passes=run.passes)
        notes = profile_from_run(hardware, measured, trace).notes
        assert any("experts on the CPU keep the profile's times" in note for note in notes) == said
