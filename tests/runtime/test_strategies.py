"""Strategies that the live engine shares with the simulator, and those that it must refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.measure import measure
from runtime.models import LoadedModel
from runtime.offloading import offload, offloaded
from simulator.policies.config import parse_config
from tests.runtime.conftest import build
from trace_capture.errors import ConfigError, TraceError

PROMPT = torch.arange(3, 14)[None]
FAST = {"device": {"h2d_bytes_per_s": 1e9, "latency_ns": 0}}
HOT = [[0, 1], [2, 3], [4, 5], [6, 7]]


def greedy(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(
            PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=8, do_sample=False, **options
        )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"cache": {"policy": "belady", "budget_ratio": 0.5}}, "'belady' needs to know the future"),
        ({"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "oracle"}}, "'oracle' needs to know the future"),
        ({"cache": {"policy": "static", "budget_ratio": 0.5}}, "'static' needs cache.hot_experts"),
        ({"cache": {"budget_ratio": 0.5, "preload": True}}, "cache.preload needs cache.hot_experts"),
        ({"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "popularity"}}, "needs prefetch.hot_experts"),
        ({"cache": {"policy": "resident", "budget_ratio": 0.5}}, "needs room for all experts"),
        (
            {"cache": {"policy": "static", "budget_ratio": 0.5, "hot_experts": [[0, 1]]}},
            "hot_experts has 1 lists, .* has 4 MoE layers",
        ),
    ],
)
def test_what_a_live_run_cannot_have_is_refused_and_the_model_left_alone(table: Any, message: str) -> None:
    model = build("mixtral")
    before = greedy(model)
    with pytest.raises(ConfigError, match=message):
        offload(model, parse_config(table))
    assert torch.equal(greedy(model), before)


def test_static_keeps_its_experts_in_their_slots_from_the_start() -> None:
    model = build("mixtral")
    before = greedy(model)
    config = parse_config({"cache": {"policy": "static", "slots_per_layer": [4] * 4, "hot_experts": HOT}} | FAST)
    with offloaded(model, config) as engine:
        assert sorted(engine.preloaded) == [(layer, expert) for layer, ids in enumerate(HOT) for expert in ids]
        assert engine.passes == [] and engine.core.decode_counters.bytes_loaded == 0
        engine.verify_residency()
        assert torch.equal(greedy(model), before)
        assert set(engine.preloaded) <= set(engine.core.resident())
        engine.verify_residency()


def test_preload_is_repeated_after_a_pass_that_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral")
    before = greedy(model)
    table = {"cache": {"slots_per_layer": [4] * 4, "hot_experts": HOT, "preload": True}} | FAST
    with offloaded(model, parse_config(table)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.link, "wait", lambda keys: (_ for _ in ()).throw(RuntimeError("unplugged")))
            with pytest.raises(RuntimeError, match="unplugged"):
                greedy(model)
        lookups = engine.core.prefill_counters.lookups
        assert torch.equal(greedy(model), before)
        assert engine.core.prefill_counters.lookups > lookups > 0, "counts go on"


def test_prompt_in_pieces_counts_as_prefill_to_its_last_token() -> None:
    """11 tokens by 5: the last piece is a single token and must not be taken for a decode pass."""
    model = build("mixtral")
    whole, pieces = greedy(model), greedy(model, prefill_chunk_size=5)
    config = parse_config({"cache": {"budget_ratio": 0.5}, "prefill": {"micro_batch": 5}} | FAST)
    with offloaded(model, config) as engine:
        assert torch.equal(greedy(model), pieces)
        kinds = [(record.is_prefill, record.tokens) for record in engine.passes]
    assert kinds == [(True, 5), (True, 5), (True, 1), *[(False, 1)] * 7]
    assert model.generation_config.prefill_chunk_size is None and "_prefill" not in model.__dict__
    assert torch.equal(greedy(model), whole)


def test_warmup_and_preload_are_stated_and_left_out(loaded: LoadedModel) -> None:
    layers = loaded.model.config.num_hidden_layers
    table = {"cache": {"budget_ratio": 0.5, "hot_experts": [[0, 1]] * layers, "preload": True}} | FAST
    prompts = ["the night was dark", "and the road"]
    full = measure(loaded, prompts, parse_config(table), 8)
    late = measure(loaded, prompts, parse_config(table), 8, warmup_passes=5)
    assert late.info.warmup_passes == 5 and late.info.preloaded_experts == full.info.preloaded_experts == 2 * layers
    assert late.metrics.decode_tokens == full.metrics.decode_tokens - 5 == len(late.token_ns)
    assert late.metrics.lookups < full.metrics.lookups
    preloads = [span for span in late.spans if span.reason == "preload"]
    assert len(preloads) == 2 * layers and all(span.start_ns == span.end_ns == 0 for span in preloads)
    with pytest.raises(TraceError, match="a warm-up of 14 passes leaves nothing of 14 decode passes"):
        measure(loaded, prompts, parse_config(table), 8, warmup_passes=14)


def test_a_configuration_of_the_simulator_runs_live(tmp_path: Path, loaded: LoadedModel) -> None:
    """The ids that the simulator chose travel in the file."""
    from runtime.capture import capture
    from simulator.config_file import load_config, save_config
    from simulator.hot_experts import with_hot_experts

    trace = capture(loaded, ["the night was dark"], tmp_path / "t.parquet", 8)
    chosen = with_hot_experts(parse_config({"cache": {"policy": "static", "budget_ratio": 0.5}} | FAST), trace)
    save_config(chosen, tmp_path / "static.toml")
    again = load_config(tmp_path / "static.toml")
    assert again == chosen and again.cache.hot_experts
    run = measure(loaded, ["and the road"], again, 8)
    assert run.info.preloaded_experts == sum(map(len, again.cache.hot_experts)) > 0
