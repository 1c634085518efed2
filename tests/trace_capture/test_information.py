"""What speculative counts tell: the binomial reference, counts by hand, and real locality against independence."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.simulator.builders import decode_trace, make_shape
from trace_capture.errors import TraceError
from trace_capture.information import binomial_information, speculative_information
from trace_capture.rewindow import rewindow
from trace_capture.synthetic import synthetic_trace


def test_binomial_reference_is_the_published_one() -> None:
    """8 of 128 experts: 0.337 bits decoding, 1.409 at 8 drafts, and three times the signal to noise."""
    expected = {0: 0.337, 3: 0.882, 4: 1.012, 7: 1.324, 8: 1.409, 15: 1.859}
    for gamma, bits in expected.items():
        assert binomial_information(gamma, 1 / 16)[0] == pytest.approx(bits, abs=5e-4)
        gain = binomial_information(gamma, 1 / 16)[1] / binomial_information(0, 1 / 16)[1]
        assert gain == pytest.approx(math.sqrt(gamma + 1))


def test_counts_by_hand() -> None:
    """Experts 0, 0, 1, 0 of two, top-1. Windows of two tokens with one behind: (0 0)1 and (0 1)0."""
    shape = make_shape(layers=1, experts=2, top_k=1)
    trace = decode_trace(shape, [[[0]], [[0]], [[1]], [[0]]])
    row = speculative_information(trace, [1])[0]
    assert row.windows == 2
    # counts of experts (0, 1): (2, 0) and (1, 1); so 0, 1, 1, 2
    assert row.entropy_bits == pytest.approx(1.5)
    assert row.signal_to_noise == pytest.approx(1 / math.sqrt(0.5))
    # next uses: count 2 -> 0, count 0 -> 1, count 1 -> 1 and 0; of 1 bit, half is left open
    assert row.foresight_bits == pytest.approx(0.5)


def test_independent_even_tokens_give_the_binomial_figures_and_foresee_nothing() -> None:
    shape = make_shape(layers=2, experts=32, top_k=2)
    random = np.random.default_rng(0)
    tokens = [[random.permutation(32)[:2].tolist() for _ in range(2)] for _ in range(1500)]
    for row in speculative_information(decode_trace(shape, tokens), [0, 2, 8]):
        assert row.entropy_bits == pytest.approx(row.binomial_entropy_bits, rel=0.02)
        assert row.signal_to_noise == pytest.approx(row.binomial_signal_to_noise, rel=0.02)
        assert row.foresight_bits < 0.002


def test_alike_tokens_gain_less_ratio_but_their_counts_foresee_more_than_one_token_does() -> None:
    shape = make_shape(layers=2, experts=32, top_k=2)
    trace = synthetic_trace(shape, 2, 1, 600, reuse_ratio=0.4, skew=1.5, predictor_recall=0.5, seed=0)
    rows = speculative_information(trace, range(9))
    assert all(later.entropy_bits > before.entropy_bits for before, later in zip(rows, rows[1:], strict=False))
    gain = rows[8].signal_to_noise / rows[0].signal_to_noise
    assert 1.2 < gain < 2.5 < 3.0
    assert rows[4].foresight_bits > 1.1 * rows[0].foresight_bits


def test_verify_passes_count_by_the_tokens_that_were_kept() -> None:
    shape = make_shape(layers=2, experts=32, top_k=2)
    trace = synthetic_trace(shape, 2, 1, 100, reuse_ratio=0.4, skew=1.0, predictor_recall=0.5, seed=0)
    assert speculative_information(rewindow(trace, 4, 0.5), [3]) == speculative_information(trace, [3])


def test_sequences_that_are_too_short_are_named() -> None:
    shape = make_shape(layers=1, experts=4, top_k=1)
    with pytest.raises(TraceError, match="no sequence of the trace has 10 generated tokens in a row"):
        speculative_information(decode_trace(shape, [[[0]]] * 9), [8])
