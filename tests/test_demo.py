"""The main job, end to end, on the model that ships: small, but with every part real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import runtime.demo
from runtime.demo import DemoOptions
from tests.studio import studio
from trace_capture.errors import StudioError
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Run
from trace_capture.trace import Trace


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("demo") / "out"
    done = studio("demo", "--out", folder, "--quick", "--json")
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_sizes_that_are_said_hold_with_quick_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Up to where the loop would begin."""
    asked: list[DemoOptions] = []

    def stopped(out: Path, options: DemoOptions, step: object) -> None:
        asked.append(options)
        raise StudioError("not now")

    monkeypatch.setattr(runtime.demo, "demo", stopped)
    for flags in ([], ["--quick"], ["--quick", "--prompts", "4"], ["--quick", "--max-new-tokens", "12"]):
        studio("demo", "--out", tmp_path / "out", *flags)
    sizes = [(one.num_prompts, one.max_new_tokens, one.repeats) for one in asked]
    assert sizes == [(18, 48, 3), (3, 10, 1), (4, 10, 1), (3, 12, 1)]


def test_every_file_of_the_loop_is_there_and_opens(shown: tuple[Path, dict[str, object]]) -> None:
    folder, _ = shown
    trace = Trace.load(folder / "trace.parquet")
    assert trace.info.complete
    assert HardwareProfile.load(folder / "hardware.toml").error_band is not None
    assert "[provenance]" in (folder / "tuned.toml").read_text()
    assert json.loads((folder / "timeline.perfetto.json").read_text())["traceEvents"]
    assert "<html" in (folder / "report.html").read_text()[:2000]
    assert list(folder.glob("*.partial")) == []


def test_predicted_and_measured_runs_pair_up_and_decide_alike(shown: tuple[Path, dict[str, object]]) -> None:
    folder, _ = shown
    runs = [Run.load(path) for path in sorted(folder.glob("*.run.json"))]
    labels = {run.info.label for run in runs}
    assert len(runs) == 2 * len(labels) == 10
    assert all(run.info.emulated for run in runs)
    for label in labels:
        pair = {run.info.kind: run for run in runs if run.info.label == label}
        predicted, measured = pair["simulated"].metrics, pair["measured"].metrics
        assert predicted.lookups == measured.lookups
        assert predicted.decode_tokens == measured.decode_tokens
        if pair["measured"].info.config["prefetch"]["source"] == "none":
            assert (predicted.hits, predicted.loads, predicted.bytes_loaded) == (
                measured.hits,
                measured.loads,
                measured.bytes_loaded,
            )


def test_the_table_is_made_of_those_runs(shown: tuple[Path, dict[str, object]]) -> None:
    folder, printed = shown
    measured = {}
    for path in folder.glob("*.measured.run.json"):
        run = Run.load(path)
        measured[run.info.label] = run.metrics
    rows = printed["strategies"]
    assert len(rows) == 5
    for row in rows:
        metrics = measured[row["strategy"]]
        assert row["measured_tpot_ms"] == metrics.tpot_ms
        assert row["speed_up"] == pytest.approx(measured["on-demand"].tpot_ms / metrics.tpot_ms)
        assert row["error_ratio"] == pytest.approx(row["predicted_tpot_ms"] / metrics.tpot_ms - 1)


def test_caching_beats_loading_everything_by_far_on_a_slow_link(shown: tuple[Path, dict[str, object]]) -> None:
    """Copying is eleven times the compute, so a cache that halves the loads must show, noise or not."""
    rows = {row["strategy"]: row for row in shown[1]["strategies"]}
    assert rows["LRU cache"]["speed_up"] > 1.5
    assert rows["on-demand"]["decode_hit_rate"] == 0
