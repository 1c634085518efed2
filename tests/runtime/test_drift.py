"""Cosine and recall of the quasi-hidden state and of the baseline, by plain calculation and where they are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from runtime.cli import evaluation as verb
from runtime.cli.app import app
from runtime.default_vectors import LayerDefaults
from runtime.drift import DriftReader, LayerDrift
from runtime.evaluate import evaluate
from runtime.intervals import WindowBootstrap
from runtime.models import load_model
from simulator.policies.config import parse_config
from simulator.policies.prefetch import PREFETCH_POLICIES
from tests.runtime.test_quasi_hidden import Watched, defaults_of
from tests.runtime.tiny_models import HIDDEN, NUM_EXPERTS, tiny_model
from trace_capture.hooks import discover

PROMPT = torch.arange(3, 27)[None]
TEXT = Path(str(json.__file__)).read_text()


def drift_of(model: torch.nn.Module, defaults: LayerDefaults, windows: list[torch.Tensor]) -> tuple[LayerDrift, ...]:
    with DriftReader(discover(model), defaults) as reader, torch.no_grad():
        for window in windows:
            reader.begin_window()
            model(input_ids=window, use_cache=False)
    return reader.layers(WindowBootstrap(len(windows)))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2"])
def test_figures_are_what_a_plain_calculation_gives(model_type: str) -> None:
    model = tiny_model(model_type)
    sites = discover(model)
    defaults = defaults_of(model, sites, PROMPT[:, :7])
    found = drift_of(model, defaults, [PROMPT])
    seen = Watched(model, sites, PROMPT)
    seen.predictor._vectors = defaults.vectors
    seen.predictor._beside = defaults.beside
    assert [one.layer for one in found] == [site.index for site in sites[1:]]
    for before, after, one in zip(sites, sites[1:], found, strict=False):
        with torch.no_grad():
            truth = after.normed(seen.residual(after.index))
            quasi = after.normed(seen.predictor.state(before.index, *seen.routed[before.index]))
            earlier = before.normed(seen.residual(before.index))
        ids = seen.routed[after.index][0].tolist()
        for state, cosine, recall in (
            (quasi, one.quasi_cosine, one.quasi_recall),
            (earlier, one.input_cosine, one.input_recall),
        ):
            expected = torch.nn.functional.cosine_similarity(state, truth, dim=-1).mean()
            assert cosine.value == pytest.approx(expected.item(), abs=1e-5)
            with torch.no_grad():
                named = after.choose(state)[0].tolist()
            hits = sum(len(set(a) & set(b)) for a, b in zip(named, ids, strict=True))
            assert recall.value == pytest.approx(hits / (len(ids) * 2))
        assert one.tokens == PROMPT.shape[1]


def test_the_true_state_has_cosine_one_and_recall_one_and_the_baseline_has_not() -> None:
    """Means over the one token that is judged, and no attention: q_l is then the true router input."""
    model = tiny_model("qwen2_moe")
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, __, out: (0 * out[0], *out[1:]))
    token = PROMPT[:, 4:5]
    found = drift_of(model, defaults_of(model, discover(model), token), [token])
    for one in found:
        assert one.quasi_cosine.value == pytest.approx(1.0, abs=1e-6)
        assert one.quasi_recall.value == 1.0
        assert one.input_cosine.value < 0.999


def test_a_model_is_left_without_hooks() -> None:
    model = tiny_model("mixtral")
    drift_of(model, LayerDefaults(torch.zeros(4, NUM_EXPERTS, HIDDEN)), [PROMPT])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hints_are_right_as_often_as_the_router_on_q_and_the_demo_model_is_closer_by_q_than_by_s() -> None:
    raw = {"cache": {"budget_ratio": 1.0}, "prefetch": {"source": "quasi-hidden"}}
    fast = parse_config(raw | {"device": {"h2d_bytes_per_s": 1e12, "latency_ns": 0}})
    result = evaluate(load_model("demo"), [TEXT], fast, modes=["hint"], max_windows=4)
    for recall, one in zip(result.modes[0].recall, result.drift, strict=True):
        assert recall.layer == one.layer
        assert recall.slot.value == pytest.approx(one.quasi_recall.value, abs=2e-3)
        assert one.quasi_cosine.low is not None and one.quasi_cosine.low <= one.quasi_cosine.value <= 1
    better = [one.quasi_cosine.value > one.input_cosine.value for one in result.drift]
    assert sum(better) > len(better) / 2


def test_a_source_without_a_state_has_no_drift(loaded: Any) -> None:
    raw = {"cache": {"budget_ratio": 1.0}, "prefetch": {"source": "previous-token"}}
    config = parse_config(raw | {"device": {"h2d_bytes_per_s": 1e12, "latency_ns": 0}})
    assert evaluate(loaded, [TEXT], config, modes=["hint"], window_tokens=32, max_windows=2).drift == ()


def test_the_verb_streams_names_every_source_and_shows_both_predictors(tmp_path: Path) -> None:
    assert verb.evaluate_command is not None
    text = tmp_path / "t.txt"
    text.write_text(TEXT)
    common = ["evaluate", "--texts", str(text), "--modes", "commit", "--max-windows", "2", "--window-tokens", "32"]
    shown = CliRunner().invoke(app, [*common, "--prefetch", "hybrid"])
    assert shown.exit_code == 0, shown.output
    for words in ("cosine q", "cosine s", "recall q, %", "recall s, %"):
        assert words in shown.output
    whole = json.loads(CliRunner().invoke(app, [*common, "--no-stream", "--json"]).stdout)
    streamed = json.loads(CliRunner().invoke(app, [*common, "--stream", "--json"]).stdout)
    assert (whole["reference"], streamed["reference"]) == ("untouched", "offloaded")
    assert streamed["drift"] == whole["drift"] and len(whole["drift"]) == 11
    assert streamed["modes"][0]["kl_nats"]["value"] == pytest.approx(whole["modes"][0]["kl_nats"]["value"], abs=1e-6)
    help_text = CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "200"}).output
    assert all(name in help_text for name in PREFETCH_POLICIES)
    missing = CliRunner().invoke(app, [*common, "--prefetch", "estimator", "--estimator", str(tmp_path / "none")])
    assert "no usable estimator" in str(missing.exception or missing.output)
