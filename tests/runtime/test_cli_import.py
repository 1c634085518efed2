"""The verb import, and what its counts are good for: popular experts for simulate, tune and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from runtime.cli import exports, imports, machines, traces  # noqa: F401 - they register the verbs
from runtime.cli.app import app
from tests.simulator.builders import make_shape, mixed_trace
from trace_capture.errors import ConfigError, ProfileError, TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.trace import NO_EXPERT, Trace


def studio(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def asked(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(studio(*arguments, "--json")))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.parquet"
    mixed_trace(make_shape(expert_bytes=3000)).save(path)
    return path


def first_sequence(trace: Path) -> np.ndarray[Any, Any]:
    """Rows [T, L, K] of one prompt, all of them routed."""
    known = Trace.load(trace)
    routed = (known.experts != NO_EXPERT).all(axis=(1, 2))
    return known.experts[(known.sequence == known.sequence[0]) & routed].astype(np.int32)


@pytest.fixture
def counts(tmp_path: Path, trace: Path) -> Path:
    """Counts under which the experts with the highest ids are hot, as kt-kernel writes them."""
    shape = Trace.load(trace).shape
    table = np.tile(np.arange(shape.num_experts) ** 2, (shape.num_moe_layers, 1))
    (tmp_path / "kt.json").write_text(json.dumps({"logical_count": table.tolist()}))
    path = tmp_path / "hot.json"
    studio("import", tmp_path / "kt.json", "--model", trace, "--out", path)
    return path


def test_the_list_of_formats_says_what_each_gives() -> None:
    listing = asked("import", "--list")
    assert listing["route-trace"]["gives"] == "trace" and listing["freetoken"]["gives"] == "counts"
    assert "responses" in studio("import", "--list")


def test_an_array_with_the_shape_of_a_trace(tmp_path: Path, trace: Path) -> None:
    rows = first_sequence(trace)
    np.save(tmp_path / "a.npy", rows)
    facts = asked("import", tmp_path / "a.npy", "--model", trace, "--prompt-tokens", 2, "--out", tmp_path / "a.parquet")
    assert facts["tokens"] == len(rows) and facts["tokens_by_phase"]["prefill"] == 2
    assert (Trace.load(tmp_path / "a.parquet").experts == rows).all()
    with pytest.raises(TraceError, match="name a file and --out"):
        studio("import", tmp_path / "a.npy")


def test_notes_of_an_import_are_told_and_repeated_by_every_run(tmp_path: Path, trace: Path) -> None:
    rows = first_sequence(trace)
    np.save(tmp_path / "a.npy", np.concatenate([np.repeat(rows[:1], 20, axis=0), rows]))
    out = tmp_path / "a.parquet"
    text = studio("import", tmp_path / "a.npy", "--model", trace, "--prompt-tokens", 3, "--out", out)
    assert "note: 21 of " in text and "next: moe-studio simulate" in text
    notes = asked("simulate", out, "--budget-ratio", 0.5)["notes"]
    assert any(note.startswith("imported trace: 21 of ") for note in notes)


def test_counts_say_what_they_cannot_tell(counts: Path, tmp_path: Path) -> None:
    assert "next: moe-studio simulate TRACE --strategy static --profile" in studio(
        "import", tmp_path / "kt.json", "--model", tmp_path / "t.parquet", "--out", tmp_path / "again.json"
    )
    facts = asked("import", tmp_path / "kt.json", "--model", tmp_path / "t.parquet", "--out", tmp_path / "again.json")
    assert "no order of tokens" in facts["notes"][0] and facts["unused"] == ExpertCounts.load(counts).counts.shape[0]


def test_static_keeps_what_the_counts_call_popular(trace: Path, counts: Path, tmp_path: Path) -> None:
    saved = tmp_path / "config.toml"
    arguments = ["simulate", trace, "--strategy", "static", "--budget-ratio", 0.5, "--profile", counts]
    run = asked(*arguments, "--save-config", saved)
    assert not any("counted on the replayed trace" in note for note in run["notes"])
    from simulator.config_file import load_config

    hot = load_config(saved).cache.hot_experts
    highest = Trace.load(trace).shape.num_experts - 1
    assert hot is not None and all(layer[0] == highest for layer in hot)
    assert any("counted on the replayed trace" in note for note in asked(*arguments[:-2])["notes"])


def test_counts_of_another_model_are_refused(counts: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.parquet"
    mixed_trace(make_shape(experts=12, expert_bytes=3000)).save(other)
    with pytest.raises(ConfigError, match="popular experts were counted on .* give a profile of the same model"):
        studio("simulate", other, "--strategy", "static", "--budget-ratio", 0.5, "--profile", counts)


def test_export_takes_counts_where_there_is_no_trace(trace: Path, counts: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    studio("simulate", trace, "--strategy", "lru", "--budget-ratio", 0.5, "--save-config", config)
    folder = tmp_path / "kt"
    studio("export", config, "--target", "kt", "--model", trace, "--trace", counts, "--out", folder)
    written = next(path for path in folder.iterdir() if path.suffix == ".json")
    again = tmp_path / "again.json"
    studio("import", written, "--model", trace, "--out", again)
    assert (ExpertCounts.load(again).counts == ExpertCounts.load(counts).counts).all()


def test_measured_rates_become_a_profile_that_simulates(trace: Path, tmp_path: Path) -> None:
    from tests.trace_capture.test_import_hardware import bandwidth, result, written

    (tmp_path / "bw.json").write_text(bandwidth())
    facts = asked("import-hardware", tmp_path / "bw.json", "--out", tmp_path / "hw.toml")
    assert facts["measured"]["link.h2d_bytes_per_s"]["value"] == 25.2e9
    run = asked("simulate", trace, "--hardware", tmp_path / "hw.toml", "--budget-ratio", 0.5)
    assert run["hardware"] == facts["name"]
    (tmp_path / "bench.md").write_text(written([result(0), result(20)], "markdown"))
    arguments = [
        "import-hardware",
        tmp_path / "bench.md",
        "--out",
        tmp_path / "l.toml",
        "--model",
        "qwen3-30b-a3b:q4_k_m",
    ]
    with pytest.raises(ProfileError, match="give --model, --gpu, --host and --link"):
        studio(*arguments)
    text = studio(*arguments, "--gpu", "rtx4090", "--host", "ddr5-6000-2ch", "--link", "pcie4x16")
    assert "host.read_ratio = 0.65" in text and "next: moe-studio simulate TRACE --hardware" in text
    with pytest.raises(ProfileError, match="is neither FreeToken's bandwidth JSON"):
        studio("import-hardware", tmp_path / "l.toml", "--out", tmp_path / "x.toml")
