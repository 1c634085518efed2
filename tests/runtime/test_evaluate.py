"""What modes cost in quality: lossless ones nothing, commit a little, and random predictions a lot."""

from __future__ import annotations

import calendar
import heapq
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import runtime.evaluate
from runtime.checkpoint import load_streamed
from runtime.cli import evaluation as verb
from runtime.cli.app import app
from runtime.default_vectors import DefaultVectors, save_default_vectors
from runtime.evaluate import Evaluation, evaluate
from runtime.intervals import WindowBootstrap
from runtime.models import LoadedModel, load_model
from runtime.offloading import IMPLEMENTATION, offload, offloaded
from simulator.policies.config import OffloadConfig, parse_config
from trace_capture.errors import ConfigError, ModelError

TEXTS = [Path(str(module.__file__)).read_text() for module in (heapq, calendar, textwrap)]
FAST = {"h2d_bytes_per_s": 1e12, "latency_ns": 0}


def config(source: str = "quasi-hidden", mode: Any = "hint", ratio: float = 1.0) -> OffloadConfig:
    prefetch = {"source": source, "mode": mode}
    return parse_config({"cache": {"budget_ratio": ratio}, "prefetch": prefetch, "device": FAST})


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("demo")


@pytest.fixture(scope="module")
def demo_scores(demo: LoadedModel) -> Evaluation:
    return evaluate(demo, TEXTS, config(), max_windows=12)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random ones for the tiny model, so that predictions are often wrong."""
    found = DefaultVectors.empty(4, 8, 64)
    found.sums.copy_(3 * torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(1)))
    found.counts.fill_(1)
    out = tmp_path_factory.mktemp("vectors") / "vectors.safetensors"
    save_default_vectors(found, out, "random")
    return out


def test_hint_and_verify_are_the_exact_model_and_commit_is_not(loaded: LoadedModel, vectors: Path) -> None:
    steps: list[tuple[int, int]] = []
    result = evaluate(
        loaded,
        TEXTS[:1],
        config(ratio=0.5),
        window_tokens=64,
        max_windows=4,
        vectors_path=vectors,
        progress=lambda done, total: steps.append((done, total)),
    )
    hint, verify, commit = result.modes
    for mode in (hint, verify):
        assert abs(mode.kl_nats.value) < 1e-6
        assert mode.agreement.value == 1.0
        assert mode.max_logit_difference < 1e-5
        assert mode.perplexity.value == pytest.approx(result.exact_perplexity.value, rel=1e-6)
    assert commit.kl_nats.value > 1e-6, "an untrained model is nearly indifferent to its experts"
    assert commit.max_logit_difference > 1e-3
    assert (result.num_windows, result.reference) == (4, "untouched")
    assert 3 * 63 < result.num_tokens <= 4 * 63, "the last window of a text may be short"
    assert steps == [(done, 16) for done in range(1, 17)]
    assert loaded.model.config._experts_implementation != IMPLEMENTATION
    assert [layer.layer for layer in commit.recall] == [1, 2, 3]
    assert all(layer.tokens == result.num_tokens + 4 for layer in commit.recall)
    assert Evaluation.model_validate_json(result.model_dump_json()) == result


def test_figures_are_what_a_plain_calculation_gives(loaded: LoadedModel, vectors: Path) -> None:
    (window,) = loaded.windows(TEXTS[0], 64)[:1]
    text = loaded.tokenizer.decode(window[0])
    result = evaluate(loaded, [text], config(), modes=["commit"], vectors_path=vectors)
    with torch.no_grad():
        exact = loaded.model(input_ids=window).logits[0, :-1].double().log_softmax(-1)
        with offloaded(loaded.model, config(mode="commit"), default_vectors=vectors) as engine:
            engine.speculate_in_prefill = True
            found = loaded.model(input_ids=window).logits[0, :-1].double().log_softmax(-1)
    targets = window[0, 1:]
    loss = torch.nn.functional.nll_loss
    (commit,) = result.modes
    assert result.exact_perplexity.value == pytest.approx(loss(exact, targets).exp().item(), rel=1e-5)
    assert commit.perplexity.value == pytest.approx(loss(found, targets).exp().item(), rel=1e-5)
    divergence = torch.nn.functional.kl_div(found, exact, reduction="batchmean", log_target=True)
    assert commit.kl_nats.value == pytest.approx(divergence.item(), rel=1e-3, abs=1e-6)
    assert commit.agreement.value == pytest.approx((found.argmax(-1) == exact.argmax(-1)).float().mean().item())
    assert [layer.slot.value for layer in commit.recall] == [layer.slot_ratio for layer in engine.recall[1:]]
    assert commit.kl_nats.low is None, "one window gives no interval"


def test_commit_costs_the_demo_model_a_few_percent(demo_scores: Evaluation) -> None:
    hint, verify, commit = demo_scores.modes
    assert abs(hint.kl_nats.value) < 1e-6 > abs(verify.kl_nats.value)
    assert hint.agreement.value == 1.0 == verify.agreement.value
    assert 1.0 < commit.perplexity_ratio.value < 1.06
    assert 0.005 < commit.kl_nats.value < 0.1
    assert 0.8 < commit.agreement.value < 1.0


def test_top_ranked_experts_are_foreseen_best(demo_scores: Evaluation) -> None:
    """Speculating Experts, figure 5: the experts of largest weight are matched most often."""
    for mode in demo_scores.modes:
        assert mode.mean_recall is not None
        assert mode.mean_recall.first.value > mode.mean_recall.slot.value > mode.mean_recall.whole.value
        assert mode.mean_recall.slot.value == pytest.approx(np.mean([layer.slot.value for layer in mode.recall]))
        assert mode.mean_recall.slot.value > 0.8


class Dice:
    """Predicts at random."""

    name = "quasi-hidden"

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._generator = torch.Generator().manual_seed(0)

    def attach(self) -> list[Any]:
        return []

    def predict(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.rand(ids.shape[0], self._num_experts, generator=self._generator)
        return scores.topk(ids.shape[1]).indices, weights


def test_commit_executes_what_is_predicted(
    demo: LoadedModel, demo_scores: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_dice(*arguments: Any, **options: Any) -> Any:
        engine = offload(*arguments, **options)
        engine._predictor = Dice(engine.shape.num_experts)
        return engine

    monkeypatch.setattr(runtime.evaluate, "offload", with_dice)
    hint, commit = evaluate(demo, TEXTS, config(), modes=["hint", "commit"], max_windows=4).modes
    assert abs(hint.kl_nats.value) < 1e-6
    assert commit.kl_nats.value > 20 * demo_scores.modes[2].kl_nats.value
    assert commit.perplexity_ratio.value > 2
    assert commit.mean_recall is not None
    low, high = commit.mean_recall.slot.low, commit.mean_recall.slot.high
    assert low is not None and high is not None and low - 0.01 < 4 / 32 < high + 0.01


def test_intervals_hold_the_value_and_shrink_with_more_windows(demo: LoadedModel, demo_scores: Evaluation) -> None:
    few = evaluate(demo, TEXTS, config(), modes=["commit"], max_windows=3).modes[0]
    many = demo_scores.modes[2]
    for mode in (few, many):
        figures = [mode.perplexity, mode.perplexity_ratio, mode.kl_nats, mode.agreement]
        figures += [figure for layer in mode.recall for figure in (layer.slot, layer.whole, layer.first)]
        assert all(figure.low <= figure.value <= figure.high for figure in figures)
    assert many.perplexity_ratio.high - many.perplexity_ratio.low < many.perplexity.high - many.perplexity.low
    totals = np.random.default_rng(0).normal(100, 20, 400)
    widths = []
    for windows in (10, 100, 400):
        found = WindowBootstrap(windows).estimate(totals[:windows], [50] * windows)
        assert found.low is not None and found.high is not None
        widths.append(found.high - found.low)
    assert widths[0] > 1.5 * widths[1] > 2 * widths[2]
    assert widths[2] == pytest.approx(2 * 1.96 * totals.std() / 50 / np.sqrt(400), rel=0.1), "the normal interval"
    assert WindowBootstrap(9, 1).estimate(totals[:9], [1] * 9) == WindowBootstrap(9, 1).estimate(totals[:9], [1] * 9)


def test_a_mode_per_layer_costs_less_than_commit_everywhere(demo: LoadedModel, demo_scores: Evaluation) -> None:
    mixed = config(mode=("hint", "hint", "hint", *["commit"] * 9))
    (found,) = evaluate(demo, TEXTS, mixed, modes=["config"], max_windows=12).modes
    assert 0 < found.kl_nats.value < demo_scores.modes[2].kl_nats.value


def test_mistakes_are_told(loaded: LoadedModel, vectors: Path) -> None:
    with pytest.raises(ConfigError, match="unknown mode 'comit'; did you mean 'commit'"):
        evaluate(loaded, TEXTS, config(), modes=["comit"])
    with pytest.raises(ConfigError, match="no mode to evaluate"):
        evaluate(loaded, TEXTS, config(), modes=[])
    with pytest.raises(ConfigError, match="mode commit: .*need a source that predicts"):
        evaluate(loaded, TEXTS, config("previous-token"), modes=["hint", "commit"])
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        evaluate(loaded, TEXTS, config(), window_tokens=1)
    with pytest.raises(ModelError, match="no text to evaluate on"):
        evaluate(loaded, ["a"], config(), vectors_path=vectors)
    with (
        offloaded(loaded.model, config(), default_vectors=vectors),
        pytest.raises(ModelError, match=r"call unload\(model\) first"),
    ):
        evaluate(loaded, TEXTS, config(), vectors_path=vectors)


def test_without_a_predictor_there_is_no_recall(loaded: LoadedModel) -> None:
    (hint,) = evaluate(loaded, TEXTS[:1], config("none"), modes=["hint"], window_tokens=32, max_windows=2).modes
    assert (hint.mean_recall, hint.recall, hint.agreement.value) == (None, (), 1.0)


def test_experts_that_stay_in_their_files_are_judged_too(loaded: LoadedModel, vectors: Path) -> None:
    """Such a model runs only while it is offloaded: the reference is the offloaded one without prediction."""
    options: dict[str, Any] = {"window_tokens": 64, "max_windows": 2, "vectors_path": vectors}
    whole = evaluate(loaded, TEXTS[:1], config(), **options)
    streamed = evaluate(load_streamed(loaded.path), TEXTS[:1], config(), **options)
    assert streamed.reference == "offloaded"
    assert streamed.exact_perplexity.value == pytest.approx(whole.exact_perplexity.value, rel=1e-6)
    for mode, same in zip(streamed.modes, whole.modes, strict=True):
        assert mode.kl_nats.value == pytest.approx(same.kl_nats.value, abs=1e-7)


def test_the_verb_prints_a_table_or_json(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    assert verb.evaluate_command is not None
    text = tmp_path / "t.txt"
    text.write_text(TEXTS[0] + "\f" + TEXTS[1])
    common = ["evaluate", "--texts", str(text), "--modes", "hint,commit", "--max-windows", "2"]
    shown = CliRunner().invoke(app, [*common, "--out", str(tmp_path / "new" / "r.json")])
    assert shown.exit_code == 0, shown.output
    for words in ("exact", "commit", "hint: largest difference of a logit 0: lossless", "rank 1", "bootstrap over 2"):
        assert words in shown.output
    assert "next: moe-studio" in shown.output
    assert "…" not in shown.output, "figures are cut off"
    saved = json.loads((tmp_path / "new" / "r.json").read_text())
    assert [mode["mode"] for mode in saved["modes"]] == ["hint", "commit"]
    printed = json.loads(CliRunner().invoke(app, [*common, "--json"]).stdout)
    assert printed["modes"][1]["kl_nats"] == saved["modes"][1]["kl_nats"]
