"""Taking experts out of a model and putting them back; refusals in one clear sentence."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from runtime import OffloadConfig, offload, offloaded, unload
from runtime.store import ExpertStore
from simulator.policies.config import parse_config
from trace_capture.errors import ConfigError, ModelError
from trace_capture.hooks import discover, expert_parameters


def test_unload_restores_every_bit_and_the_implementation(any_model: torch.nn.Module) -> None:
    before = {name: value.clone() for name, value in any_model.state_dict().items()}
    parameters = {name: id(parameter) for name, parameter in any_model.named_parameters()}
    implementation = any_model.config._experts_implementation
    offload(any_model, OffloadConfig.for_fraction(0.5))
    assert sum(parameter.numel() for parameter in any_model.parameters()) < sum(v.numel() for v in before.values()) / 2
    unload(any_model)
    after = any_model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {name: id(parameter) for name, parameter in any_model.named_parameters()} == parameters
    assert any_model.config._experts_implementation == implementation
    assert not any_model._forward_pre_hooks


def test_the_pool_holds_half_of_the_experts_when_asked_for_half(tiny) -> None:
    model = tiny("mixtral")
    with offloaded(model, OffloadConfig.for_fraction(0.5)) as engine:
        assert sum(pool.num_bytes for pool in engine.pools) == engine.shape.total_expert_bytes // 2


def test_the_default_fraction_runs_without_further_settings(tiny) -> None:
    model = tiny("mixtral")
    with offloaded(model, OffloadConfig.for_fraction(0.5)), torch.no_grad():
        assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False).shape == (1, 6)


def test_a_model_without_fused_experts_is_refused() -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    dense = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    with pytest.raises(ModelError, match="no experts module"):
        offload(dense, OffloadConfig.for_fraction(0.5))


def test_a_budget_below_top_k_is_refused_and_leaves_the_model_alone(tiny) -> None:
    model = tiny("mixtral")
    with pytest.raises(ConfigError, match="top-2"):
        offload(model, OffloadConfig.for_fraction(0.1))
    assert all(parameter.numel() for parameter in expert_parameters(model.model.layers[0].mlp.experts).values())


def test_offloading_twice_and_unloading_nothing_are_refused(tiny) -> None:
    model = tiny("mixtral")
    with pytest.raises(ModelError, match="nothing to unload"):
        unload(model)
    with offloaded(model, OffloadConfig.for_fraction(0.5)), pytest.raises(ModelError, match="already offloaded"):
        offload(model, OffloadConfig.for_fraction(0.5))


def test_cuda_is_refused_for_a_model_on_the_cpu(tiny) -> None:
    with pytest.raises(ConfigError, match="move the model to CUDA"):
        offload(tiny("mixtral"), OffloadConfig.for_fraction(0.5, backend="cuda"))


def test_prefetch_without_default_vectors_names_the_command_that_makes_them(tiny) -> None:
    config = parse_config({"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "quasi-hidden"}})
    with pytest.raises(ModelError, match="moe-studio capture --predict quasi-hidden"):
        offload(tiny("mixtral"), config)


def test_a_model_can_be_copied_and_collected_after_unload(tiny) -> None:
    model = tiny("mixtral")
    with offloaded(model, OffloadConfig.for_fraction(0.5)):
        pass
    twin = copy.deepcopy(model)
    assert torch.equal(twin.lm_head.weight, model.lm_head.weight)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="page-locked memory can be had beside a CUDA device")
def test_where_memory_cannot_be_locked_the_user_is_told_and_experts_are_kept(tiny) -> None:
    model = tiny("mixtral")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    store = ExpertStore(discover(model), pinned=True)
    assert "pageable memory" in store.note
    assert torch.equal(store.banks[1]["down_proj"][3], before["model.layers.1.mlp.experts.down_proj"][3])
    store.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
