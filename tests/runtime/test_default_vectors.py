"""Default vectors measured on calibration texts, and their file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.capture import calibrate_model
from runtime.default_vectors import VECTORS_FILE, load_default_vectors
from runtime.models import LoadedModel, read_texts
from tests.studio import studio
from trace_capture.errors import ModelError, StudioError

TEXT = "the night was dark and the road was long " * 8


def test_counts_are_tokens_times_top_k_and_unseen_pairs_are_zero(loaded: LoadedModel, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    vectors = calibrate_model(
        loaded, [TEXT], tmp_path / "v.safetensors", window_tokens=32, progress=lambda a, b: steps.append((a, b))
    )
    tokens = sum(window.shape[1] for window in loaded.windows(TEXT, 32))
    assert vectors.counts.sum(dim=1).tolist() == [tokens * 2] * 4
    assert steps[-1][0] == steps[-1][1] == len(loaded.windows(TEXT, 32))
    stored = load_file(tmp_path / "v.safetensors")
    assert torch.equal(stored["counts"], vectors.counts)
    assert stored["vectors"].shape == (4, 8, 64)
    assert not stored["vectors"][vectors.counts == 0].any()
    assert torch.allclose(load_default_vectors(tmp_path / "v.safetensors").vectors, vectors.means(), atol=1e-3)


def test_no_more_tokens_than_asked_are_used(loaded: LoadedModel, tmp_path: Path) -> None:
    vectors = calibrate_model(loaded, [TEXT], tmp_path / "v.safetensors", window_tokens=16, max_tokens=48)
    assert int(vectors.counts[0].sum()) == 48 * 2


def test_bad_texts_and_damaged_files_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no text"):
        (tmp_path / "empty.txt").write_text(" \f ")
        read_texts([tmp_path / "empty.txt"])
    with pytest.raises(ModelError, match="cannot read texts"):
        read_texts([tmp_path / "absent.txt"])
    (tmp_path / "v.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="calibrate-model"):
        load_default_vectors(tmp_path / "v.safetensors")
    with pytest.raises(StudioError, match="cannot write"):
        calibrate_model(loaded, [TEXT], tmp_path / "empty.txt" / "v.safetensors")


def test_the_command_writes_beside_the_weights_and_capture_then_uses_the_file(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (tmp_path / "texts.txt").write_text(TEXT)
    arguments = ["calibrate-model", "--model", folder, "--texts", tmp_path / "texts.txt", "--json"]
    done = studio(*arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pairs"] == 4 * 8
    assert (folder / VECTORS_FILE).is_file()
    arguments = ["capture", "--model", folder, "--text", "the", "--predict", "quasi-hidden", "--max-new-tokens", "3"]
    done = studio(*arguments, "--out", tmp_path / "t.parquet")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "t.default_vectors.safetensors").exists(), "vectors were measured although a file was there"
