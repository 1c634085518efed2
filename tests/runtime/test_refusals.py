"""What would go wrong without a sign on an offloaded model is refused, and works again after unload."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.offloading import offload, offloaded, unload
from simulator.policies.config import OffloadConfig
from trace_capture.errors import ModelError

HALF = OffloadConfig.for_fraction(0.5)
PROMPT = torch.arange(3, 15)[None]


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_it_cannot_be_saved_nor_loaded_into(
    tiny: Callable[..., torch.nn.Module], tmp_path: Path, architecture: str
) -> None:
    model = tiny(architecture)
    model.save_pretrained(tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = (tmp_path / "model.safetensors").read_bytes()
    with offloaded(model, HALF):
        for save in (model.save_pretrained, model.base_model.save_pretrained):
            with pytest.raises(ModelError, match=r"neither be saved.*unload"):
                save(tmp_path)
        with pytest.raises(ModelError, match="loaded into"):
            model.load_state_dict(state)
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
    model.load_state_dict(state)


def test_it_cannot_be_trained_but_its_loss_can_be_had(tiny: Callable[..., torch.nn.Module]) -> None:
    model = tiny("qwen3_moe")
    expected = model(input_ids=PROMPT, labels=PROMPT).loss
    with offloaded(model, HALF):
        loss = model(input_ids=PROMPT, labels=PROMPT).loss
        assert torch.equal(loss, expected)
        with pytest.raises(ModelError, match="cannot be trained"):
            loss.backward()
    model(input_ids=PROMPT, labels=PROMPT).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "experts" in name)


def test_a_conversion_is_noticed_and_can_be_taken_back(tiny: Callable[..., torch.nn.Module]) -> None:
    model = tiny("mixtral")
    with torch.no_grad(), offloaded(model, HALF):
        logits = model(input_ids=PROMPT).logits
        with pytest.raises(ModelError, match=r"offloaded as torch.float32 on cpu and is torch.float64 on cpu now"):
            model.to(torch.float64)(input_ids=PROMPT)
        assert torch.equal(model.to(torch.float32)(input_ids=PROMPT).logits, logits)


def test_a_copy_says_that_it_has_no_experts(tiny: Callable[..., torch.nn.Module]) -> None:
    model = tiny("qwen3_moe")
    offload(model, HALF)
    with pytest.raises(ModelError, match="copy of an offloaded model"):
        copy.deepcopy(model)(input_ids=PROMPT)
    unload(model)
