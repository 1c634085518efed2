"""The tuner: whole parts held out, a winner that is confirmed, a promise that a replay keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator import simulate, tune
from simulator.config_file import load_config, save_config
from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.config import DeviceConfig
from simulator.tune import NOT_WORTH_TRYING, split_trace
from tests.simulator.builders import (
    decode_trace,
    make_config,
    make_hardware,
    make_measured,
    make_shape,
    mixed_trace,
    trace_of,
)
from trace_capture.band import ErrorBand
from trace_capture.errors import ConfigError, TraceError
from trace_capture.trace import Phase, Trace

SLOW_LINK = make_hardware(bytes_per_s=1e9, latency_ns=137, issue_ns=53, wakeup_ns=71, launch_ns=211)


def skewed_trace(**fields: Any) -> Trace:
    return mixed_trace(make_shape(layers=4), seed=8, sequences=6, decode=12, **fields)


def test_last_third_of_the_sequences_is_held_out_whole() -> None:
    trace = skewed_trace()
    train, held_out = split_trace(trace)
    assert train.sequences() == [0, 1, 2, 3] and held_out.sequences() == [4, 5]
    assert train.num_tokens + held_out.num_tokens == trace.num_tokens
    two = mixed_trace(make_shape(), sequences=2)
    assert [part.sequences() for part in split_trace(two)] == [[0], [1]]


def test_single_sequence_holds_out_its_last_decode_passes_behind_the_prefill() -> None:
    trace = mixed_trace(make_shape(), sequences=1, decode=21)
    train, held_out = split_trace(trace)
    decode = [item.pass_id for item in trace.passes if item.phase != Phase.PREFILL]
    assert [item.pass_id for item in train.passes] == [0, *decode[:14]]
    assert [item.pass_id for item in held_out.passes] == [0, *decode[14:]]


@pytest.mark.parametrize(
    "trace",
    [
        decode_trace(make_shape(layers=1), [[[0, 1, 2]], [[0, 1, 3]]]),
        trace_of(make_shape(layers=1), [(Phase.PREFILL, [[[0, 1, 2]]]), (Phase.DECODE, [[[0, 1, 2]]])], [0, 1]),
    ],
)
def test_too_few_decode_passes_are_refused(trace: Trace) -> None:
    with pytest.raises(TraceError, match="decode passes"):
        tune(trace, SLOW_LINK, budget_bytes=5000)


def test_tune_finds_what_exhaustive_replay_finds() -> None:
    trace = skewed_trace()
    result = tune(trace, SLOW_LINK, budget_bytes=24_000)
    train, held_out = split_trace(trace)
    replayed = [simulate(train, SLOW_LINK, one.config).metrics.tpot_ms for one in result.candidates]
    assert replayed == [one.train_tpot_ms for one in result.candidates] == sorted(replayed)
    policies = len(CACHE_POLICIES) - len(NOT_WORTH_TRYING) - 2
    with_less = [one for one in result.candidates if "eighths of the budget" in one.config.label]
    assert len(with_less) == 2, "half and three quarters; a quarter does not hold every layer's top-3"
    assert len(result.candidates) - len(with_less) == 2 * (policies * 4 - 1), (
        "no resident in half the room, no utility without drafts, no popularity twice"
    )
    assert {one.split for one in result.candidates} == {"even", "ILP"}
    assert {one.config.prefetch.source for one in result.candidates} == {
        "none", "previous-token", "popularity", "quasi-hidden"
    }  # fmt: skip
    again = simulate(held_out, SLOW_LINK, result.config)
    assert again.metrics == result.chosen.metrics
    assert result.chosen.metrics.tpot_ms < result.baseline.metrics.tpot_ms
    assert result.runner_up is not None and result.runner_up.info.label == result.candidates[1].config.label


def test_every_candidate_keeps_the_budget() -> None:
    result = tune(skewed_trace(), SLOW_LINK, budget_bytes=25_500, scopes=("layer", "global"))
    for one in result.candidates:
        slots = one.config.cache.slots_per_layer
        assert (sum(slots) * 1000 if slots else one.config.cache.budget_bytes) <= 25_500
    assert {one.split for one in result.candidates} == {"even", "ILP", "pool"}
    assert result.chosen.spans and not result.chosen.info.emulated


def test_provenance_carries_the_promise_and_its_inputs(tmp_path: Any) -> None:
    trace = skewed_trace()
    band = ErrorBand(low_ratio=0.9, high_ratio=1.08, count=4)
    hardware = SLOW_LINK.model_copy(update={"error_band": band, "measured": make_measured()})
    device = DeviceConfig(backend="emulated", h2d_bytes_per_s=1e9)
    result = tune(trace, hardware, budget_bytes=24_000, device=device)
    origin = result.config.provenance
    assert origin is not None and result.config.device == device
    assert origin.trace_digest == trace.digest and origin.hardware_digest == hardware.digest
    assert origin.predicted_tpot_ms == result.chosen.metrics.tpot_ms
    assert origin.predicted_hit_rate == result.chosen.metrics.decode_hit_rate
    assert origin.error_band == band and origin.candidates == len(result.candidates)
    assert result.regret_ms == pytest.approx(origin.predicted_tpot_ms - result.chosen.info.bounds["max_ms"])
    assert result.regret_ms > 0
    save_config(result.config, tmp_path / "tuned.toml")
    assert load_config(tmp_path / "tuned.toml") == result.config


def test_result_is_deterministic_and_progress_counts_up() -> None:
    steps: list[tuple[int, int]] = []
    trace = skewed_trace()
    first = tune(trace, SLOW_LINK, budget_bytes=24_000, progress=lambda *step: steps.append(step))
    second = tune(trace, SLOW_LINK, budget_bytes=24_000)
    assert first.config == second.config and first.candidates == second.candidates
    total = steps[-1][1]
    assert steps == [(done, total) for done in range(1, total + 1)]
    assert total == len(first.candidates) + 3, "baseline, winner and runner-up on held-out tokens"


def test_traces_without_predictions_get_no_predicted_candidates() -> None:
    trace = skewed_trace()
    trace.predicted.clear()
    result = tune(trace, SLOW_LINK, budget_bytes=24_000)
    assert {one.config.prefetch.source for one in result.candidates} == {"none", "previous-token", "popularity"}


def test_winner_that_fails_on_held_out_tokens_gives_way_to_plain_lru() -> None:
    """Training cycles through layer 0's experts and never changes layer 1's; held out it is the other way round.
    A split that had seen the held-out part would be (4, 4)."""
    shape = make_shape(layers=2, experts=8, top_k=1)
    hot = [[[step % 5], [0]] for step in range(40)]
    cold = [[[0], [step % 4]] for step in range(80)]
    passes = [(Phase.DECODE, [token]) for token in [*hot, *cold]]
    trace = trace_of(shape, passes, [0] * 40 + [1] * 80)
    result = tune(trace, SLOW_LINK, budget_bytes=8000)
    assert result.candidates[0].config.cache.slots_per_layer == result.split.slots == (5, 1)
    assert result.config.cache == make_config(slots_per_layer=[4, 4]).cache
    assert result.chosen is result.baseline
    assert "slower than plain LRU on held-out tokens" in result.notes[0]
    assert result.config.provenance is not None
    assert result.config.provenance.predicted_tpot_ms == result.baseline.metrics.tpot_ms


def test_ilp_split_beats_the_even_one_where_layers_differ() -> None:
    """Layer 0 cycles through six experts, layer 1 always uses one: LRU needs six slots there and one here."""
    shape = make_shape(layers=2, experts=8, top_k=1)
    trace = decode_trace(shape, [[[step % 6], [7]] for step in range(60)])
    result = tune(trace, SLOW_LINK, budget_bytes=8000)
    assert result.split.slots == (6, 1)
    assert result.config.cache.slots_per_layer == (6, 1)
    assert result.chosen.metrics.decode_hit_rate > result.baseline.metrics.decode_hit_rate


def test_budget_that_holds_no_top_k_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"11,999 bytes cannot hold the top-3.*12,000"):
        tune(skewed_trace(), SLOW_LINK, budget_bytes=11_999)


def test_budget_beyond_the_device_is_noted() -> None:
    small = make_hardware(memory_bytes=20_000.0)
    result = tune(skewed_trace(), small, budget_bytes=40_000)
    assert any("the budget is more than the 20,000 bytes of toy machine" in note for note in result.notes)


def test_held_out_predictions_travel_with_their_rows() -> None:
    trace = skewed_trace()
    _, held_out = split_trace(trace)
    mask = np.isin(trace.sequence, [4, 5])
    assert np.array_equal(held_out.predicted["quasi-hidden"], trace.predicted["quasi-hidden"][mask])
