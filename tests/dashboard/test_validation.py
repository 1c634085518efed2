"""The validation page's numbers and figures, against the record they come from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dashboard import validation_figures
from dashboard.data import Snapshot, Workspace
from dashboard.validation_view import PUBLISHED, RUNS, papers_table, validation_view, validations
from simulator.validation.families import PUBLISHED_RECORD
from simulator.validation.record import Pair, ValidationRecord, make_record
from trace_capture.samples import sample_folder

PAIRS = [
    Pair(id="slow", family="on_demand", predicted_ms=100, measured_ms=110),
    Pair(id="<b>fast", family="prefetch", predicted_ms=40, measured_ms=38),
    Pair(id="faster", family="prefetch", predicted_ms=20, measured_ms=30),
]


@pytest.fixture
def with_record(tmp_path: Path) -> Snapshot:
    make_record("live", PAIRS, "here", model="m", hardware="h", emulated=True).save(tmp_path / "record.json")
    (tmp_path / "other.json").write_text('{"x": 1}', encoding="utf-8")
    return Workspace(tmp_path).read()


def test_records_runs_and_the_shipped_record_can_be_chosen(folder: Path, with_record: Snapshot) -> None:
    assert [item.name for item in validations(with_record)] == ["record.json", PUBLISHED]
    assert with_record.problems == ()
    names = {item.name: item for item in validations(Workspace(folder).read())}
    assert list(names) == [RUNS, PUBLISHED]
    runs = Workspace(folder).read()
    pair = next(pair for pair in names[RUNS].record.pairs if pair.id == "tuned")
    assert pair.predicted_ms == runs.run("tuned-predicted").run.metrics.tpot_ms  # type: ignore[union-attr]
    assert pair.measured_ms == runs.run("tuned-measured").run.metrics.tpot_ms  # type: ignore[union-attr]


def test_a_damaged_record_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    make_record("live", PAIRS, "here").save(path)
    path.write_text(path.read_text().replace('"measured_ms": 110', '"measured_ms": 1'), encoding="utf-8")
    snapshot = Workspace(tmp_path).read()
    assert snapshot.records == () and "bands do not follow" in snapshot.problems[0]


def test_the_scatter_has_every_pair_and_the_band(with_record: Snapshot) -> None:
    view = validation_view(validations(with_record)[0])
    figure = validation_figures.scatter(view)
    points = [(x, y) for item in figure.data if item.mode == "markers" for x, y in zip(item.x, item.y, strict=True)]
    assert sorted(points) == [(20, 30), (40, 38), (100, 110)]
    band = next(item for item in figure.data if item.name.startswith("band"))
    overall = next(band for band in with_record.records[0].record.bands if band.family == "any")
    assert band.y[0] == pytest.approx(band.x[0] * overall.band_high_ratio)
    assert band.y[-1] == pytest.approx(band.x[-1] * overall.band_low_ratio)
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"
    assert "emulated link" in figure.layout.xaxis.title.text and "(ms)" in figure.layout.yaxis.title.text
    assert "<b>" not in figure.to_json().replace("<br>", "").replace("\\u003c", "<")
    assert "m on h" in view.sentence and "emulated link" in view.sentence


def test_errors_are_per_family_with_its_band(with_record: Snapshot) -> None:
    figure = validation_figures.errors(validation_view(validations(with_record)[0]))
    points = {item.y[0]: list(item.x) for item in figure.data if item.type == "scatter"}
    assert points["on demand (1)"] == pytest.approx([100 / 110])
    assert points["prefetch (2)"] == pytest.approx([40 / 38, 20 / 30])
    assert figure.layout.xaxis.type == "log" and "(times)" in figure.layout.xaxis.title.text
    bar = next(item for item in figure.data if item.type == "bar" and item.y[0] == "prefetch (2)")
    band = with_record.records[0].record.band("prefetch")
    assert bar.base[0] == pytest.approx(1 / band.high_ratio)
    assert bar.base[0] + bar.x[0] == pytest.approx(1 / band.low_ratio)


def test_the_published_record_shows_errors_not_times() -> None:
    record = ValidationRecord.load(sample_folder() / PUBLISHED_RECORD)
    (chosen,) = validations(Snapshot(Path()))
    view = validation_view(chosen)
    assert chosen.name == PUBLISHED and view.is_relative
    figure = validation_figures.scatter(view)
    everything = figure.data[0]
    assert everything.name == f"all ({len(record.pairs)})"
    half = everything.x[math.ceil(len(record.pairs) / 2) - 1]
    assert half == pytest.approx(100 * view.overall.median_abs_error, rel=0.05)
    assert "not the figures of others" in view.sentence and "ms" not in figure.layout.xaxis.title.text


def test_nothing_to_validate_says_what_to_do() -> None:
    view = validation_view(None)
    for figure in (validation_figures.scatter(view), validation_figures.errors(view, dark=True)):
        assert "moe-studio validate --live" in figure.layout.annotations[0].text.replace("<br>", " ")


def test_the_table_of_papers_ships() -> None:
    assert "| V1-1K |" in papers_table() and not papers_table().startswith("#")
