"""Training lowers the loss, repeats bit by bit, resumes exactly, and refuses what cannot work."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.demo_training import pipeline
from runtime.demo_training.__main__ import main
from runtime.demo_training.batches import evaluation_windows, training_batch
from runtime.demo_training.corpus import load_corpus
from runtime.demo_training.model_card import num_parameters
from runtime.demo_training.settings import PRESETS, NetworkShape, TrainingSettings, preset
from runtime.demo_training.train import Checkpoints, Task, Teacher, fingerprint, held_out_loss, train
from trace_capture.errors import StudioError

ROOT = Path(__file__).parents[2]


def _same(left, right):
    return all(torch.equal(left.weights[name], right.weights[name]) for name in left.weights)


@pytest.fixture(scope="module")
def task(tiny_shape, tiny_settings, counting_streams):
    return Task(tiny_shape, tiny_settings, counting_streams)


@pytest.fixture(scope="module")
def finished(task):
    return train(task)


def test_equal_seeds_give_equal_bits_and_other_seeds_do_not(task, finished):
    again = train(task)
    assert again.losses == finished.losses
    assert _same(again, finished)
    other = train(replace(task, settings=replace(task.settings, seed=21)), stop_at=1)
    assert other.losses[0] != finished.losses[0]


def test_loss_falls(finished):
    assert finished.losses[-1] < finished.losses[0] - 1.0


def test_resumed_run_equals_uninterrupted(task, finished, tmp_path):
    checkpoints = Checkpoints(tmp_path / "run.pt", 1e9, fingerprint(task.shape, task.settings, "text"))
    stopped = train(task, checkpoints=checkpoints, stop_at=5)
    assert stopped.step == 5
    resumed = train(task, checkpoints=checkpoints)
    assert resumed.losses == finished.losses
    assert _same(resumed, finished)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_checkpoint_of_another_run_is_refused(task, tmp_path):
    path = tmp_path / "run.pt"
    train(task, checkpoints=Checkpoints(path, 1e9, fingerprint(task.shape, task.settings, "text")), stop_at=1)
    other = Checkpoints(path, 1e9, fingerprint(task.shape, replace(task.settings, seed=1), "text"))
    with pytest.raises(StudioError, match="another run .differs in seed"):
        train(task, checkpoints=other)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\3\4 cut short"])
def test_damaged_checkpoint_is_named(task, tmp_path, content):
    path = tmp_path / "run.pt"
    path.write_bytes(content)
    with pytest.raises(StudioError, match="is damaged"):
        train(task, checkpoints=Checkpoints(path, 1e9, {}))


def test_a_taught_draft_comes_nearer_to_its_teacher(task, finished):
    weights = {name: weight.detach() for name, weight in finished.weights.items()}
    settings = replace(task.settings, teacher_ratio=1.0, teacher_from=0.0)
    taught = train(replace(task, settings=settings, teacher=Teacher(weights, task.shape)))
    assert taught.losses[-1] < taught.losses[0] - 0.5


def test_batches_are_a_function_of_seed_and_step(counting_streams):
    def batch(step, seed=1):
        return training_batch(counting_streams, step=step, seed=seed, num_windows=8, context=16)

    inputs, targets = batch(3)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(batch(3)[0], inputs)
    assert not torch.equal(batch(4)[0], inputs)
    assert not torch.equal(batch(3, seed=2)[0], inputs)


def test_evaluation_windows_do_not_overlap_and_cover_short_text():
    windows = evaluation_windows(np.arange(1000, dtype=np.uint16), num_windows=4, context=99)
    assert windows.shape == (4, 100)
    assert windows[:, 0].tolist() == sorted(set(windows[:, 0].tolist()))
    assert evaluation_windows(np.arange(20, dtype=np.uint16), num_windows=9, context=15).shape == (1, 16)


def test_schedule_warms_up_stays_and_falls():
    settings = TrainingSettings(num_steps=1000)
    assert settings.rate_ratio(0) == pytest.approx(1 / 40)
    assert settings.rate_ratio(40) == settings.rate_ratio(400) == 1.0
    assert settings.rate_ratio(999) == pytest.approx(settings.final_rate_ratio, abs=0.01)
    assert (settings.balance_at(0), settings.balance_at(999)) == (0.01, 0.001)
    assert (settings.context_at(0), settings.context_at(999)) == (256, 512)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (TrainingSettings, {"num_steps": 0}),
        (TrainingSettings, {"batch_tokens": 1000}),
        (TrainingSettings, {"precision": "float16"}),
        (TrainingSettings, {"teacher_ratio": 1.5}),
        (NetworkShape, {"top_k": 64}),
        (NetworkShape, {"num_kv_heads": 3}),
        (NetworkShape, {"num_layers": 0}),
    ],
)
def test_impossible_settings_are_refused(settings, wrong):
    with pytest.raises(StudioError):
        settings(**wrong)


def test_text_shorter_than_a_window_is_refused(task):
    with pytest.raises(StudioError, match="a training window needs"):
        replace(task, streams={"code": np.zeros(50, dtype=np.uint16)})


def test_diverged_loss_is_told(task):
    with pytest.raises(StudioError, match="not a number at step"):
        train(replace(task, settings=replace(task.settings, adam_rate=float("nan"))))


def test_presets_have_the_documented_size():
    assert num_parameters(PRESETS["target"].shape) == 8_245_120
    assert num_parameters(PRESETS["draft"].shape) < 1_000_000
    with pytest.raises(StudioError, match="target, draft"):
        preset("large")


@pytest.fixture(scope="module")
def smoke(tiny_shape, tmp_path_factory):
    """A whole run, from library sources (some of them, to be quick) to the model folder; no download."""
    torch.set_num_threads(1)
    corpus = load_corpus("stdlib", tmp_path_factory.mktemp("unused"))
    some = replace(corpus, train={"code": corpus.train["code"][:60]})
    settings = TrainingSettings(
        num_steps=30, batch_tokens=1024, short_context=128, long_context=128, warmup_steps=5, adam_rate=2e-2
    )
    folder = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "load_corpus", lambda kind, cache: some)
        job = pipeline.Job(folder / "model", folder / "work", "target", tiny_shape, settings, corpus="stdlib")
        losses = pipeline.run_job(job)
    return folder, losses


def test_smoke_run_learns_from_the_library_sources(smoke):
    _, losses = smoke
    assert losses["code"] < np.log(4096) - 0.8


def test_smoke_run_leaves_a_loadable_model_with_its_card(smoke):
    folder, losses = smoke
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.config.eos_token_id == tokenizer.eos_token_id
    generation = json.loads((folder / "model" / "generation_config.json").read_text())
    assert generation["do_sample"] is True
    card = (folder / "model" / "README.md").read_text()
    assert f"{losses['code']:.3f}" in card
    assert "PSF" in card
    assert "sha256:" in card
    assert str(folder) not in card


def test_command_reports_mistakes_in_one_line(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--preset", "huge"]) == 2
    assert main(["--out", str(tmp_path), "--steps", "0"]) == 2
    assert main(["--out", str(tmp_path), "--threads", "0"]) == 2
    assert main(["--out", str(tmp_path), "--corpus", "news"]) == 2
    assert main(["--out", str(tmp_path), "--teacher", str(tmp_path / "none")]) == 2
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file"), "--corpus", "stdlib"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 6


def test_help_is_quick_and_has_an_example():
    code = (
        "import sys\nfrom runtime.demo_training.__main__ import main\ntry:\n    main(['--help'])\nfinally:\n"
        "    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "example:" in done.stdout


def test_held_out_loss_of_fresh_weights_is_that_of_a_guess(task, counting_streams):
    fresh = train(task, stop_at=1).weights
    loss = held_out_loss({name: weight.detach() for name, weight in fresh.items()}, task.shape, counting_streams)
    assert loss["code"] == pytest.approx(np.log(4096), abs=1.0)
