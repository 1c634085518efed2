"""Runs and traces as numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dashboard import views
from dashboard.data import NamedProfile, NamedRun, Snapshot, Workspace
from dashboard.summary import summary_cards
from dashboard.texts import (
    MISSING,
    format_bytes,
    format_ms,
    format_number,
    format_percent,
    format_times,
    plural,
    short_digest,
)
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Run
from trace_capture.trace import NO_EXPERT, Trace

MakeRun = Callable[..., Run]


def named(*runs: Run) -> list[NamedRun]:
    return [NamedRun(f"run{place}", run) for place, run in enumerate(runs)]


def test_predicted_and_measured_of_one_label_share_a_row(make_run: MakeRun) -> None:
    slow, slow_real = make_run("on-demand", hit_every=1), make_run("on-demand", "measured", hit_every=1, scale=1.05)
    fast, fast_real = make_run("tuned", hit_every=5), make_run("tuned", "measured", hit_every=5, scale=1.2)
    view = views.compare(named(slow, fast, fast_real, slow_real))
    assert [row.label for row in view.rows] == ["tuned", "on-demand"]
    tuned, on_demand = view.rows
    assert tuned.predicted_tpot_ms == fast.metrics.tpot_ms
    assert tuned.measured_tpot_ms == fast_real.metrics.tpot_ms
    assert tuned.error_ratio == pytest.approx(1 / 1.2 - 1, abs=1e-4) and tuned.is_inside_band is False
    assert on_demand.error_ratio == pytest.approx(1 / 1.05 - 1, abs=1e-4) and on_demand.is_inside_band is True
    assert tuned.measured_speedup == pytest.approx(slow_real.metrics.tpot_ms / fast_real.metrics.tpot_ms)
    assert tuned.predicted_speedup == pytest.approx(slow.metrics.tpot_ms / fast.metrics.tpot_ms)
    assert on_demand.measured_speedup == 1.0
    assert tuned.measured_hit_rate == fast_real.metrics.decode_hit_rate
    assert tuned.predicted_bytes_per_token == fast.metrics.bytes_per_token
    assert tuned.bound_ms == fast.info.bounds["max_ms"]
    assert "1 of 2 lie inside the band" in " ".join(view.sentences)


def test_missing_counterparts_stay_missing(make_run: MakeRun) -> None:
    view = views.compare(named(make_run("a"), make_run("b", "measured", hit_every=1)))
    a, b = view.rows
    assert (a.label, a.measured_tpot_ms, a.error_ratio, a.is_inside_band) == ("a", None, None, None)
    assert (b.label, b.predicted_tpot_ms, b.band, b.predicted_speedup) == ("b", None, None, None)
    assert "predicted, not measured" in view.sentences[0]
    assert "not checked" in view.sentences[1]


def test_without_a_band_nothing_is_called_inside(make_run: MakeRun) -> None:
    (row,) = views.compare(named(make_run("a", band=None), make_run("a", "measured"))).rows
    assert row.error_ratio == 0.0 and row.is_inside_band is None


def test_runs_that_share_a_label_are_kept_apart_by_file_name(make_run: MakeRun) -> None:
    view = views.compare(named(make_run("a"), make_run("a", hit_every=1), make_run("a", "measured")))
    assert [row.label for row in view.rows] == ["a", "a (run1)"]
    assert view.rows[0].measured_tpot_ms is not None and view.rows[1].measured_tpot_ms is None


def test_a_pair_of_different_traces_is_warned_about(make_run: MakeRun) -> None:
    predicted, measured = make_run("a"), make_run("a", "measured")
    other = Run(measured.info.model_copy(update={"trace_digest": "sha256:other"}), measured.token_ns)
    view = views.compare(named(predicted, other))
    assert view.rows[0].warning == "predicted and measured runs are of different traces"
    assert view.rows[0].warning in view.sentences[-1]


def test_numbers_that_are_not_finite_or_without_decode_tokens_are_missing(make_run: MakeRun) -> None:
    run = make_run("a")
    run = Run(
        run.info.model_copy(update={"metrics": run.metrics.model_copy(update={"tpot_ms": float("nan")})}), run.token_ns
    )
    none = make_run("b")
    none = Run(
        none.info.model_copy(update={"metrics": none.metrics.model_copy(update={"decode_tokens": 0})}), none.token_ns
    )
    view = views.compare(named(run, none))
    assert [row.tpot_ms for row in view.rows] == [None, None]


def test_no_runs_say_what_to_do() -> None:
    assert "moe-studio demo" in views.compare([]).empty
    assert "moe-studio demo" in views.tpot_terms([]).empty
    assert "moe-studio capture" in views.expert_load(None).empty


def test_terms_add_up_to_the_time_per_token(make_run: MakeRun) -> None:
    runs = [
        make_run("on-demand", hit_every=1),
        make_run("tuned", hit_every=5),
        make_run("tuned", "measured", hit_every=5),
    ]
    view = views.tpot_terms(named(*runs))
    assert view.labels == ("tuned, predicted", "tuned, measured", "on-demand, predicted")
    assert view.parts_ms is not None
    assert set(view.parts_ms) == {"dense", "experts", "decide", "stall", "overhead"}
    totals = np.sum(list(view.parts_ms.values()), axis=0)
    assert totals == pytest.approx([runs[1].metrics.tpot_ms, runs[2].metrics.tpot_ms, runs[0].metrics.tpot_ms])


def test_what_no_term_explains_is_named(make_run: MakeRun) -> None:
    run = make_run("a")
    terms = {"dense": run.metrics.tpot_ms * 0.9}
    run = Run(
        run.info.model_copy(update={"metrics": run.metrics.model_copy(update={"tpot_terms_ms": terms})}), run.token_ns
    )
    view = views.tpot_terms(named(run))
    assert view.parts_ms is not None
    assert view.parts_ms["unexplained"] == pytest.approx((run.metrics.tpot_ms * 0.1,))


def test_expert_load_counts_tokens(trace: Trace) -> None:
    view = views.expert_load(trace)
    assert view.shares is not None and view.shares.shape == (6, 16)
    assert view.shares.sum(axis=1) == pytest.approx([2.0] * 6)
    expected = sum(7 in row for row in trace.experts[:, 3].tolist()) / trace.num_tokens
    assert view.shares[3, 7] == pytest.approx(expected)
    assert view.uniform_share == 2 / 16
    decode = views.expert_load(trace, "decode")
    assert decode.num_tokens == 30 and views.expert_load(trace, "prefill").num_tokens == 24


def test_expert_load_leaves_rows_out_that_a_layer_did_not_route(trace: Trace) -> None:
    experts = trace.experts.copy()
    experts[:10, 5] = NO_EXPERT
    partly = replace(trace, experts=experts)
    view = views.expert_load(partly)
    assert view.shares is not None and view.shares[5].sum() == pytest.approx(2.0)


def test_a_phase_without_tokens_says_so(trace: Trace) -> None:
    prefill = trace.rows(trace.phase == 0)
    assert "no decode tokens" in views.expert_load(prefill, "decode").empty


def test_emulated_is_said_wherever_it_holds(make_run: MakeRun, hardware: HardwareProfile) -> None:
    emulated, real = make_run("a", emulated=True), make_run("b", emulated=False)
    view = views.compare(named(emulated, real))
    assert {row.label: row.emulated for row in view.rows} == {"a": True, "b": False}
    assert view.emulated and not views.compare(named(real)).emulated
    assert views.run_title(NamedRun("x", emulated)) == "a, predicted (emulated link)"
    cards = {
        card.title: card.badge
        for card in summary_cards(Snapshot(Path(), profiles=(NamedProfile("hardware.toml", hardware),)))
    }
    assert cards["Hardware"] == "emulated link"


def test_summary_cards_of_a_full_and_an_empty_folder(folder: Path) -> None:
    snapshot = Workspace(folder).read()
    cards = {card.title: card for card in summary_cards(snapshot)}
    best = snapshot.run("tuned-measured")
    assert best is not None
    assert cards["Fastest strategy"].value == f"{format_ms(best.run.metrics.tpot_ms)} / token"
    assert cards["Fastest strategy"].badge == "emulated link"
    assert "13.0 % at most over 3 strategies" in cards["Prediction error"].detail
    assert "6 layers × 16 experts, top-2; 54 tokens in 31 passes" in cards["Model"].detail
    empty = {card.title: card.value for card in summary_cards(Snapshot(Path()))}
    assert empty == {
        "Model": "unknown", "Hardware": "unknown", "Fastest strategy": "unknown", "Prediction error": "not known",
    }  # fmt: skip


def test_texts() -> None:
    assert [format_number(x) for x in (None, float("nan"), 0.1234, 1.234, 12.34, 1234.5)] == [
        MISSING, MISSING, "0.123", "1.23", "12.3", "1,234",
    ]  # fmt: skip
    assert [format_ms(x) for x in (None, 0.0123, 1.5)] == [MISSING, "12.3 µs", "1.50 ms"]
    assert [format_bytes(x) for x in (None, 12, 1.5e3, 2e6, 3e9, 4e12)] == [
        MISSING, "12 B", "1.50 kB", "2.00 MB", "3.00 GB", "4.00 TB",
    ]  # fmt: skip
    assert [format_percent(0.123), format_percent(0.1, signed=True), format_percent(None)] == [
        "12.3 %",
        "+10.0 %",
        MISSING,
    ]
    assert [format_times(2.5), format_times(None)] == ["2.50×", MISSING]
    assert [plural(1, "pass"), plural(2, "pass"), plural(1200, "run")] == ["1 pass", "2 passes", "1,200 runs"]
    assert [short_digest("sha256:0123456789abcdef"), short_digest("")] == ["0123456789ab", MISSING]
