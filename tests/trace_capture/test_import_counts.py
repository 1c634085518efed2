"""Formats that hold counts and no order: read, checked, written, and never taken for a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_capture.errors import ConfigError, TraceError
from trace_capture.expert_counts import ExpertCounts, load_popularity, popularity
from trace_capture.importers import ImportOptions, import_file, import_trace
from trace_capture.statistics import GENERATING, expert_load
from trace_capture.synthetic import synthetic_trace

TABLE = np.arange(24).reshape(3, 8)


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def counts(path: Path, shape: Any) -> ExpertCounts:
    found = import_file(path, options=ImportOptions(shape))
    assert isinstance(found, ExpertCounts)
    return found


def test_freetoken_logical_count_and_csv_say_the_same(make: Any, tmp_path: Path) -> None:
    shape = make.shape()
    lines = [f"{layer},{expert},{TABLE[layer, expert]}" for layer in range(3) for expert in range(8)]
    files = {
        "freetoken": {"model": "tiny", "expert_counts": TABLE.tolist()},
        "logical-count": {"logical_count": [TABLE.tolist(), TABLE.tolist()]},
        "counts-csv": "\n".join(["layer_id,expert_id,count", *lines]) + "\n",
    }
    found = {name: counts(write(tmp_path / name, content), shape) for name, content in files.items()}
    assert {name: one.source for name, one in found.items()} == {name: f"import:{name}" for name in files}
    assert (found["freetoken"].counts == TABLE).all() and (found["counts-csv"].counts == TABLE).all()
    assert (found["logical-count"].counts == 2 * TABLE).all()
    assert "the sum of 2 recorded steps" in found["logical-count"].options["notes"]
    assert all("no order of tokens" in one.options["notes"][0] for one in found.values())


def test_a_known_model_needs_no_option(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", {"model": "Qwen3-30B-A3B", "expert_counts": np.ones((48, 128), int).tolist()})
    found = import_file(path)
    assert isinstance(found, ExpertCounts) and found.shape.name == "qwen3-30b-a3b"
    with pytest.raises(TraceError, match="is of model 'mine', not built in: give --model config.json"):
        import_file(write(tmp_path / "q.json", {"model": "mine", "expert_counts": [[1]]}))


def test_dense_layers_of_a_table_are_left_out(make: Any, tmp_path: Path) -> None:
    shape = make.shape(num_layers=4, moe_layer_ids=(1, 2, 3), expert_bytes=(9,) * 3, dense_bytes=(9,) * 3)
    path = write(tmp_path / "c.json", {"logical_count": [[0] * 8, *TABLE.tolist()]})
    assert (counts(path, shape).counts == TABLE).all()
    with pytest.raises(TraceError, match="counts experts in dense layers of tiny"):
        counts(write(path, {"logical_count": [[1] * 8, *TABLE.tolist()]}), shape)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.ones((3, 10)).tolist(), "counts 10 experts of 8 of tiny: physical experts"),
        (np.ones((5, 8)).tolist(), "5 layers x 8 experts do not fit tiny with 3 MoE layers x 8"),
        (np.zeros((3, 8)).tolist(), "negative or all zero"),
        ((-TABLE).tolist(), "negative or all zero"),
        ([[1, 2], [1]], "no table of numbers"),
        (None, "no table of numbers|have shape"),
        ([1, 2], r"have shape \(2,\)"),
    ],
)
def test_tables_that_do_not_fit_are_refused(make: Any, tmp_path: Path, table: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        counts(write(tmp_path / "c.json", {"logical_count": table}), make.shape())


def test_csv_rows_beyond_the_model_are_refused(make: Any, tmp_path: Path) -> None:
    head = "layer_id,expert_id,count\n0,1,5\n"
    with pytest.raises(TraceError, match="line 3 has layer 0, expert 8; tiny has 3 layers x 8"):
        counts(write(tmp_path / "c.csv", head + "0,8,1\n"), make.shape())
    with pytest.raises(TraceError, match="line 3 is not three whole numbers"):
        counts(write(tmp_path / "c.csv", head + "0,1\n"), make.shape())


def test_counts_are_kept_in_a_file_and_are_no_trace(make: Any, tmp_path: Path) -> None:
    found = counts(write(tmp_path / "c.json", {"logical_count": TABLE.tolist()}), make.shape())
    out = tmp_path / "out.json"
    found.save(out)
    again = load_popularity(out)
    assert isinstance(again, ExpertCounts) and again.digest == found.digest and again.options == found.options
    assert json.loads(out.read_text())["order"] == "not recorded"
    with pytest.raises(TraceError, match="give --out a name in .json"):
        found.save(tmp_path / "out.parquet")
    with pytest.raises(TraceError, match="holds counts of experts without their order, so it is no trace"):
        import_trace(tmp_path / "c.json", options=ImportOptions(make.shape()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "has schema version 2, this program reads 1"),
        ({"kind": "x"}, "is no file of expert counts"),
        ({"counts": [[1]]}, "1 layers x 1 experts do not fit"),
        ({"counts": [["a"]]}, "valid integer"),
        ({"more": 1}, "Extra inputs"),
    ],
)
def test_edited_files_are_refused(make: Any, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "c.json"
    ExpertCounts(make.shape(), TABLE, "import:freetoken").save(path)
    write(path, json.loads(path.read_text()) | change)
    with pytest.raises(TraceError, match=message):
        ExpertCounts.load(path)


def test_popularity_counts_generated_tokens(make: Any) -> None:
    trace = make.trace()
    assert (popularity(trace) == expert_load(trace, GENERATING)).all()
    only_prompts = make.trace(decode=0)
    assert (popularity(only_prompts) == expert_load(only_prompts)).all()


def test_a_synthetic_trace_is_drawn_by_counts(make: Any) -> None:
    """Hot experts of the counts are the hot ones of the trace, layer by layer, and those never seen stay rare."""
    shape = make.shape(num_experts=16)
    table = np.zeros((3, 16), dtype=np.int64)
    for layer in range(3):
        table[layer, np.arange(layer, layer + 8)] = [8000, 4000, 2000, 1000, 500, 250, 125, 60]
    given = {"reuse_ratio": 0.4, "skew": 0.0, "predictor_recall": 0.9, "seed": 1}
    counts = ExpertCounts(shape, table, "import:imatrix")
    trace = synthetic_trace(shape, 1, 10, 400, **given, popularity=counts)
    load = expert_load(trace)
    by_count = np.array([load[layer, layer : layer + 8] for layer in range(3)])
    assert (by_count.sum(axis=1) > 0.95 * load.sum(axis=1)).all()
    assert (by_count[:, :2] > by_count[:, 3:4]).all() and (by_count[:, 3] > by_count[:, 6]).all()
    assert trace.info.options["popularity"] == counts.digest
    with pytest.raises(ConfigError, match="counts of 3 x 16 experts do not fit tiny with 4 MoE layers x 16"):
        synthetic_trace(make.shape(num_layers=4, num_experts=16), 1, 1, 1, **given, popularity=counts)
    with pytest.raises(ConfigError, match="leave the skew out"):
        synthetic_trace(shape, 1, 1, 1, **given | {"skew": 1.0}, popularity=counts)
