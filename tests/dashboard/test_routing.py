"""The routing page's numbers and figures: each against the library or a slow and obvious count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dashboard import routing_figures, routing_view
from dashboard.routing_view import layers_view, pairs_view, reuse_view, strip_view
from trace_capture.statistics import (
    coactivation,
    consecutive_overlap,
    expert_load,
    load_entropy_ratio,
    lru_hit_curve,
    num_lookups,
)
from trace_capture.trace import NO_EXPERT, Trace


@pytest.fixture(scope="module")
def predicting(trace: Trace) -> Trace:
    """Two predictors: one that always names the truth, and one that names the first expert right from layer 1 on."""
    half = trace.experts.copy()
    half[:, :, 1] = (half[:, :, 1] + 1) % 16
    half[:, :, 1] = np.where(np.isin(half[:, :, 1], half[:, :, 0]), half[:, :, 1], half[:, :, 1])
    half[:, 0] = NO_EXPERT
    return replace(trace, predicted={"oracle": trace.experts.copy(), "<b>half": half})


def test_layers_are_those_of_the_library(predicting: Trace) -> None:
    view = layers_view(predicting)
    np.testing.assert_array_equal(view.entropy_ratio, load_entropy_ratio(expert_load(predicting)))
    np.testing.assert_array_equal(view.overlap, consecutive_overlap(predicting))
    assert view.recall["oracle"].tolist() == [1.0] * 6 and np.isnan(view.recall["<b>half"][0])
    assert "oracle names 100.0 % of the true experts" in view.recall_sentence
    figure = routing_figures.entropy(view)
    assert figure.data[0].y == pytest.approx(view.entropy_ratio * 100)
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("decoder layer", "share (%)")
    recall = routing_figures.predictability(view)
    assert [line.name for line in recall.data] == ["&lt;b&gt;half", "oracle", "repeating the token before"]
    assert len({(line.line.color, line.line.dash, line.marker.symbol) for line in recall.data}) == 3
    assert recall.data[1].y == pytest.approx([100.0] * 6)


def test_without_predictions_the_page_says_how_to_get_them(trace: Trace) -> None:
    figure = routing_figures.predictability(layers_view(trace))
    assert not figure.data and "--predict" in figure.layout.annotations[0].text.replace("<br>", " ")


def test_the_strip_shows_each_token(trace: Trace) -> None:
    view = strip_view(trace, 3, 10, 30)
    assert view.shares is not None and view.shares.shape == (16, 20) and view.tokens_per_column == 1
    for column in range(20):
        assert sorted(np.flatnonzero(view.shares[:, column])) == sorted(trace.experts[10 + column, 3].tolist())
    figure = routing_figures.strip(view)
    assert figure.data[0].x[0] == 10 and figure.layout.xaxis.title.text == "token of the trace"
    assert "decoder layer 3" in figure.layout.yaxis.title.text


def test_a_long_strip_is_gathered_and_keeps_its_counts(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_view, "MAX_STRIP_COLUMNS", 10)
    view = strip_view(trace, 0, 0, 999)
    assert view.shares is not None and view.tokens_per_column == 6 and view.shares.shape == (16, 9)
    sizes = np.array([6] * 9)
    assert (view.shares * sizes).sum(axis=1) == pytest.approx(expert_load(trace)[0])
    assert "Each column is 6 tokens" in view.sentence


def test_hit_curves_are_those_of_the_library_and_belady_is_above(trace: Trace) -> None:
    for layer in (0, 5):
        view = reuse_view(trace, layer)
        assert view.lru_hits is not None and view.perfect_hits is not None and view.distances is not None
        lookups = num_lookups(trace)[layer]
        assert view.num_lookups == lookups == view.distances.sum() + view.first_lookups
        assert view.lru_hits * lookups == pytest.approx(lru_hit_curve(trace)[layer])
        assert (view.perfect_hits >= view.lru_hits).all() and (view.perfect_hits > view.lru_hits).any()
        assert view.perfect_hits[-1] == view.lru_hits[-1]
        figure = routing_figures.hit_curves(view)
        assert [line.name for line in figure.data] == ["perfect eviction (Belady)", "LRU"]
        assert figure.data[1].y == pytest.approx(view.lru_hits * 100)
        bars = routing_figures.reuse(view)
        assert sum(bars.data[0].y) + sum(bars.data[1].y) == pytest.approx(100)


def test_a_walk_is_bounded_and_says_so(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_view, "MAX_LOOKUPS", 20)
    view = reuse_view(replace(trace, token_id=trace.token_id + 1), 2)
    assert view.num_lookups == 20 and "the first 20 are counted" in view.sentence


def test_pairs_are_shares_and_lifts(trace: Trace) -> None:
    view = pairs_view(trace, 4)
    assert view.shares is not None and view.lift is not None
    counts = coactivation(trace, 4)
    assert np.isnan(np.diag(view.shares)).all()
    assert view.shares[2, 7] == pytest.approx(counts[2, 7] / trace.num_tokens)
    busy = np.argsort(np.diag(counts))[-2:]
    expected = np.diag(counts)[busy].prod() / trace.num_tokens
    assert view.lift[busy[0], busy[1]] == pytest.approx(counts[busy[0], busy[1]] / expected)
    assert routing_figures.pairs(view).data[0].z[2][7] == pytest.approx(view.shares[2, 7] * 100)


@pytest.mark.parametrize("dark", [False, True])
def test_no_trace_says_what_to_do(dark: bool) -> None:
    for figure in (
        routing_figures.entropy(layers_view(None), dark=dark),
        routing_figures.predictability(layers_view(None), dark=dark),
        routing_figures.strip(strip_view(None, 0, 0, 9), dark=dark),
        routing_figures.reuse(reuse_view(None, 0), dark=dark),
        routing_figures.hit_curves(reuse_view(None, 0), dark=dark),
        routing_figures.pairs(pairs_view(None, 0), dark=dark),
    ):
        assert not figure.data and "moe-studio capture" in figure.layout.annotations[0].text.replace("<br>", " ")


def test_a_layer_without_tokens_is_said_not_drawn(trace: Trace) -> None:
    experts = trace.experts.copy()
    experts[:, 5] = NO_EXPERT
    partly = replace(trace, experts=experts)
    assert "choose another layer" in reuse_view(partly, 5).empty
    assert "choose another layer" in pairs_view(partly, 99).empty
    assert strip_view(partly, 5, 0, 9).shares.sum() == 0  # type: ignore[union-attr]
