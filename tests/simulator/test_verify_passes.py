"""Verify passes in replay: output tokens, drafting time, and when speculative decoding wins or loses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator import simulate
from tests.simulator.builders import make_config, make_hardware, make_shape, trace_of
from trace_capture.rewindow import rewindow
from trace_capture.synthetic import synthetic_trace
from trace_capture.trace import DraftSettings, Phase


def test_time_per_token_counts_output_and_not_rejected_drafts() -> None:
    """Two verify passes of four rows, of which three and one were accepted: four output tokens in all, and each of
    the drafts of known size costs its reading and a launch."""
    shape = make_shape(layers=2, experts=8, top_k=2)
    rows = [[[0, 1], [2, 3]]] * 4
    trace = trace_of(shape, [(Phase.PREFILL, rows), (Phase.VERIFY, rows), (Phase.VERIFY, rows)])
    trace.accepted[[7, 9, 10, 11]] = False
    draft = DraftSettings(kind="model", gamma=3, weight_bytes=20_000)
    trace = replace(trace, info=trace.info.model_copy(update={"draft": draft}))
    run = simulate(trace, make_hardware(launch_ns=50.0), make_config(budget_ratio=1.0))
    metrics = run.metrics
    assert (metrics.decode_tokens, metrics.drafted_tokens, metrics.accepted_drafts) == (4, 6, 2)
    assert metrics.tpot_ms == pytest.approx(run.token_ns.sum() / 4 / 1e6, rel=1e-12)
    assert metrics.tokens_per_s == pytest.approx(4e9 / run.token_ns.sum())
    assert sum(metrics.tpot_terms_ms.values()) == pytest.approx(metrics.tpot_ms, rel=1e-12)
    assert metrics.tpot_terms_ms["drafting"] == pytest.approx(2 * 3 * (20_000 / 1e10 * 1e9 + 50) / 4 / 1e6)
    first, second = run.token_ns.tolist()
    per_token_ns = [first / 3] * 3 + [second]
    assert metrics.tpot_p90_ms == pytest.approx(np.percentile(per_token_ns, 90) / 1e6)
    assert run.info.bounds["compute_ms"] <= metrics.tpot_ms * (1 + 1e-12)
    assert not any("drafting takes no time" in note for note in run.info.notes)


def test_speculative_decoding_loses_where_drafts_are_rejected_and_wins_where_they_are_kept() -> None:
    """On an offloaded model a verify pass loads the union of its tokens' experts: with no draft kept it costs that for
    one token, and with all kept the union is shared by nine."""
    shape = make_shape(layers=4, experts=64, top_k=4, expert_bytes=100_000)
    plain = synthetic_trace(shape, 1, 4, 200, reuse_ratio=0.4, skew=0.5, predictor_recall=0.5, seed=0)
    hardware, config = make_hardware(), make_config(budget_ratio=0.25)
    none, kept = (simulate(rewindow(plain, 8, ratio), hardware, config, bounds=False).metrics for ratio in (0.0, 1.0))
    alone = simulate(plain, hardware, config, bounds=False).metrics
    assert none.decode_tokens == kept.decode_tokens == alone.decode_tokens
    assert none.tpot_ms > 2 * alone.tpot_ms
    assert kept.tpot_ms < 0.9 * alone.tpot_ms


def test_a_re_windowed_trace_says_so_beside_its_figures() -> None:
    shape = make_shape(layers=2, experts=16, top_k=2)
    plain = synthetic_trace(shape, 1, 2, 20, reuse_ratio=0.4, skew=0.5, predictor_recall=0.5, seed=0)
    run = simulate(rewindow(plain, 4, 0.5), make_hardware(), make_config(budget_ratio=0.5), bounds=False)
    assert any("where rejected drafts are routed is assumed" in note for note in run.info.notes)
    assert any("drafting takes no time" in note for note in run.info.notes)
