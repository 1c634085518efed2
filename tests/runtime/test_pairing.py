"""Predicted beside measured: exact counts, undisturbed passes, the grid and its record. No times are asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.capture import capture
from runtime.models import LoadedModel, Sampling
from runtime.pairing import Comparison, Workload, predict_and_measure
from runtime.steadiness import Probe, Probes, around_passes, probed, reference_ns, steady_only
from runtime.validation import COMBINATIONS, Combination, validate_live
from simulator.policies.config import parse_config
from simulator.validation.record import ValidationRecord
from tests.simulator.builders import make_hardware
from trace_capture.errors import ProfileError, TraceError
from trace_capture.hardware import HardwareProfile, MeasuredCosts
from trace_capture.run import Metrics, Run, RunInfo

PROMPTS = ["the night was dark and", "the road was long"]
SAMPLING = Sampling(temperature=1.0, seed=4, ignore_eos=True)
DEVICE = {"h2d_bytes_per_s": 1e8, "latency_ns": 1000}


def run_of(kind: Any, pass_ms: list[float], **config: Any) -> Run:
    metrics = Metrics(tpot_ms=float(np.mean(pass_ms)), decode_tokens=len(pass_ms), tpot_terms_ms={"dense": 1.0})
    chosen = parse_config({"cache": {"budget_ratio": 0.5}} | config).model_dump(mode="json", exclude_none=True)
    info = RunInfo(kind=kind, label="x", emulated=True, model="m", hardware="h", config=chosen, metrics=metrics)
    return Run(info, np.array([round(1e6 * ms) for ms in pass_ms]))


def comparison(measured: list[list[float]], steady: list[list[bool]], speed: float = 1.0, **config: Any) -> Comparison:
    predicted = run_of("simulated", [10.0, 20.0, 30.0, 40.0], **config)
    at_speed = np.array([[1e7, 2e7, 3e7, 4e7]] * len(measured)) * speed
    runs = tuple(run_of("measured", each) for each in measured)
    return Comparison(predicted, runs, "prefetch", at_speed, np.full(at_speed.shape, speed), np.array(steady))


def test_passes_are_compared_in_the_runs_that_held_their_speed() -> None:
    runs = [[11.0, 99.0, 30.0, 99.0], [99.0, 99.0, 36.0, 44.0], [13.0, 99.0, 31.0, 99.0]]
    steady = [[True, False, True, False], [False, False, True, True], [True, False, True, False]]
    found = comparison(runs, steady)
    assert found.predicted_tpot_ms == pytest.approx((10 + 30 + 40) / 3)
    assert found.measured_tpot_ms == pytest.approx((11 + 31 + 44) / 3), "of two runs the lower, of three the middle"
    assert found.error_ratio == pytest.approx(80 / 86 - 1)
    assert found.run_error_ratio == pytest.approx(25 / ((13 + 99 + 31 + 99) / 4) - 1), "as a user sees it"
    assert found.pair().measured_ms == found.run_tpot_ms and found.pair().predicted_ms == 25
    assert found.pair().details["at_speed_error_ratio"] == found.error_ratio


def test_a_slower_machine_is_predicted_slower() -> None:
    found = comparison([[15.0, 30.0, 45.0, 60.0]], [[True] * 4], speed=1.5)
    assert found.error_ratio == pytest.approx(0) and found.run_error_ratio == pytest.approx(1 / 1.5 - 1)


def test_without_a_steady_pass_everything_is_compared() -> None:
    found = comparison([[10.0, 20.0, 30.0, 80.0]], [[False] * 4])
    assert (found.predicted_tpot_ms, found.measured_tpot_ms) == pytest.approx((25, 35))


@pytest.mark.parametrize(
    ("config", "free"),
    [
        ({}, True),
        ({"prefetch": {"source": "quasi-hidden"}}, False),
        ({"prefetch": {"source": "quasi-hidden"}, "device": {"serial": True}}, True),
        ({"prefetch": {"source": "quasi-hidden", "mode": "commit"}, "device": {"serial": True}}, False),
        ({"cpu": {"policy": "misses"}}, False),
        ({"cpu": {"policy": "misses", "admissions": 0}}, True),
        ({"cpu": {"layers": 2}}, True),
    ],
)
def test_counts_must_be_equal_where_nothing_is_loaded_ahead_of_need(config: dict[str, Any], free: bool) -> None:
    assert comparison([[1.0] * 4], [[True] * 4], **config).is_free_of_races is free


def test_probes_tell_speed_and_whether_it_was_held() -> None:
    assert Probes(100, 115).is_steady and not Probes(100, 150).is_steady and not Probes(150, 100).is_steady
    assert Probes(150, 150).is_steady, "slow, but at one speed"
    assert Probes(100, 120).slowdown(100) == pytest.approx(1.1) and Probes(1, 9).slowdown(0) == 1
    series = [Probe(place, value) for place, value in enumerate((100, 150, 151))]
    assert around_passes(series) == [(100, 150), (150, 151), (151, 151)]
    assert reference_ns(around_passes(series)) == 150
    items, slowdown = steady_only(list(zip("abc", around_passes(series), strict=True)), 100)
    assert items == ["b", "c"] and slowdown == pytest.approx((150.5 + 151) / 200)
    few = [("a", Probes(1, 9))] * 5 + [("b", Probes(100, 100))]
    assert len(steady_only(few, 100).items) == 6, "a sixth is too few to stand for all"


def test_every_pass_of_a_model_is_probed_and_the_hook_goes_away(loaded: LoadedModel) -> None:
    ids = loaded.encode("the night", 4)
    with probed(loaded.model) as probes:
        loaded.generate(ids, 4, SAMPLING, 0)
    assert len(probes) == 4 and min(probe.value_ns for probe in probes) > 0
    loaded.generate(ids, 2, SAMPLING, 0)
    assert len(probes) == 4
    with probed(loaded.model, wanted=False) as none:
        loaded.generate(ids, 2, SAMPLING, 0)
    assert none == []


@pytest.fixture(scope="module")
def workload(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    out = tmp_path_factory.mktemp("pairing") / "t.parquet"
    trace = capture(loaded, PROMPTS, out, 6, sampling=SAMPLING, predict="quasi-hidden")
    return Workload(trace, PROMPTS, 6, SAMPLING, vectors_path=out.with_suffix(".default_vectors.safetensors"))


def test_counts_of_every_run_are_those_predicted(loaded: LoadedModel, workload: Workload) -> None:
    ahead = {"source": "quasi-hidden"}
    configs = [
        {"cache": {"policy": "lfu-ageing", "budget_ratio": 0.5}, "device": DEVICE},
        {"cache": {"budget_ratio": 0.5}, "prefetch": ahead, "device": DEVICE | {"serial": True}},
    ]
    done: list[tuple[int, int]] = []
    hardware = make_hardware()
    found = predict_and_measure(
        loaded,
        workload,
        [(parse_config(config), hardware) for config in configs],
        repeats=2,
        progress=lambda *step: done.append(step),
    )
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for each in found:
        assert each.is_free_of_races and each.count_differences() == {} and len(each.measured) == 2
        counts = each.pair().details["counts_predicted"]
        assert counts["loads"] > 0 and counts["decode_tokens"] == 10
    assert [each.family for each in found] == ["expert_cache", "prefetch"]
    assert found[1].predicted.metrics.prefetch_loads > 0
    assert (found[0].slowdown == 1).all() and (found[0].at_speed_ns == found[0].predicted.token_ns).all()
    first = found[0].measured[0].metrics
    first.loads += 1
    assert found[0].count_differences() == {"loads": (first.loads - 1, [first.loads, first.loads - 1])}


def test_a_live_run_of_other_length_than_its_trace_is_refused(loaded: LoadedModel, workload: Workload) -> None:
    longer = Workload(workload.trace, PROMPTS, 7, SAMPLING, vectors_path=workload.vectors_path)
    config = parse_config({"cache": {"budget_ratio": 0.5}, "device": DEVICE})
    with pytest.raises(TraceError, match="made 12 decode passes and its trace has 10"):
        predict_and_measure(loaded, longer, [(config, make_hardware())])


def calibrated(model: str) -> HardwareProfile:
    costs = MeasuredCosts(
        model=model,
        tokens=(1,),
        dense_ns=(2e5,),
        experts_ns=(2e5,),
        cpu_experts_ns=(2e5,),
        pass_overhead_ns=(1e6,),
        decide_ns=3e4,
        decide_per_load_ns=2e4,
        predict_ns=1e5,
        probe_ns=1e4,
    )
    return make_hardware(bytes_per_s=1e8, latency_ns=1000, measured=costs)


def test_validation_writes_a_record_and_the_profile_gets_its_band(loaded: LoadedModel, tmp_path: Path) -> None:
    grid = (
        Combination("slow", "lru", "layer", 0.5),
        Combination("fast", "none", "layer", 1.0),
        Combination("medium", "lru", "layer", 0.5, "quasi-hidden", "hint", serial=True),
        Combination("medium", "lru", "layer", 0.5, cpu="2"),
    )
    result = validate_live(
        loaded,
        PROMPTS,
        command="c",
        step=lambda title: lambda done, total: None,
        hardware=calibrated(Path(loaded.path).name),
        combinations=grid,
        max_new_tokens=5,
        repeats=1,
    )
    assert result.counts_wrong == [] and len(result.errors) == 4
    result.record.save(tmp_path / "record.json")
    record = ValidationRecord.load(tmp_path / "record.json")
    assert record == result.record and record.hardware_digest == result.hardware.digest
    assert [pair.family for pair in record.pairs] == ["expert_cache", "on_demand", "prefetch", "layer_split"]
    assert result.hardware.error_band == record.band("any") and record.band("any").count == 4
    for each in result.comparisons:
        assert each.slowdown.min() > 1, "the profile claims a machine that is faster than any"
        assert each.at_speed_ns.min() > each.predicted.token_ns.min()
    rates = [pair.details["config"]["device"]["h2d_bytes_per_s"] for pair in record.pairs]
    assert rates[0] < rates[2] < rates[1], "the three link speeds are live"
    with pytest.raises(ProfileError, match="was not calibrated with"):
        validate_live(
            loaded, PROMPTS, command="c", step=lambda title: lambda *_: None, hardware=calibrated("another"),
            combinations=grid[:1], max_new_tokens=5, repeats=1,
        )  # fmt: skip


def test_the_grid_holds_what_it_promises() -> None:
    labels = {combination.label for combination in COMBINATIONS}
    assert len(labels) == len(COMBINATIONS) >= 12
    assert {combination.speed for combination in COMBINATIONS} == {"slow", "medium", "fast"}
    assert {"hint", "verify", "commit"} <= {combination.mode for combination in COMBINATIONS}
    assert {"none", "lru", "lfu-ageing"} <= {combination.policy for combination in COMBINATIONS}
    assert {"layer", "global"} == {combination.scope for combination in COMBINATIONS}
    assert any(combination.budget_ratio == 1 and combination.policy != "none" for combination in COMBINATIONS)
