"""Architectures outside the experts interface that have an adapter: same numbers, then offloaded like all others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from runtime import adapt, offload, offloaded
from runtime.capture import measure_default_vectors
from runtime.models import LoadedModel, quiet_transformers
from simulator.policies.config import OffloadConfig, parse_config
from tests.runtime.tiny_models import UNDECORATED, tiny_undecorated
from trace_capture.errors import ModelError
from trace_capture.hooks import discover, expert_parameters, model_shape

ADAPTED = ["dbrx", "llama4_text"]
PROMPT = torch.arange(3, 15)[None]


def config(**settings: object) -> OffloadConfig:
    device = {"h2d_bytes_per_s": 4e9, "latency_ns": 0}
    return parse_config({"cache": {"budget_ratio": 0.5}, "device": device} | settings)


def prefill(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


def greedy(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("model_type", ADAPTED)
def test_adapted_and_offloaded_models_equal_the_original(model_type: str) -> None:
    model = tiny_undecorated(model_type)
    logits, tokens = prefill(model), greedy(model)
    assert adapt(model) is model
    assert torch.allclose(prefill(model), logits, atol=1e-5, rtol=1e-5)
    adapted = prefill(model)
    with offloaded(model, config()) as engine:
        assert torch.allclose(prefill(model), logits, atol=1e-5, rtol=1e-5)
        assert torch.equal(greedy(model), tokens)
        engine.verify_residency()
        assert engine.core.prefill_counters.demand_loads > 0
        for bank in engine.store.banks:
            bank["down_proj"].mul_(2)
        assert (prefill(model) - logits).abs().max() > 1e-3, "the output does not come from the slots"
        for bank in engine.store.banks:
            bank["down_proj"].mul_(0.5)
    assert torch.equal(prefill(model), adapted)


@pytest.mark.parametrize("model_type", ADAPTED)
def test_their_routers_are_foreseen(model_type: str) -> None:
    model = adapt(tiny_undecorated(model_type))
    tokens = greedy(model)
    sites = discover(model)
    assert all(site.norm is not None for site in sites)
    shape = model_shape(model, sites, "tiny")
    vectors = measure_default_vectors(LoadedModel(model, None, ""), sites, shape, [PROMPT]).defaults()
    with offloaded(model, config(prefetch={"source": "quasi-hidden"}), default_vectors=vectors) as engine:
        assert torch.equal(greedy(model), tokens)
        assert all(recall.tokens for recall in engine.recall[1:])


def test_llama4_keeps_its_parameters_and_their_names() -> None:
    model = tiny_undecorated("llama4_text")
    before = dict(model.named_parameters())
    adapt(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_a_multimodal_llama4_is_adapted_within(tmp_path: Path) -> None:
    text = UNDECORATED["llama4_text"](initializer_range=0.2)
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vision_output_dim": 32,
        "image_size": 28,
        "patch_size": 14,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    torch.manual_seed(0)
    with quiet_transformers():
        whole = transformers.Llama4Config(text_config=text, vision_config=vision)
        model = transformers.AutoModelForCausalLM.from_config(whole).eval()
    logits = prefill(model)
    adapt(model)
    with offloaded(model, config()):
        assert torch.allclose(prefill(model), logits, atol=1e-5, rtol=1e-5)
    assert torch.allclose(prefill(model), logits, atol=1e-5, rtol=1e-5)


def test_dbrx_cannot_be_saved_once_its_experts_are_fused(tmp_path: Path) -> None:
    model = adapt(tiny_undecorated("dbrx"))
    with pytest.raises(ModelError, match="cannot be saved"):
        model.save_pretrained(tmp_path)


def test_llama4_with_two_experts_per_token_is_refused() -> None:
    with pytest.raises(ModelError, match="2 experts per token"):
        adapt(tiny_undecorated("llama4_text", num_experts_per_tok=2))


def test_models_of_the_interface_are_left_alone_and_others_stay_refused(tiny) -> None:
    model = tiny("mixtral")
    experts = model.model.layers[0].mlp.experts
    assert adapt(model).model.layers[0].mlp.experts is experts
    assert len(expert_parameters(experts)) == 2
    with pytest.raises(ModelError, match="not supported yet"):
        offload(adapt(tiny_undecorated("jetmoe")), config())
