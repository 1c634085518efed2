"""Reading a folder: what is found, what is refused, and what happens to damaged files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dashboard import data
from dashboard.data import Workspace
from dashboard.pages import overview
from dashboard.report import report_html
from trace_capture.errors import StudioError
from trace_capture.run import Run
from trace_capture.trace import Trace


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_everything_is_found(folder: Path, trace: Trace) -> None:
    snapshot = Workspace(folder).read()
    assert snapshot.problems == ()
    assert [item.name for item in snapshot.runs] == [
        "lru-measured", "lru-predicted", "on-demand-measured", "on-demand-predicted", "tuned-measured",
        "tuned-predicted",
    ]  # fmt: skip
    assert snapshot.trace is not None and snapshot.trace.digest == trace.digest
    assert snapshot.hardware is not None and snapshot.hardware.emulated
    assert snapshot.tuned is not None and 'policy = "lfu"' in snapshot.tuned.text
    assert snapshot.tuned.config.cache.policy == "lfu"
    assert snapshot.run("tuned-measured") is not None
    assert snapshot.run("../tuned-measured") is None and snapshot.run(None) is None


def test_runs_stay_closed_where_they_are_not_wanted(copy: Path) -> None:
    (copy / "tuned-measured.run.json").write_text("{", encoding="utf-8")
    snapshot = Workspace(copy).read(runs=False)
    assert snapshot.runs == () and snapshot.problems == ()
    assert snapshot.trace is not None and snapshot.hardware is not None and snapshot.tuned is not None


def test_a_missing_folder_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(StudioError, match="moe-studio demo"):
        Workspace(tmp_path / "absent")


def test_an_empty_folder_has_nothing_and_no_problem(tmp_path: Path) -> None:
    snapshot = Workspace(tmp_path).read()
    assert (snapshot.trace, snapshot.hardware, snapshot.tuned, snapshot.runs) == (None, None, None, ())
    assert snapshot.problems == ()


def test_files_are_read_again_only_when_they_change(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load_run = data.load_run
    monkeypatch.setattr(data, "load_run", lambda path: loaded.append(path.name) or load_run(path))
    workspace = Workspace(copy)
    workspace.read()
    assert len(loaded) == 6
    workspace.read()
    assert len(loaded) == 6
    spans = copy / "tuned-measured.spans.parquet"
    spans.unlink()
    (copy / "lru-measured.run.json").unlink()
    snapshot = workspace.read()
    assert loaded[6:] == ["tuned-measured.run.json"]
    assert len(snapshot.runs) == 5
    assert snapshot.run("tuned-measured").run.spans == ()  # type: ignore[union-attr]


def test_a_link_out_of_the_folder_is_not_followed(copy: Path, tmp_path: Path, folder: Path) -> None:
    (copy / "secret.run.json").symlink_to(folder / "tuned-measured.run.json")
    (copy / "tuned-measured.spans.parquet").unlink()
    (copy / "tuned-measured.spans.parquet").symlink_to(folder / "tuned-measured.spans.parquet")
    (copy / "tuned.toml").unlink()
    (copy / "tuned.toml").symlink_to("/etc/hostname")
    snapshot = Workspace(copy).read()
    assert snapshot.run("secret") is None and snapshot.run("tuned-measured") is None and snapshot.tuned is None
    assert sorted(line.split()[0] for line in snapshot.problems) == [
        "secret.run.json", "tuned-measured.spans.parquet", "tuned.toml",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["tuned-measured.run.json", "tuned-measured.spans.parquet", "trace.parquet", "hardware.toml", "tuned.toml"]
)
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00garbage", b'{"info": 3}', b"PAR1PAR1", b"[[[["])
def test_a_damaged_file_is_one_line_and_the_rest_is_shown(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    snapshot = Workspace(copy).read()
    assert len(snapshot.problems) == 1
    for line in snapshot.problems:
        assert name in line and "\n" not in line and "Traceback" not in line
        assert name in report_html(snapshot)
    assert len(snapshot.runs) == (5 if name.startswith("tuned-measured") else 6)
    assert overview.layout(snapshot, {}) is not None


def test_a_cut_off_file_is_a_problem_too(copy: Path) -> None:
    for name in ("trace.parquet", "tuned-measured.run.json", "tuned-predicted.spans.parquet"):
        raw = (copy / name).read_bytes()
        (copy / name).write_bytes(raw[: len(raw) // 2])
    assert len(Workspace(copy).read().problems) == 3


def test_spans_that_end_before_they_begin_are_a_problem(copy: Path) -> None:
    run = Run.load(copy / "tuned-measured.run.json")
    first = run.spans[0]
    bad = Run(run.info, run.token_ns, (first._replace(end_ns=first.start_ns - 1), *run.spans[1:]))
    bad.save(copy, "bad")
    (problem,) = Workspace(copy).read().problems
    assert "row 0 is not a span" in problem


def test_a_huge_configuration_is_not_shown(copy: Path) -> None:
    (copy / "tuned.toml").write_bytes(b"#" * (data.MAX_TEXT_BYTES + 1))
    (problem,) = Workspace(copy).read().problems
    assert "too many" in problem
