"""Traces as files: round trips, damage, and captures that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trace_capture import Trace
from trace_capture.errors import StudioError, TraceError
from trace_capture.trace import COLUMNS
from trace_capture.trace_store import METADATA_KEY, TraceWriter, partial_path

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def saved(trace: Trace, tmp_path: Path) -> Path:
    path = tmp_path / "t.parquet"
    trace.save(path)
    return path


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def set_info(path: Path, **fields: Any) -> None:
    def change(table: pa.Table) -> pa.Table:
        info = json.loads(table.schema.metadata[METADATA_KEY]) | fields
        return table.replace_schema_metadata({METADATA_KEY: json.dumps(info).encode()})

    rewrite(path, change)


def set_column(path: Path, name: str, values: pa.Array) -> None:
    rewrite(path, lambda table: table.set_column(table.schema.get_field_index(name), name, values))


def rows_of(trace: Trace, start: int, stop: int) -> dict[str, Any]:
    rows = {name: getattr(trace, name)[start:stop] for name in COLUMNS}
    return rows | {f"predicted:{name}": ids[start:stop] for name, ids in trace.predicted.items()}


def test_round_trip_keeps_every_column_type_and_the_digest(trace: Trace, saved: Path) -> None:
    loaded = Trace.load(saved)
    assert loaded.info == trace.info and loaded.digest == trace.digest
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(trace, name))
        assert getattr(loaded, name).dtype == getattr(trace, name).dtype
    np.testing.assert_array_equal(loaded.predicted["guess"], trace.predicted["guess"])


def test_equal_traces_give_equal_bytes_and_nothing_else_in_the_folder(trace: Trace, saved: Path) -> None:
    trace.save(saved.with_name("again.parquet"))
    assert saved.with_name("again.parquet").read_bytes() == saved.read_bytes()
    assert sorted(path.name for path in saved.parent.iterdir()) == ["again.parquet", "t.parquet"]


def test_file_is_plain_parquet_with_one_row_per_token(trace: Trace, saved: Path) -> None:
    table = pq.read_table(saved)
    assert table.num_rows == trace.num_tokens
    assert table.schema.names == [*COLUMNS, "predicted:guess"]
    assert table.column("experts").to_pylist() == trace.experts.reshape(trace.num_tokens, -1).tolist()
    frame = pd.read_parquet(saved)
    assert frame.loc[5, "experts"].tolist() == trace.experts[5].ravel().tolist()
    assert frame.groupby("pass_id").size().tolist() == [p.stop - p.start for p in trace.passes]


def test_an_empty_trace_survives(trace: Trace, tmp_path: Path) -> None:
    empty = trace.rows(np.zeros(trace.num_tokens, dtype=np.bool_))
    empty.save(tmp_path / "empty.parquet")
    loaded = Trace.load(tmp_path / "empty.parquet")
    assert loaded.num_tokens == 0 and loaded.experts.shape == (0, 3, 2)


def test_saving_an_impossible_trace_writes_nothing(trace: Trace, make: Any, tmp_path: Path) -> None:
    bad = make.edited(trace, experts=lambda column: column.__setitem__((6, 1), 3))
    with pytest.raises(TraceError, match="row 6"):
        bad.save(tmp_path / "bad.parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept_share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_file_is_refused_by_name(saved: Path, kept_share: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * kept_share)])
    with pytest.raises(TraceError, match=r"t\.parquet cannot be read as Parquet .*truncated or not a trace"):
        Trace.load(saved)


def test_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no trace at .*gone\.parquet; make one with 'moe-studio capture"):
        Trace.load(tmp_path / "gone.parquet")


def test_other_files_are_not_traces(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(TraceError, match="truncated or not a trace"):
        Trace.load(tmp_path / "text.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(TraceError, match="Parquet but not a routing trace"):
        Trace.load(tmp_path / "other.parquet")


def test_another_schema_version_is_refused(saved: Path) -> None:
    set_info(saved, schema_version=99)
    with pytest.raises(TraceError, match="trace schema version 99, this program reads 1"):
        Trace.load(saved)


def test_damaged_metadata_names_the_field(saved: Path) -> None:
    set_info(saved, source=None)
    with pytest.raises(TraceError, match="source: .*capture or import"):
        Trace.load(saved)
    rewrite(saved, lambda table: table.replace_schema_metadata({METADATA_KEY: b"{nonsense"}))
    with pytest.raises(TraceError, match="metadata is not JSON"):
        Trace.load(saved)


@pytest.mark.parametrize("name", ["experts", "pass_id"])
def test_missing_column_is_named(saved: Path, name: str) -> None:
    rewrite(saved, lambda table: table.drop_columns([name]))
    with pytest.raises(TraceError, match=f"column '{name}' is missing"):
        Trace.load(saved)


def edited_experts(trace: Trace, row: int, values: list[int], kind: pa.DataType) -> pa.Array:
    rows = trace.experts.reshape(trace.num_tokens, -1).tolist()
    rows[row] = values
    return pa.array(rows, type=pa.list_(kind))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, 3, 3, 4, 5], "row 6 has experts with the same expert twice"),
        ([1, 2, 3, 8, 4, 5], "row 6 has experts beyond 7"),
        ([1, 2, 3, 65536 + 4, 4, 5], "column 'experts' holds 65540, beyond uint16"),
        ([1, 2, 3, -1, 4, 5], "column 'experts' holds -1, beyond uint16"),
    ],
)
def test_edited_row_is_refused(trace: Trace, saved: Path, values: list[int], message: str) -> None:
    set_column(saved, "experts", edited_experts(trace, 6, values, pa.int64()))
    with pytest.raises(TraceError, match=message):
        Trace.load(saved)


def test_rows_that_only_add_up_together_are_refused(trace: Trace, saved: Path) -> None:
    rows = trace.experts.reshape(trace.num_tokens, -1).tolist()
    rows[4], rows[5] = rows[4][:3], rows[4][3:] + rows[5]
    set_column(saved, "experts", pa.array(rows, type=pa.list_(pa.uint16())))
    with pytest.raises(TraceError, match="column 'experts' has rows of"):
        Trace.load(saved)


def test_columns_of_another_type_or_with_gaps_are_refused(trace: Trace, saved: Path) -> None:
    set_column(saved, "position", pa.array(trace.position.astype(np.float64) + 0.5))
    with pytest.raises(TraceError, match="column 'position' holds float64, wanted int32"):
        Trace.load(saved)
    set_column(saved, "position", pa.array([None, *trace.position.tolist()[1:]]))
    with pytest.raises(TraceError, match="column 'position' has empty cells"):
        Trace.load(saved)
    set_column(saved, "phase", pa.array(trace.phase.astype(np.int64) + 256))
    with pytest.raises(TraceError, match="column 'phase' holds 25[67], beyond uint8"):
        Trace.load(saved)


def test_list_columns_rewritten_by_other_tools_still_read(trace: Trace, saved: Path) -> None:
    set_column(saved, "experts", edited_experts(trace, 6, trace.experts[6].ravel().tolist(), pa.int64()))
    assert Trace.load(saved).digest == trace.digest


def test_writer_makes_the_same_file_as_saving_at_once(trace: Trace, saved: Path) -> None:
    path = saved.with_name("streamed.parquet")
    with TraceWriter(path, trace.info, {"guess": 2}) as writer:
        for item in trace.passes:
            writer.append(rows_of(trace, item.start, item.stop))
        assert writer.num_rows == trace.num_tokens
        assert not path.exists()
    assert not partial_path(path).exists()
    assert path.read_bytes() == saved.read_bytes()


def test_writer_left_by_an_exception_keeps_the_rows(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(KeyboardInterrupt), TraceWriter(path, trace.info, {"guess": 2}) as writer:
        writer.append(rows_of(trace, 0, 4))
        raise KeyboardInterrupt
    recovered = Trace.load(path)
    assert not recovered.info.complete and recovered.num_tokens == 4
    assert not path.exists()


KILLED = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from conftest import random_trace
from test_trace_files import rows_of
from trace_capture.trace_store import TraceWriter
trace = random_trace()
writer = TraceWriter({path!r}, trace.info, {{"guess": 2}})
for item in trace.passes[:{passes}]:
    writer.append(rows_of(trace, item.start, item.stop))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("passes", "rows"), [(1, 4), (5, 8)])
def test_killed_capture_leaves_exactly_its_complete_passes(
    trace: Trace, tmp_path: Path, passes: int, rows: int
) -> None:
    path = tmp_path / "t.parquet"
    code = KILLED.format(folder=str(Path(__file__).parent), path=str(path), passes=passes)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet.partial"]
    for place in (path, partial_path(path)):
        recovered = Trace.load(place)
        assert not recovered.info.complete
        assert recovered.digest == trace.rows(np.arange(trace.num_tokens) < rows).digest


def test_capture_killed_before_its_first_pass_says_so(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(TraceError, match="cut off before its first row"), TraceWriter(path, trace.info):
        Trace.load(path)


def test_half_written_batch_is_left_out(trace: Trace, tmp_path: Path) -> None:
    path, copy = tmp_path / "t.parquet", tmp_path / "copy.parquet"
    states = []
    with TraceWriter(path, trace.info, {"guess": 2}) as writer:
        for item in trace.passes[:3]:
            writer.append(rows_of(trace, item.start, item.stop))
            states.append(partial_path(path).read_bytes())
    for cut in (len(states[1]) + 5, len(states[2]) - 40, len(states[2]) - 1):
        partial_path(copy).write_bytes(states[2][:cut])
        assert Trace.load(copy).num_tokens == 5
    partial_path(copy).write_bytes(states[2])
    assert Trace.load(copy).num_tokens == 6
    partial_path(copy).write_bytes(states[2][:20])
    with pytest.raises(TraceError, match="cut off before its first row"):
        Trace.load(copy)


def test_writer_into_a_place_that_is_no_folder(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StudioError, match="cannot write to folder .*choose another place with --out"):
        TraceWriter(tmp_path / "file" / "t.parquet", trace.info)
