"""What a layer may do with a prediction: hint and verify change nothing, commit runs the predicted experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.capture import capture
from runtime.models import LoadedModel, Sampling
from runtime.offloading import offload, offloaded, unload
from simulator.policies.config import OffloadConfig, parse_config
from simulator.replay import simulate
from trace_capture.errors import ConfigError
from trace_capture.hardware import HardwareProfile

TOLERANCE = {"cpu": 1e-6, "cuda": 1e-5}
PROMPT = torch.arange(3, 27)[None]
DEVICE = {"h2d_bytes_per_s": 1e9, "latency_ns": 0}


def config(mode: Any, **device: Any) -> OffloadConfig:
    raw = {"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "quasi-hidden", "mode": mode}}
    return parse_config(raw | {"device": DEVICE | device})


def vectors(layers: int = 4) -> torch.Tensor:
    """Random ones, so that predictions are often wrong."""
    return 3 * torch.randn(layers, 8, 64, generator=torch.Generator().manual_seed(1))


def greedy(model: torch.nn.Module, tokens: int = 20) -> torch.Tensor:
    prompt = PROMPT.to(model.device)
    with torch.no_grad():
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)


class Oracle:
    """Predicts what the next router will say, by having been told."""

    name = "quasi-hidden"

    def __init__(self, routing: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        self._routing = iter(routing)
        self._current: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attach(self) -> list[Any]:
        return []

    def predict(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer == 0:
            self._current = next(self._routing)
        return self._current[layer + 1]


def native_routing(model: torch.nn.Module, tokens: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Routing of each decode pass of a greedy continuation, per layer."""
    from trace_capture.hooks import discover

    passes: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    sites = discover(model)

    def hook_for(index: int):
        def hook(_: Any, __: Any, output: Any) -> None:
            if index == 0:
                passes.append([])
            passes[-1].append((output[2], output[1]))

        return hook

    handles = [site.router.register_forward_hook(hook_for(site.index)) for site in sites]
    greedy(model, tokens)
    for handle in handles:
        handle.remove()
    return passes[1:]


@pytest.mark.parametrize("mode", ["hint", "verify"])
def test_hint_and_verify_are_lossless(any_model: torch.nn.Module, mode: str) -> None:
    expected = greedy(any_model)
    with offloaded(any_model, config(mode), default_vectors=vectors()) as engine:
        assert torch.equal(greedy(any_model), expected)
    assert engine.core.decode_counters.prefetch_loads > 0


def test_prefill_is_native_in_every_mode_and_commit_changes_decode(any_model: torch.nn.Module) -> None:
    with torch.no_grad():
        logits = any_model(PROMPT.to(any_model.device)).logits
    expected = _decode_scores(any_model)
    with offloaded(any_model, config("commit"), default_vectors=vectors()) as engine:
        with torch.no_grad():
            assert torch.allclose(
                any_model(PROMPT.to(any_model.device)).logits, logits, atol=TOLERANCE[any_model.device.type]
            )
        found = _decode_scores(any_model)
    assert torch.allclose(found[0], expected[0], atol=TOLERANCE[any_model.device.type]), (
        "the first new token comes from the native prefill"
    )
    recall = [layer.slot_ratio for layer in engine.recall[1:]]
    assert min(recall) < 1.0
    assert any(not torch.allclose(a, b, atol=1e-6) for a, b in zip(found[1:], expected[1:], strict=True))


def _decode_scores(model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    prompt = PROMPT.to(model.device)
    with torch.no_grad():
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).scores


def test_commit_with_an_oracle_is_bit_equal_to_the_baseline(tiny: Any) -> None:
    model = tiny("qwen3_moe")
    expected = greedy(model, 12)
    routing = native_routing(model, 12)
    engine = offload(model, config("commit"), default_vectors=vectors())
    try:
        engine._predictor = Oracle(routing)
        assert torch.equal(greedy(model, 12), expected)
    finally:
        unload(model)
    assert all(layer.slot_ratio == 1.0 == layer.whole_ratio for layer in engine.recall[1:])


def test_layer_0_is_native_and_gets_no_prediction(tiny: Any) -> None:
    model = tiny("mixtral")
    with offloaded(model, config("commit"), default_vectors=vectors()) as engine:
        greedy(model, 6)
    assert engine.core.modes[0] == "hint"
    assert [layer.tokens for layer in engine.recall] == [0, 5, 5, 5]


def test_commit_never_loads_again_what_was_mispredicted(tiny: Any) -> None:
    """With no cache each committed layer copies exactly its top-k: the predicted experts and nothing else."""
    model = tiny("mixtral")
    raw = {"cache": {"budget_ratio": 0.5, "policy": "none"}, "prefetch": {"source": "quasi-hidden", "mode": "commit"}}
    with offloaded(model, parse_config(raw | {"device": DEVICE}), default_vectors=vectors()) as engine:
        greedy(model, 9)
    counters = engine.core.decode_counters
    assert counters.demand_loads == 8 * 2, "only layer 0 loads on demand"
    assert counters.prefetch_loads == 8 * 3 * 2 == counters.prefetch_used


def test_a_mode_per_layer_commits_only_those_layers(loaded: LoadedModel, tmp_path: Path) -> None:
    """The log of a live run and of the simulator agree where committed layers run predicted experts."""
    trace = capture(loaded, ["the night"], tmp_path / "t.parquet", 8, sampling=Sampling(0.0), predict="quasi-hidden")
    mixed = config(("hint", "hint", "hint", "commit"), serial=True)
    log: list[tuple[Any, ...]] = []
    simulate(trace, HardwareProfile.load(Path("rtx4090-pcie4x16")), mixed, log=log)
    executed = [entry[2] for entry in log if entry[0] == "layer_routed" and entry[1] == 3]
    decode = [item for item in trace.passes if item.stop - item.start == 1]
    guesses = trace.predictions("quasi-hidden")
    assert [set(ids) for ids in executed[1:]] == [set(guesses[item.start, 3].tolist()) for item in decode]
    native = [entry[2] for entry in log if entry[0] == "layer_routed" and entry[1] == 2]
    assert [set(ids) for ids in native[1:]] == [set(trace.experts[item.start, 2].tolist()) for item in decode]


@pytest.mark.parametrize("mode", ["verify", "commit", ("hint", "commit")])
def test_modes_are_checked(mode: Any, tiny: Any) -> None:
    if isinstance(mode, tuple):
        with pytest.raises(ConfigError, match="2 entries"):
            offload(tiny("mixtral"), config(mode), default_vectors=vectors())
    else:
        with pytest.raises(ConfigError, match="need a source that predicts"):
            parse_config({"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "previous-token", "mode": mode}})
