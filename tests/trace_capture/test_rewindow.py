"""Verify passes made out of a decoded trace: tokens kept, acceptance as asked, locality of rejected drafts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.builders import decode_trace, make_shape, mixed_trace, trace_of
from trace_capture.errors import ConfigError, TraceError
from trace_capture.rewindow import acceptance_counts, rewindow
from trace_capture.statistics import consecutive_overlap
from trace_capture.synthetic import synthetic_trace
from trace_capture.trace import NO_EXPERT, Phase, Trace


@pytest.fixture(scope="module")
def plain() -> Trace:
    """Two sequences of sticky, skewed routing with a predictor that is right in four of five."""
    shape = make_shape(layers=3, experts=32, top_k=4)
    return synthetic_trace(shape, 2, 5, 250, reuse_ratio=0.5, skew=0.8, predictor_recall=0.8, seed=1)


def test_kept_tokens_are_those_of_the_trace_in_order(plain: Trace) -> None:
    for gamma, ratio in ((0, 0.5), (2, 0.0), (4, 0.6), (8, 1.0)):
        made = rewindow(plain, gamma, ratio)
        kept = made.rows(made.accepted)
        for name in ("sequence", "position", "token_id", "experts", "weights"):
            assert np.array_equal(getattr(kept, name), getattr(plain, name)), name
        assert np.array_equal(kept.predictions("quasi-hidden"), plain.predictions("quasi-hidden"))


def test_passes_hold_one_certain_token_and_the_drafts_that_are_left_room_for(plain: Trace) -> None:
    made = rewindow(plain, 4, 0.6)
    assert made.info.draft is not None and made.info.draft.gamma == 4
    ends = {sequence: int(plain.position[plain.sequence == sequence].max()) for sequence in plain.sequences()}
    for item in made.passes:
        if item.phase == Phase.PREFILL:
            continue
        rows, accepted = item.stop - item.start, made.accepted[item.start : item.stop]
        assert rows == 1 + min(4, ends[item.sequence] - int(made.position[item.start]))
        assert item.phase == (Phase.VERIFY if rows > 1 else Phase.DECODE)
        assert accepted[0] and not (accepted[1:] & ~accepted[:-1]).any()
        positions = made.position[item.start : item.stop]
        assert (np.diff(positions) == 1).all()


def test_no_draft_gives_the_trace_back(plain: Trace) -> None:
    made = rewindow(plain, 0, 0.5)
    assert np.array_equal(made.pass_id, plain.pass_id) and np.array_equal(made.phase, plain.phase)
    assert made.info.draft is None


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.8, 1.0])
def test_passes_emit_as_many_tokens_as_the_acceptance_ratio_gives(plain: Trace, ratio: float) -> None:
    """(1 - a^(G+1)) / (1 - a) tokens per pass, the last pass of a sequence aside."""
    gamma = 4
    counts = acceptance_counts(rewindow(plain, gamma, ratio))
    expected = gamma + 1 if ratio == 1 else (1 - ratio ** (gamma + 1)) / (1 - ratio)
    assert counts.tokens_per_pass == pytest.approx(expected, rel=0.08)


def test_rejected_drafts_are_as_alike_as_neighbours_of_the_trace(plain: Trace) -> None:
    """Among themselves exactly so; the first of a pass is chosen to be nearer to the row before it than chance is."""
    made = rewindow(plain, 4, 0.3)
    rejected = np.flatnonzero(~made.accepted)
    assert len(rejected) > 600
    is_first = made.accepted[rejected - 1]
    overlap = (made.experts[rejected][:, :, :, None] == made.experts[rejected - 1][:, :, None, :]).any(axis=3)
    among = overlap[~is_first].mean(axis=(0, 2))
    assert among == pytest.approx(consecutive_overlap(plain), abs=0.05)
    shuffled = (made.experts[rejected][:, :, :, None] == made.experts[rejected[::-1]][:, :, None, :]).any(axis=3)
    assert overlap[is_first].mean() > shuffled.mean() + 0.1
    for layer in range(3):
        load = np.bincount(plain.experts[:, layer].ravel(), minlength=32) / (plain.num_tokens * 4)
        made_load = np.bincount(made.experts[rejected, layer].ravel(), minlength=32) / (len(rejected) * 4)
        assert np.abs(load - made_load).sum() < 0.35
    assert (made.token_id[rejected] == -1).all()


def test_rejected_drafts_come_from_earlier_tokens_of_their_sequence() -> None:
    """Each token of this trace names its own sequence and position in the experts of its two layers."""
    shape = make_shape(layers=2, experts=64, top_k=1)
    tokens = [[[sequence], [step]] for sequence in (0, 1) for step in range(60)]
    passes = [(Phase.DECODE, [token]) for token in tokens]
    made = rewindow(trace_of(shape, passes, [0] * 60 + [1] * 60), 3, 0.0, seed=5)
    rejected = np.flatnonzero(~made.accepted)
    start = {item.pass_id: int(made.position[item.start]) for item in made.passes}
    late = [row for row in rejected if start[int(made.pass_id[row])] >= 40]
    assert len(late) > 50
    for row in late:
        assert int(made.experts[row, 0, 0]) == int(made.sequence[row])
        assert int(made.experts[row, 1, 0]) < start[int(made.pass_id[row])]
    early = [row for row in rejected if row not in late]
    for row in early:
        own = int(made.experts[row, 0, 0]) == int(made.sequence[row])
        first = start[int(made.pass_id[row])]
        assert not (own and first <= int(made.experts[row, 1, 0]) <= first + 3)


def test_nothing_of_the_coming_token_leaks_into_the_first_rejected_draft() -> None:
    """It shares with the token that came instead no more than what both share with the token before."""
    shape = make_shape(layers=2, experts=64, top_k=4)
    plain = synthetic_trace(shape, 1, 1, 900, reuse_ratio=0.5, skew=0.0, predictor_recall=0.5, seed=2)
    made = rewindow(plain, 1, 0.0)
    first = np.flatnonzero(~made.accepted)
    real = {int(at): row for at, row in zip(plain.position, plain.experts, strict=True)}
    coming = np.stack([real[int(made.position[at])] for at in first])
    shared = (made.experts[first][:, :, :, None] == coming[:, :, None, :]).any(axis=3).mean()
    chance = 0.5 * 0.5 + 0.5 * 0.5 * 4 / 60
    assert shared < chance + 0.03


def test_predictions_of_rejected_drafts_are_as_good_as_those_of_the_trace(plain: Trace) -> None:
    made = rewindow(plain, 4, 0.3)
    rejected = np.flatnonzero(~made.accepted)
    guessed, true = made.predictions("quasi-hidden")[rejected], made.experts[rejected]
    assert (guessed[:, 0] == NO_EXPERT).all()
    recall = (true[:, 1:, :, None] == guessed[:, 1:, None, :]).any(axis=3).mean()
    assert recall == pytest.approx(0.8, abs=0.03)


def test_equal_seeds_repeat_and_others_do_not(plain: Trace) -> None:
    one, same, other = (rewindow(plain.rows(plain.position < 60), 4, 0.5, seed) for seed in (3, 3, 4))
    assert one.digest == same.digest != other.digest


def test_captured_verify_passes_are_re_windowed_by_what_they_kept() -> None:
    trace = mixed_trace(make_shape(experts=16, top_k=3))
    made = rewindow(rewindow(trace, 5, 0.4), 2, 0.9)
    kept = made.rows(made.accepted)
    assert np.array_equal(kept.experts, trace.experts)


def test_few_experts_leave_no_other_choice_and_still_give_a_valid_trace() -> None:
    """Top-3 of 4: any two tokens share two experts."""
    shape = make_shape(layers=2, experts=4, top_k=3)
    plain = synthetic_trace(shape, 1, 2, 50, reuse_ratio=0.7, skew=1.0, predictor_recall=0.6, seed=0)
    assert rewindow(plain, 3, 0.2).num_tokens > plain.num_tokens


def test_wrong_arguments_and_traces_are_named(plain: Trace) -> None:
    with pytest.raises(ConfigError, match="gamma is -1"):
        rewindow(plain, -1, 0.5)
    with pytest.raises(ConfigError, match="acceptance ratio is 1.5"):
        rewindow(plain, 4, 1.5)
    shape = make_shape(layers=1, experts=4, top_k=2)
    with pytest.raises(TraceError, match="no generated token that follows another"):
        rewindow(decode_trace(shape, [[[0, 1]]]), 4, 0.5)
