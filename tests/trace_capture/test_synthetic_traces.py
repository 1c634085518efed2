"""Synthetic traces have the statistics that were asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trace_capture import NO_EXPERT, Phase, Trace
from trace_capture.errors import ConfigError
from trace_capture.statistics import consecutive_overlap, expert_load, load_entropy_ratio, predictor_recall
from trace_capture.synthetic import PREDICTOR, synthetic_trace

OPTIONS: dict[str, Any] = {"reuse_ratio": 0.5, "skew": 0.8, "predictor_recall": 0.85, "seed": 3}


def draw(make: Any, experts: int = 32, top_k: int = 4, prompts: int = 2, decode: int = 300, **options: Any) -> Trace:
    return synthetic_trace(
        make.shape(num_layers=4, num_experts=experts, top_k=top_k), prompts, 10, decode, **(OPTIONS | options)
    )


@pytest.mark.parametrize("reuse", [0.0, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("skew", [0.0, 1.5])
def test_consecutive_tokens_share_what_was_asked(make: Any, reuse: float, skew: float) -> None:
    overlap = consecutive_overlap(draw(make, reuse_ratio=reuse, skew=skew))
    assert overlap.mean() == pytest.approx(reuse, abs=0.02)


@pytest.mark.parametrize("recall", [0.0, 0.6, 1.0])
def test_predictor_recalls_what_was_asked_beside_the_first_layer(make: Any, recall: float) -> None:
    trace = draw(make, predictor_recall=recall)
    measured = predictor_recall(trace)[PREDICTOR]
    assert np.isnan(measured[0]) and (trace.predicted[PREDICTOR][:, 0] == NO_EXPERT).all()
    np.testing.assert_allclose(measured[1:], recall, atol=0.04)


def test_skew_concentrates_the_load(make: Any) -> None:
    ratios = [
        load_entropy_ratio(expert_load(draw(make, skew=skew, reuse_ratio=0.2))).mean() for skew in (0.0, 0.7, 1.5)
    ]
    assert ratios[0] > 0.98
    assert ratios[0] - 0.03 > ratios[1] > ratios[2] + 0.03


def test_layers_prefer_different_experts(make: Any) -> None:
    favourites = np.argmax(expert_load(draw(make, skew=2.0)), axis=1)
    assert len(set(favourites.tolist())) > 1


def test_equal_seeds_give_equal_traces(make: Any) -> None:
    assert draw(make).digest == draw(make).digest
    assert draw(make).digest != draw(make, seed=4).digest


def test_few_experts_share_at_least_what_they_must(make: Any) -> None:
    overlap = consecutive_overlap(draw(make, experts=4, top_k=3, reuse_ratio=0.0))
    assert overlap.mean() == pytest.approx(2 / 3)
    assert consecutive_overlap(draw(make, experts=4, top_k=4)).tolist() == [1.0] * 4


def test_passes_weights_and_provenance(make: Any) -> None:
    trace = draw(make, decode=5)
    assert [p.phase for p in trace.passes] == [Phase.PREFILL, *[Phase.DECODE] * 5] * 2
    assert trace.passes[6].sequence == 1 and trace.position[trace.passes[6].start] == 0
    assert (np.diff(trace.weights, axis=2) <= 0).all()
    np.testing.assert_allclose(trace.weights.astype(np.float64).sum(axis=2), 1.0, atol=0.01)
    assert trace.info.source == "synthetic"
    assert trace.info.options["reuse_ratio"] == 0.5 and trace.info.options["seed"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": 0}, "num_prompts = 0; give at least 1"),
        ({"decode": -1}, "decode_tokens = -1; give at least 0"),
        ({"reuse_ratio": 1.2}, "reuse_ratio = 1.2; give a share from 0 to 1"),
        ({"predictor_recall": float("nan")}, "predictor_recall = nan"),
        ({"skew": -1.0}, "skew = -1.0"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_impossible_requests_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw(make, **options)
