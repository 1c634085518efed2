"""Taking in a trace: what is refused, and that nothing is left behind."""

from __future__ import annotations

import base64
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dashboard import uploads
from dashboard.uploads import save_trace
from trace_capture.errors import StudioError
from trace_capture.trace import Trace


def url_of(data: bytes) -> str:
    return "data:application/octet-stream;base64," + base64.b64encode(data).decode()


@pytest.fixture
def good(folder: Path) -> bytes:
    return (folder / "trace.parquet").read_bytes()


def test_a_good_trace_is_written_as_it_came(tmp_path: Path, good: bytes, trace: Trace) -> None:
    assert save_trace(tmp_path, "my trace-2.parquet", url_of(good)).digest == trace.digest
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("my trace-2.parquet", good)]


@pytest.mark.parametrize(
    "name",
    ["../x.parquet", "/tmp/x.parquet", "a/b.parquet", "a\\b.parquet", ".hidden.parquet", "x.run.json", "x.parquet\n",
     "x.spans.parquet", "", "x" * 200 + ".parquet", "x.parquet.partial"],
)  # fmt: skip
def test_a_name_that_is_no_plain_trace_name_is_refused(tmp_path: Path, good: bytes, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(StudioError, match="not the name of a trace"):
        save_trace(inside, name, url_of(good))
    assert [path.name for path in tmp_path.rglob("*")] == ["inside"]


def test_nothing_is_overwritten(tmp_path: Path, good: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(b"mine")
    (tmp_path / "b.parquet").symlink_to(tmp_path / "elsewhere")
    for name in ("a.parquet", "b.parquet"):
        with pytest.raises(StudioError, match="already; rename"):
            save_trace(tmp_path, name, url_of(good))
    assert (tmp_path / "a.parquet").read_bytes() == b"mine" and not (tmp_path / "elsewhere").exists()


def test_what_the_trace_reader_refuses_is_not_written(tmp_path: Path, good: bytes) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other")
    other = (tmp_path / "other").read_bytes()
    (tmp_path / "other").unlink()
    for data, reason in ((b"", "truncated"), (good[:-40], "truncated"), (other, "not a routing trace")):
        with pytest.raises(StudioError, match=f"t.parquet was not taken in: t.parquet .*{reason}|damaged"):
            save_trace(tmp_path, "t.parquet", url_of(data))
    with pytest.raises(StudioError, match="arrived damaged"):
        save_trace(tmp_path, "t.parquet", "data:;base64,%%%")
    assert not list(tmp_path.iterdir())


def test_sizes_are_limited(tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(StudioError, match="unpacks to"):
        save_trace(tmp_path, "t.parquet", url_of(good))
    monkeypatch.setattr(uploads, "MAX_UPLOAD_BYTES", 1000)
    with pytest.raises(StudioError, match="0 MB are taken at most"):
        save_trace(tmp_path, "t.parquet", url_of(good))
    assert not list(tmp_path.iterdir())
