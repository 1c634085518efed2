"""Figures of the papers: every row within its tolerance, one number fitted, and the committed table the current one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from simulator import simulate
from simulator.validation.papers import (
    ON_DEMAND_MS,
    PREFETCH_MS,
    PaperRow,
    PapersValidation,
    markdown,
    validate_papers,
    with_idle,
)
from simulator.validation.papers_spac import RATES
from tests.simulator.builders import make_config, make_hardware, make_shape, mixed_trace
from trace_capture.trace import Phase

TABLE = Path(__file__).parents[2] / "traces" / "validation" / "papers.md"


@pytest.fixture(scope="module")
def result() -> PapersValidation:
    return validate_papers()


def test_every_row_whose_measurement_is_sure_is_within_its_tolerance(result: PapersValidation) -> None:
    by_id = {row.id: row for row in result.rows}
    assert len(by_id) == len(result.rows)
    wanted = [f"V{number}-{name}" for number in (1, 2, 3, 5) for name in ON_DEMAND_MS]
    assert {*wanted, "V4", "V6", "V7", "V8", "V14"} <= by_id.keys()
    assert [row for row in result.rows if not row.ok and not row.soft] == []
    inferred = {"V10", "V10-CPU", "V10-SD", "V10-plain", "V10-HybriMoE", "V12"}
    assert {row.id for row in result.rows if row.soft} == {"V6", "V7", "V8-bytes", *inferred}
    for name, measured in PREFETCH_MS.items():
        assert by_id[f"V2-{name}"].measured == measured
        assert by_id[f"V2-{name}"].tolerance == pytest.approx(0.02 * measured)
        assert by_id[f"V1-{name}"].tolerance == pytest.approx(0.03 * ON_DEMAND_MS[name])
    assert not {row.id for row in result.rows} & {name for name, _ in result.skipped}


def test_the_fit_is_to_on_demand_alone(result: PapersValidation) -> None:
    """Its mean is met, which one number can do; prefetch is off by what is left."""
    predicted = {row.id: row.predicted for row in result.rows}
    assert fmean(predicted[f"V1-{name}"] for name in ON_DEMAND_MS) == pytest.approx(fmean(ON_DEMAND_MS.values()), 1e-5)
    assert fmean(predicted[f"V2-{name}"] for name in PREFETCH_MS) != pytest.approx(fmean(PREFETCH_MS.values()), 1e-4)
    assert 20 < result.idle_us_per_layer < 120


def test_what_moe_spac_gains_comes_out_of_a_fit_to_its_baselines_alone(result: PapersValidation) -> None:
    by_id = {row.id: row for row in result.rows}
    full = by_id["V10"].predicted
    assert full * by_id["V10-plain"].predicted == pytest.approx(RATES["plain"], 0.02), "the CPU's rate is fitted to it"
    assert full * by_id["V10-SD"].predicted == pytest.approx(RATES["SD"], 0.03), "the acceptance is fitted to it"
    assert all(by_id[name].ok for name in ("V10", "V10-SD", "V10-plain", "V12"))
    assert by_id["V10-CPU"].predicted < 0.9 * full, "without the link's share of the misses little is gained"
    assert by_id["V10-SD"].measured == pytest.approx(0.705, abs=5e-4)


def test_idle_time_adds_to_every_copy_of_a_layer() -> None:
    trace = mixed_trace(make_shape())
    config = make_config("none", budget_bytes=64_000)
    plain = make_hardware(latency_ns=5)
    before, after = (simulate(trace, machine, config).metrics for machine in (plain, with_idle(plain, 300, 3)))
    decode = [item for item in trace.passes if item.phase != Phase.PREFILL]
    copies = sum(len(experts) for item in decode for experts in trace.pass_experts(item))
    assert (after.tpot_ms - before.tpot_ms) * 1e6 * after.decode_tokens == pytest.approx(100 * copies, 1e-9)


def test_rows_out_of_tolerance_are_said_to_be(result: PapersValidation) -> None:
    off = PaperRow("V0", "nothing", "ms", 1.21, 1.0, 0.2)
    assert not off.ok and PaperRow("V0", "nothing", "ms", 1.19, 1.0, 0.2).ok
    bad = replace(result, rows=(off, replace(off, soft=True)))
    assert bad.missed == [off]
    assert bad.as_json()["rows"][0]["ok"] is False
    assert markdown(bad).count("| NO |") == 1 and markdown(bad).count("| NO (soft) |") == 1


def test_the_committed_table_is_what_the_command_makes(result: PapersValidation) -> None:
    """Up to a percent, which another version of numpy may draw differently."""
    committed, now = (_cells(text) for text in (TABLE.read_text(encoding="utf-8"), markdown(result)))
    assert committed.keys() == now.keys()
    for name, (numbers, rest) in now.items():
        assert committed[name] == (pytest.approx(numbers, rel=0.01, abs=0.02), rest)


def _cells(text: str) -> dict[str, tuple[list[float], list[str]]]:
    """The numbers of each row of the table, and its words."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| V")]
    return {row[0]: ([float(cell) for cell in row[2:5]], [row[1], row[5]]) for row in rows}
