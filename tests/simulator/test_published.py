"""Predictions against published measurements: reading, what is skipped, scoring, and the errors on the open table."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runtime.cli import validation  # noqa: F401 - the verb registers itself
from runtime.cli.app import app
from simulator.validation.published import fit_published, predict_all, record_path, validate_published
from simulator.validation.published_case import expected_hit_rate
from simulator.validation.published_predict import Prediction, predict_row
from simulator.validation.published_prefill import predict_prefill_per_s
from simulator.validation.published_rows import OrderedPair, PublishedRow, read_rows
from simulator.validation.published_score import Efficiencies, Ratio, errors_of, rank
from simulator.validation.record import ValidationRecord
from trace_capture.errors import StudioError, TraceError
from trace_capture.hardware import HostProfile
from trace_capture.machine_parts import load_part

INVENTED = Path(__file__).parent / "published_invented.csv"
MEASURED = Path(__file__).parents[2].parent / "shared" / "measured"


def predicted(row: PublishedRow) -> Prediction:
    result = predict_row(row)
    assert isinstance(result, Prediction), result
    return result


@pytest.fixture(scope="module")
def rows() -> dict[str, PublishedRow]:
    return {row.id: row for row in read_rows(INVENTED)}


def test_rows_without_a_prediction_say_why() -> None:
    predictions, skipped = predict_all(read_rows(INVENTED))
    reasons = {row.id: reason for row, reason in skipped}
    assert [entry.row.id for entry in predictions] == ["I01", "I02", "I03", "I04", "I05", "I11", "I12"]
    assert set(reasons) == {"I06", "I07", "I08", "I09", "I10"}
    assert "nobody/Unheard-7x1B" in reasons["I06"]
    assert "Voodoo 2" in reasons["I07"]
    assert "storage" in reasons["I08"]
    assert reasons["I09"] == "model not named"
    assert reasons["I10"].startswith("no decode rate")


def test_missing_cells_are_assumed_aloud_and_not_counted(rows: dict[str, PublishedRow]) -> None:
    assumed = predicted(rows["I11"])
    assert {"host", "link", "precision", "placement"} <= set(assumed.assumed)
    assert assumed.ranking_only == "weight precision not given"
    assert predicted(rows["I12"]).ranking_only == "grade C: several inputs are missing"
    assert predicted(rows["I01"]).ranking_only is None


def test_cpu_experts_cost_bytes_over_the_memory_rate(rows: dict[str, PublishedRow]) -> None:
    """Twice the memory rate halves what exceeds the hand-overs, as long as the cores keep up."""
    slow = predicted(replace(rows["I03"], ram_gb_per_s=30, ram_kind="measured")).terms_ns["cpu"]
    fast = predicted(replace(rows["I03"], ram_gb_per_s=60, ram_kind="measured")).terms_ns["cpu"]
    host = load_part("host", "ddr5-6000-2ch")
    assert isinstance(host, HostProfile)
    fixed = 48 * (host.layer_dispatch_ns.value + 8 * host.expert_dispatch_ns.value)
    assert (slow - fixed) / (fast - fixed) == pytest.approx(2, rel=1e-3)


def test_settings_rank_as_their_bytes_do(rows: dict[str, PublishedRow]) -> None:
    assert predicted(rows["I02"]).per_s > predicted(rows["I01"]).per_s > predicted(rows["I03"]).per_s
    assert predicted(rows["I04"]).per_s > predicted(rows["I05"]).per_s


def test_on_demand_pays_every_active_expert_over_the_link(rows: dict[str, PublishedRow]) -> None:
    bare = 48 * 8 * 9437184 / 25e9 * 1e9
    copies = predicted(rows["I05"]).terms_ns["copies"]
    assert bare < copies < 1.2 * bare
    assert predicted(rows["I04"]).terms_ns["copies"] == pytest.approx(0.2 * copies)


def test_hit_rate_by_held_share_runs_from_none_to_all() -> None:
    assert expected_hit_rate(0.0) == 0
    assert expected_hit_rate(1.0) == 1
    assert expected_hit_rate(0.3, odds=1.0) == pytest.approx(0.3)
    assert 0.6 < expected_hit_rate(0.125) < 0.7


def test_prefill_streams_absent_experts_once_per_micro_batch(rows: dict[str, PublishedRow]) -> None:
    """Four times the micro-batch cuts the copies of a long prompt to a quarter; only the compute stays."""
    prompt = replace(rows["I10"], context_tokens=4096, offloaded_layers=48)
    small = predict_prefill_per_s(replace(prompt, setting="ubatch 512"))
    large = predict_prefill_per_s(replace(prompt, setting="ubatch 2048"))
    resident = predict_prefill_per_s(replace(prompt, setting="ubatch 2048", strategy="all_resident"))
    assert small is not None and large is not None and resident is not None
    assert 3 < large / small < 4
    assert resident > 3 * large
    assert predict_prefill_per_s(rows["I06"]) is None


def test_names_of_cards_are_not_found_inside_longer_numbers(rows: dict[str, PublishedRow]) -> None:
    assert predict_row(replace(rows["I01"], gpu="Quadro P4000")) == "no data sheet of card 'Quadro P4000'"
    assert isinstance(predict_row(replace(rows["I01"], gpu="Tesla P40")), Prediction)


def test_speculation_costs_more_than_it_yields_where_few_drafts_are_accepted(rows: dict[str, PublishedRow]) -> None:
    plain = predicted(rows["I01"]).per_s
    kept = replace(rows["I01"], strategy="speculative", speculative="MTP n_max 2, acceptance 0.95")
    lost = replace(kept, speculative="MTP n_max 4, acceptance 0.2")
    assert predicted(lost).per_s < plain < predicted(kept).per_s


def test_efficiency_weighs_sources_and_leaves_out_the_one_that_is_asked_about() -> None:
    ladder = [Ratio("a", "loud", math.log(0.2))] * 50
    fitted = Efficiencies((*ladder, Ratio("a", "x", math.log(0.8)), Ratio("a", "y", math.log(0.9))))
    assert fitted.of("a") == pytest.approx(0.8)
    assert fitted.of("a", leave_out="loud") == pytest.approx(math.sqrt(0.8 * 0.9))
    assert fitted.of("nobody's family") == pytest.approx(0.8)
    assert Efficiencies(()).of("a") == 1


def test_errors_count_twice_too_fast_and_twice_too_slow_alike() -> None:
    found = errors_of([math.log(2), -math.log(2), 0.0])
    assert found is not None
    assert found.median_abs_error == pytest.approx(1.0)
    assert errors_of([]) is None


def test_ranking_takes_strong_pairs_with_both_rates_and_no_ties() -> None:
    rates = {("a", "decode"): 2.0, ("b", "decode"): 1.0, ("c", "decode"): 1.0}
    facts = [
        OrderedPair("a", "b", "decode", True),
        OrderedPair("b", "a", "decode", True),
        OrderedPair("b", "c", "decode", True),
        OrderedPair("b", "a", "decode", False),
        OrderedPair("a", "b", "prefill", True),
    ]
    ranking = rank(facts, rates)
    assert (ranking.right, ranking.total, ranking.left_out) == (1, 3, 1)
    assert ranking.accuracy == pytest.approx(1 / 3)


def test_record_predicts_each_row_without_its_own_source_and_keeps_no_figures_of_it() -> None:
    record = fit_published(INVENTED, "test")
    predictions, _ = predict_all(read_rows(INVENTED))
    counted = [entry for entry in predictions if entry.ranking_only is None]
    assert [entry.row.id for entry in counted] == ["I01", "I02", "I03", "I04", "I05"]
    by_id = {entry.row.id: pair for entry, pair in zip(counted, record.pairs, strict=True)}
    label = by_id["I03"].details["source_group"]
    others = [pair for pair in record.pairs if pair.details["source_group"] == label]
    assert [entry.row.source_group for entry in counted].count("two") == len(others)
    pooled = sorted(pair.details["unscaled_ms"] for pair in others)[1]
    expected = math.sqrt(by_id["I03"].details["unscaled_ms"] * pooled)
    first = by_id["I01"]
    assert first.predicted_ms == pytest.approx(first.details["unscaled_ms"] / expected, rel=1e-5)
    assert {pair.measured_ms for pair in record.pairs} == {1.0} and "two" not in record.model_dump_json()


def test_command_prints_what_others_rely_on(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("id_faster,id_slower,metric,strength\nI02,I01,decode,strong\nI04,I05,decode,strong\n")
    arguments = ["validate", "--published", str(INVENTED), "--pairs", str(pairs), "--json"]
    values = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    assert values["rows_predicted"] == 7
    assert {entry["id"]: entry["reason"] for entry in values["rows_skipped"]}["I09"] == "model not named"
    assert values["ranking_accuracy"] == 1.0
    for name in ("median_abs_error", "p90_abs_error", "band_coverage"):
        assert values[name] >= 0
    row = values["rows"][0]
    assert row["id"] == "I01" and row["measured"] == 50
    assert row["low"] < row["predicted"] < row["high"]


@pytest.mark.parametrize(
    "arguments", [["--live", "--fit"], ["--published", str(INVENTED), "--out", "x.json"]], ids=["fit", "out"]
)
def test_options_that_would_do_nothing_are_refused(arguments: list[str]) -> None:
    with pytest.raises(StudioError, match="--fit"):
        CliRunner().invoke(app, ["validate", *arguments], catch_exceptions=False)


def test_a_table_without_a_needed_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("id,model\nI01,x\n")
    with pytest.raises(TraceError, match="no column engine, strategy, decode_tok_s"):
        read_rows(path)


def test_a_cell_that_cannot_be_read_costs_its_row_only(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(
        "id,engine,model,strategy,decode_tok_s,hit_rate\nI01,x,y,cpu_only,fast,\nI02,x,y,teleport,9,\n"
        "I03,x,Qwen/Qwen3-30B-A3B,cpu_only,9,\nI04,x,Qwen/Qwen3-30B-A3B,cpu_only,nan,95\n"
    )
    predictions, skipped = predict_all(read_rows(path))
    assert [entry.row.id for entry in predictions] == ["I03"]
    assert skipped[0][1] == "decode_tok_s is 'fast', wanted a number or an empty cell"
    assert skipped[1][1] == "unknown strategy 'teleport'"
    assert skipped[2][0].hit_rate == 0.95


def test_no_cell_but_the_needed_ones_is_needed(rows: dict[str, PublishedRow]) -> None:
    """Any row, with any one of its cells taken away, is predicted or skipped with a reason."""
    for row in rows.values():
        for cell in fields(PublishedRow):
            if cell.name in ("id", "strategy"):
                continue
            empty = "" if isinstance(getattr(row, cell.name), str) else 1 if cell.name == "gpu_count" else None
            result = predict_row(replace(row, **{cell.name: empty}))
            assert result if isinstance(result, str) else result.per_s > 0


@pytest.mark.skipif(not MEASURED.is_dir(), reason="needs the published figures in shared/measured")
def test_open_table_is_predicted_as_well_as_the_record_says() -> None:
    result = validate_published(MEASURED / "published_dev.csv", MEASURED / "pairs_dev.csv")
    values = result.as_json()
    assert values["rows_predicted"] >= 240
    assert values["median_abs_error"] <= 0.17
    assert values["leave_group_out"]["median_abs_error"] <= 0.19
    assert values["ranking_accuracy"] >= 0.83
    assert values["ranking_pairs"] >= 165
    assert 0.88 <= values["band_coverage"] <= 0.97
    assert 0.8 <= values["leave_group_out"]["band_coverage"] <= 0.97


@pytest.mark.skipif(not MEASURED.is_dir(), reason="needs the published figures in shared/measured")
def test_record_that_ships_is_that_of_the_open_table() -> None:
    shipped = ValidationRecord.load(record_path())
    again = fit_published(MEASURED / "published_dev.csv", shipped.command)
    assert shipped.pairs == again.pairs
