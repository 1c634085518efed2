"""Quality of 'hot in the next pass': figures counted by hand, and the speculative signal against the ablations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from simulator.forecast import Forecasts, collect_forecasts, compare_signals, forecast_quality
from simulator.policies.utility import AutoregressiveUtility, make_utility_signal
from tests.simulator.builders import make_shape, trace_of
from trace_capture.errors import TraceError
from trace_capture.rewindow import rewindow
from trace_capture.synthetic import synthetic_trace
from trace_capture.trace import Phase


def test_figures_are_those_counted_by_hand() -> None:
    forecasts = Forecasts(np.array([[[2, 1, 0, 0, 1]]]), np.array([[[3, 0, 1, 0, 2]]]))
    quality = forecast_quality(forecasts, hot_frequency=2)
    assert quality.accuracy_ratio == pytest.approx(4 / 5)  # only expert 1 is called hot and is not
    assert quality.precision_ratio == pytest.approx(2 / 3)
    assert quality.recall_ratio == 1 and quality.hot_ratio == pytest.approx(2 / 5)
    strict = forecast_quality(forecasts, hot_frequency=2, hot_state=3)
    assert math.isnan(strict.precision_ratio) and strict.recall_ratio == 0 and strict.f1_ratio == 0


def test_a_forecast_is_made_before_the_pass_and_sequences_start_anew() -> None:
    shape = make_shape(layers=1, experts=4, top_k=1)
    passes = [
        (Phase.PREFILL, [[[3]]]),
        (Phase.DECODE, [[[0]]]),
        (Phase.VERIFY, [[[1]], [[2]]]),
        (Phase.DECODE, [[[2]]]),
        (Phase.DECODE, [[[3]]]),
        (Phase.DECODE, [[[0]]]),
    ]
    trace = trace_of(shape, passes, [0, 0, 0, 0, 1, 1])
    trace.accepted[3] = False  # the second row of the verify pass: the ablation has not seen expert 2
    forecasts = collect_forecasts(trace, lambda: AutoregressiveUtility(1, 4, 1))
    assert forecasts.states[0].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    assert forecasts.frequencies[0].tolist() == [[0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0]]
    drafts = collect_forecasts(trace, lambda: make_utility_signal("speculative", "fixed", 4, 0, [2]))
    assert drafts.states[0].tolist() == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


def test_with_real_locality_the_speculative_signal_is_clearly_better_than_the_autoregressive_one() -> None:
    """Skewed and sticky routing at 8 drafts with acceptance 0.8. Boundaries that follow the workload find more
    of the experts that are used at all than the released ones."""
    shape = make_shape(layers=4, experts=64, top_k=4)
    plain = synthetic_trace(shape, 2, 1, 300, reuse_ratio=0.5, skew=1.5, predictor_recall=0.5, seed=0)
    trace = rewindow(plain, 8, 0.8)
    for hot_frequency in (1, 2, 3):
        quality = compare_signals(trace, 8, 16, hot_frequency)
        ours, plainly = quality["speculative (fluctuation)"], quality["autoregressive"]
        assert ours.f1_ratio > plainly.f1_ratio + 0.1
        assert ours.recall_ratio > plainly.recall_ratio + 0.12
        if hot_frequency == 1:
            assert ours.f1_ratio > quality["speculative (fixed)"].f1_ratio + 0.1


def test_without_locality_no_signal_foresees_anything() -> None:
    """Even, memoryless routing: what was hot says nothing, and the figures must not pretend that it does."""
    shape = make_shape(layers=2, experts=64, top_k=4)
    trace = rewindow(
        synthetic_trace(shape, 1, 1, 900, reuse_ratio=4 / 64, skew=0.0, predictor_recall=0.5, seed=1), 8, 1.0
    )
    for name, quality in compare_signals(trace, 8, 16, 2).items():
        if not math.isnan(quality.precision_ratio):  # it called nothing hot
            assert quality.precision_ratio == pytest.approx(quality.hot_ratio, abs=0.08), name


def test_a_trace_without_two_passes_is_refused() -> None:
    shape = make_shape(layers=1, experts=4, top_k=1)
    with pytest.raises(TraceError, match="no sequence with two decode or verify passes"):
        collect_forecasts(trace_of(shape, [(Phase.DECODE, [[[0]]])]), lambda: AutoregressiveUtility(1, 4, 1))
