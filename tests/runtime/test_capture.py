"""Captured rows are what the model's own routers said, and a killed capture loses nothing that was complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.capture import capture, vectors_beside
from runtime.models import LoadedModel, Sampling
from trace_capture.errors import ConfigError, ModelError, StudioError
from trace_capture.trace import NO_EXPERT, Phase, Trace
from trace_capture.trace_store import partial_path

PROMPTS = ["the night was dark", "and the road was long"]


def test_rows_equal_the_models_own_router_logits(loaded: LoadedModel, tmp_path: Path) -> None:
    trace = capture(loaded, PROMPTS[:1], tmp_path / "t.parquet", 6)
    with torch.no_grad():
        output = loaded.model(torch.tensor(trace.token_id[None], dtype=torch.long), output_router_logits=True)
    for layer, logits in enumerate(output.router_logits):
        expected = logits.topk(trace.shape.top_k, dim=-1)
        assert np.array_equal(trace.experts[:, layer], expected.indices.numpy())
        weights = torch.softmax(logits, dim=-1).gather(1, expected.indices).numpy()
        assert np.allclose(trace.weights[:, layer], weights, atol=1e-3)


def test_passes_phases_and_positions(loaded: LoadedModel, tmp_path: Path) -> None:
    trace = capture(loaded, PROMPTS, tmp_path / "t.parquet", 6, sampling=Sampling(ignore_eos=True))
    lengths = [loaded.encode(prompt, 6).shape[1] for prompt in PROMPTS]
    assert [item.phase for item in trace.passes] == [Phase.PREFILL, *[Phase.DECODE] * 5] * 2
    assert [item.stop - item.start for item in trace.passes if item.phase == Phase.PREFILL] == lengths
    for sequence, length in enumerate(lengths):
        assert trace.position[trace.sequence == sequence].tolist() == list(range(length + 5))
    assert trace.info.complete
    assert Trace.load(tmp_path / "t.parquet").digest == trace.digest
    assert not partial_path(tmp_path / "t.parquet").exists()


def test_equal_seeds_give_equal_traces_and_the_model_is_left_alone(loaded: LoadedModel, tmp_path: Path) -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    hooks = count_hooks(loaded)
    first = capture(loaded, PROMPTS, tmp_path / "a.parquet", 5, sampling=sampling, predict="quasi-hidden")
    second = capture(loaded, PROMPTS, tmp_path / "b.parquet", 5, sampling=sampling, predict="quasi-hidden")
    other = capture(loaded, PROMPTS, tmp_path / "c.parquet", 5, sampling=Sampling(temperature=1.0, seed=8))
    assert first.digest == second.digest
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert not np.array_equal(first.token_id, other.token_id)
    assert count_hooks(loaded) == hooks


def count_hooks(loaded: LoadedModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in loaded.model.modules())


def test_predictions_stand_beside_the_truth_and_vectors_beside_the_trace(loaded: LoadedModel, tmp_path: Path) -> None:
    trace = capture(loaded, PROMPTS, tmp_path / "t.parquet", 6, predict="quasi-hidden")
    predicted = trace.predictions("quasi-hidden")
    assert (predicted[:, 0] == NO_EXPERT).all(), "the first layer has nothing to be predicted from"
    assert (predicted[:, 1:] != NO_EXPERT).all()
    recall = [
        (set(p) & set(t)) != set()
        for p, t in zip(
            predicted[:, 1:].reshape(-1, 2).tolist(), trace.experts[:, 1:].reshape(-1, 2).tolist(), strict=True
        )
    ]
    assert np.mean(recall) > 0.6, "chance would be 0.46"
    assert vectors_beside(tmp_path / "t.parquet").is_file()


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_written(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="exceeds the model's context of 128"):
        capture(loaded, ["dark " * 120], tmp_path / "t.parquet", 20)
    assert list(tmp_path.iterdir()) == []


def test_unknown_predictors_and_unwritable_places_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quasi-hidden"):
        capture(loaded, PROMPTS, tmp_path / "t.parquet", 4, predict="crystal-ball")
    (tmp_path / "file").write_text("")
    with pytest.raises(StudioError, match="cannot write"):
        capture(loaded, PROMPTS, tmp_path / "file" / "t.parquet", 4)


def test_a_killed_capture_keeps_every_complete_pass(model_folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    command = [sys.executable, "-c", "from runtime.cli import main; main()", "capture", "--model", str(model_folder)]
    command += ["--text", PROMPTS[0], "--max-new-tokens", "100", "--out", str(out), "--temperature", "0"]
    for number in range(200):
        command += ["--text", f"{PROMPTS[1]} {number}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if partial_path(out).exists() and partial_path(out).stat().st_size > 60_000:
                break
            time.sleep(0.05)
        assert process.poll() is None, process.stderr.read().decode()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert not out.exists()
    kept = Trace.load(out)
    assert not kept.info.complete
    assert len(kept.passes) > 20
    whole = capture(loaded, PROMPTS[:1], tmp_path / "whole.parquet", 100)
    shared = min(whole.num_tokens, kept.num_tokens)
    assert np.array_equal(kept.experts[:shared], whole.experts[:shared])
    kept.save(tmp_path / "recovered.parquet")
    assert not Trace.load(tmp_path / "recovered.parquet").info.complete
