"""Calibration gives a profile that the simulator can use; absolute times are left to the benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime import draft_costs, host_experts
from runtime.calibrate import calibrate
from runtime.draft_costs import measure_draft_costs
from runtime.measure import measure
from runtime.models import LoadedModel, Sampling, load_model
from runtime.offloading import offloaded
from runtime.predict_costs import network_prediction_ns
from runtime.self_check import CHECKS, with_error_band
from runtime.speculative import PROMPT_LOOKUP, Drafting
from simulator.cost_model import TERMS, CostModel, MeasuredCompute
from simulator.policies.config import CacheConfig, DeviceConfig, OffloadConfig, PrefetchConfig, parse_config
from simulator.timeline import perfetto_document
from tests.runtime.test_speculative import GAMMA, half_right
from trace_capture.errors import ModelError
from trace_capture.hardware import HardwareProfile
from trace_capture.hooks import discover, model_shape
from trace_capture.trace import Phase

TEXT = "the night was dark and the road was long and " * 2


@pytest.fixture(scope="module")
def profile(loaded: LoadedModel) -> HardwareProfile:
    return calibrate(loaded, TEXT, copy_to_compute_ratio=3.0, repeats=1)


def test_every_number_is_measured_and_positive(profile: HardwareProfile, loaded: LoadedModel) -> None:
    measured = profile.measured
    assert measured is not None
    assert profile.emulated
    assert profile.link.h2d_bytes_per_s.kind == "measured"
    assert measured.tokens[0] == 1
    assert min(measured.dense_ns + measured.experts_ns + measured.cpu_experts_ns + measured.pass_overhead_ns) > 0
    assert measured.decide_ns > 0
    assert measured.samples > 20


def test_the_link_is_paced_to_the_asked_ratio_of_copy_to_compute(profile: HardwareProfile, loaded: LoadedModel) -> None:
    shape = model_shape(loaded.model, discover(loaded.model), Path(loaded.path).name)
    measured = profile.measured
    assert measured is not None
    compute_ns = 4 * (measured.dense_ns[0] + measured.experts_ns[0]) + measured.pass_overhead_ns[0]
    copy_ns = shape.bytes_per_token / profile.link.h2d_bytes_per_s.value * 1e9
    assert copy_ns / compute_ns == pytest.approx(3.0, rel=0.15)
    assert CostModel(profile, shape).is_measured


def test_a_profile_survives_its_file(profile: HardwareProfile, tmp_path: Path) -> None:
    profile.save(tmp_path / "p.toml")
    assert HardwareProfile.load(tmp_path / "p.toml") == profile


def test_the_error_band_comes_from_runs_on_this_machine(profile: HardwareProfile, loaded: LoadedModel) -> None:
    checked = with_error_band(loaded, profile, ["the night was dark"], max_new_tokens=8)
    band = checked.error_band
    assert band is not None and band.low_ratio <= 1 <= band.high_ratio
    assert band.count == len(CHECKS) and "live validation" in band.source
    assert checked.digest == profile.digest


def test_predictions_by_a_trained_network_have_a_cost_of_their_own(profile: HardwareProfile, tmp_path: Path) -> None:
    """The demo model ships with an estimator, the tiny one has none."""
    assert profile.measured is not None and profile.measured.predict_by_source_ns == {}
    demo = load_model("demo")
    (ids,) = demo.windows("the night was dark and the road was long", 64)
    costs = network_prediction_ns(demo, ids, None, None)
    assert set(costs) == {"estimator", "hybrid"} and min(costs.values()) > 0
    with pytest.raises(ModelError, match="no usable estimator"):
        network_prediction_ns(demo, ids, None, tmp_path / "none")
    measured = profile.measured.model_copy(update={"predict_by_source_ns": {"estimator": 70.0}, "predict_ns": 20.0})
    compute = MeasuredCompute(measured, 1)
    assert [compute.predict_ns(0, source) for source in ("quasi-hidden", "estimator", "")] == [20, 70, 20]
    profile.model_copy(update={"measured": measured}).save(tmp_path / "p.toml")
    again = HardwareProfile.load(tmp_path / "p.toml").measured
    assert again == measured


def test_a_text_too_short_to_calibrate_on_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ModelError, match="at least 4 tokens"):
        calibrate(loaded, "a")


def test_measured_terms_add_up_to_the_time_per_token(loaded: LoadedModel) -> None:
    run = measure(loaded, [TEXT[:30]], OffloadConfig.for_fraction(0.5), 8, sampling=Sampling(ignore_eos=True))
    metrics = run.metrics
    assert set(metrics.tpot_terms_ms) == set(TERMS)
    assert sum(metrics.tpot_terms_ms.values()) == pytest.approx(metrics.tpot_ms, rel=1e-9)
    assert metrics.tpot_ms == pytest.approx(run.token_ns.mean() / 1e6, rel=1e-9)
    assert metrics.decode_tokens == 7
    assert min(metrics.tpot_terms_ms.values()) >= 0


def test_spans_of_a_live_run_never_overlap_on_a_track(loaded: LoadedModel) -> None:
    run = measure(loaded, [TEXT[:30]], OffloadConfig.for_fraction(0.3, h2d_bytes_per_s=2e7), 8)
    assert {"link", "device", "host"} <= {span.track for span in run.spans}
    for track in ("link", "device", "host"):
        ordered = [span for span in run.spans if span.track == track and span.kind != "evict"]
        for before, after in zip(ordered, ordered[1:], strict=False):
            assert after.start_ns >= before.end_ns
    assert sum(span.kind == "evict" for span in run.spans) == run.metrics.evictions
    loads = [span for span in run.spans if span.kind == "load"]
    assert sum(span.num_bytes for span in loads) == run.metrics.bytes_loaded


def test_a_live_run_says_what_its_stalls_waited_for_and_which_prefetches_were_used(loaded: LoadedModel) -> None:
    plain = OffloadConfig.for_fraction(0.4, h2d_bytes_per_s=2e7)
    cache, prefetch = CacheConfig(policy="none", budget_ratio=0.4), PrefetchConfig(source="previous-token")
    ahead = plain.model_copy(update={"cache": cache, "prefetch": prefetch})
    run = measure(loaded, [TEXT[:30]], ahead, 12, sampling=Sampling(ignore_eos=True))
    parts = run.metrics.stall_parts_ms
    assert min(parts.values()) >= 0 and parts["demand"] > 0 and parts["late_prefetch"] > 0
    assert sum(parts.values()) == pytest.approx(run.metrics.tpot_terms_ms["stall"], rel=1e-9)
    loads = [span for span in run.spans if span.kind == "load"]
    assert all(0 <= span.submit_ns <= span.start_ns for span in loads)
    used = [span for span in loads if span.used_pass >= 0]
    assert len(used) == run.metrics.prefetch_used > 0
    assert {span.reason for span in used} == {"prefetch"} and all(span.used_pass >= span.pass_id for span in used)
    in_decode = [span for span in loads if run.passes[span.pass_id].phase != Phase.PREFILL]
    busy_ns = sum(span.end_ns - span.start_ns for span in in_decode)
    assert run.metrics.link_busy_ms == pytest.approx(busy_ns / run.metrics.decode_tokens / 1e6, rel=1e-9)
    arrows = [event for event in perfetto_document([run])["traceEvents"] if event["ph"] == "f"]
    assert len(arrows) == len(used)


def test_costs_of_a_slower_machine_are_all_longer_and_stalls_as_long(profile: HardwareProfile) -> None:
    measured = profile.measured
    assert measured is not None
    before, after = measured.model_dump(), measured.slowed(2.0).model_dump()
    same = {"model", "tokens", "samples", "stall_ns", "draft", "cpu_paced_ns", "cpu_by_threads"}
    for name, value in before.items():
        factor = 1 if name in same else 2
        if isinstance(value, dict):
            assert after[name] == {key: 2 * each for key, each in value.items()}
        elif isinstance(value, (tuple, list)):
            assert list(after[name]) == [factor * each for each in value], name
        else:
            assert after[name] == (value if name in same else factor * value), name


def test_costs_beside_the_link_are_told_from_layers_of_the_same_runs(profile: HardwareProfile) -> None:
    measured = profile.measured
    assert measured is not None and measured.probe_ns > 0
    assert len(measured.stall_ns) == len(measured.wakeup_ns) >= 2
    assert measured.stall_ns[-1] > 3 * measured.stall_ns[0], "rates of the link that differ by far"
    assert 0 <= measured.cpu_layer_ns <= measured.cpu_experts_ns[0]
    assert measured.decide_first_load_ns + measured.decide_per_load_ns > 0


def test_drafting_and_threads_are_measured_and_predict_speculative_passes(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = Drafting("draft", GAMMA, half_right(loaded.model))
    options = {"drafting": drafting, "copy_to_cpu_ratio": 2.0, "cpu_threads": (2,)}
    ran_with: set[int] = set()
    real = host_experts.run_pairs
    monkeypatch.setattr(host_experts, "run_pairs", lambda *a: ran_with.add(torch.get_num_threads()) or real(*a))
    profile = calibrate(loaded, TEXT, copy_to_compute_ratio=3.0, repeats=1, **options)
    measured = profile.measured
    assert ran_with == {1, 2} and measured is not None and measured.cpu_threads == (1, 2)
    assert min(measured.cpu_by_threads[0].cpu_experts_ns) > 0
    assert measured is not None and measured.draft is not None
    assert measured.draft.drafts == (1, GAMMA) and measured.draft.kind == "draft"
    assert 0 < measured.draft.drafting_ns[0] < measured.draft.drafting_ns[1] and min(measured.draft.overhead_ns) > 0
    assert measured.plan_ns > 0 and measured.decide_utility_ns >= 0
    profile.save(tmp_path / "p.toml")
    assert HardwareProfile.load(tmp_path / "p.toml") == profile
    shape = model_shape(loaded.model, discover(loaded.model), Path(loaded.path).name)
    costs = CostModel(profile, shape)
    settings = drafting.settings
    assert settings.weight_bytes > 0, "what the draft model weighs goes into the trace"
    assert costs.drafting_ns(settings, GAMMA) == round(measured.draft.drafting_ns[1]) and not costs.drafting_ns(
        settings, 0
    )
    assert costs.verify_overhead_ns(settings, GAMMA + 1) == round(measured.draft.overhead_ns[1])
    other = settings.model_copy(update={"kind": "another"})
    sheet = settings.weight_bytes / profile.device.memory_bytes_per_s.value * 1e9
    assert costs.drafting_ns(other, 2) == pytest.approx(2 * sheet, rel=0.01), "of another draft the data sheet's"
    device = DeviceConfig.for_machine(profile)
    assert device.cpu_expert_ns == pytest.approx(costs.copy_ns(shape.expert_bytes[0]) / 2, rel=0.01)
    paced_ns = costs.compute.cpu_experts_ns(0, 1, 2, 2)
    assert paced_ns >= 2 * device.cpu_expert_ns - 1


def test_prompt_look_up_is_measured_where_it_finds_something_to_draft(
    profile: HardwareProfile, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that repeats nothing gives n-gram look-up nothing, so each is said several times."""
    assert profile.measured is not None
    monkeypatch.setattr(draft_costs, "_TOKENS", 20)
    (ids,) = loaded.windows(TEXT, 64)
    drafting = Drafting(PROMPT_LOOKUP, GAMMA)
    found = measure_draft_costs(loaded, ids, drafting, profile.measured)
    assert (found.draft.kind, found.draft.drafts) == (PROMPT_LOOKUP, (1, GAMMA))
    assert min(found.draft.drafting_ns) > 0 and min(found.draft.overhead_ns) > 0 and found.plan_ns > 0
    (few,) = loaded.windows(TEXT[:14], 64)
    with pytest.raises(ModelError, match="prompt-lookup never drafted 60 tokens"):
        measure_draft_costs(loaded, few, Drafting(PROMPT_LOOKUP, 60), profile.measured)


def test_an_emulated_cpu_is_as_slow_as_it_was_told(loaded: LoadedModel) -> None:
    device = {"h2d_bytes_per_s": 1e9, "latency_ns": 0, "cpu_expert_ns": 2_000_000}
    config = parse_config({"cache": {"budget_ratio": 0.5}, "cpu": {"layers": "all"}, "device": device})
    with offloaded(loaded.model, config) as engine:
        loaded.generate(loaded.encode("the night was dark", 3), 3, Sampling(ignore_eos=True), 0)
        spans = [layer.cpu_ns for record in engine.passes[1:] for layer in record.layers]
    assert len(spans) == 2 * engine.shape.num_moe_layers
    for span in spans:
        assert span is not None and span[1] - span[0] >= 2_000_000 * engine.shape.top_k
