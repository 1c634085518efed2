"""Runs as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from trace_capture import Metrics, Run, RunInfo, Span
from trace_capture.errors import TraceError
from trace_capture.run import spans_table

SPANS = (
    Span("link", "load", 0, 1_500, 0, 2, 7, 9_437_184, "demand"),
    Span("device", "dense", 10, 2**53 + 1, 1, 0),
)


@pytest.fixture
def run() -> Run:
    metrics = Metrics(tpot_ms=12.25, tpot_terms_ms={"dense": 4.0, "stall": 8.25}, lookups=10, hits=7, hit_rate=0.7)
    info = RunInfo(
        kind="simulated",
        label="lru/layer",
        emulated=True,
        model="tiny",
        hardware="here",
        config={"cache": {"policy": "lru"}},
        metrics=metrics,
        bounds={"hit_rate": 0.9},
        notes=["a note"],
    )
    return Run(info, np.array([12_000_000, 2**60]), SPANS, ("Once é",))


def test_round_trip_keeps_figures_times_spans_and_texts(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "new" / "folder", "first")
    assert path.name == "first.run.json"
    loaded = Run.load(path)
    assert loaded.info == run.info and loaded.metrics.tpot_terms_ms == {"dense": 4.0, "stall": 8.25}
    assert loaded.token_ns.tolist() == [12_000_000, 2**60]
    assert loaded.spans == SPANS and loaded.texts == ("Once é",)


def test_saving_the_same_run_twice_gives_the_same_bytes(run: Run, tmp_path: Path) -> None:
    one, two = run.save(tmp_path, "one"), run.save(tmp_path, "two")
    assert one.read_bytes() == two.read_bytes()
    assert (tmp_path / "one.spans.parquet").read_bytes() == (tmp_path / "two.spans.parquet").read_bytes()


def test_spans_table_has_the_columns_of_a_span_even_when_empty(run: Run, tmp_path: Path) -> None:
    assert spans_table(()).schema == spans_table(SPANS).schema
    assert spans_table(()).column_names == list(Span._fields)
    run.save(tmp_path, "x")
    assert pq.read_table(tmp_path / "x.spans.parquet").column("num_bytes").to_pylist() == [9_437_184, 0]


def test_run_without_its_timeline_still_loads(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path, "x")
    (tmp_path / "x.spans.parquet").unlink()
    assert Run.load(path).spans == ()


def damage(path: Path, **fields: Any) -> None:
    record = json.loads(path.read_text())
    info = fields.pop("info", {})
    path.write_text(json.dumps({**record, "info": record["info"] | info, **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"info": {"schema_version": 2}}, "run schema version 2, this program reads 1"),
        ({"info": {"kind": "imagined"}}, "is not a run record"),
        ({"info": {"colour": "red"}}, "is not a run record"),
        ({"token_ns": ["soon"]}, "is not a run record"),
        ({"token_ns": [2**70]}, "is not a run record"),
        ({"texts": None}, "is not a run record"),
    ],
)
def test_damaged_summary_is_one_clear_line(run: Run, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = run.save(tmp_path, "x")
    damage(path, **fields)
    with pytest.raises(TraceError, match=rf"x\.run\.json .*{message}|x\.run\.json {message}") as caught:
        Run.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe"])
def test_what_is_no_record_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.run.json").write_bytes(content)
    with pytest.raises(TraceError, match="not a run record"):
        Run.load(tmp_path / "x.run.json")


def test_missing_run_and_damaged_timeline(run: Run, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read run .*gone"):
        Run.load(tmp_path / "gone.run.json")
    path = run.save(tmp_path, "x")
    spans = tmp_path / "x.spans.parquet"
    spans.write_bytes(spans.read_bytes()[:-9])
    with pytest.raises(TraceError, match=r"x\.spans\.parquet cannot be read"):
        Run.load(path)
    pq.write_table(spans_table(SPANS).drop_columns(["layer"]), spans)
    with pytest.raises(TraceError, match=r"x\.spans\.parquet cannot be read"):
        Run.load(path)
