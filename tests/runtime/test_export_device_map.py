"""The exported device_map against real transformers models: every weight has a place, and experts the intended one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from accelerate.utils import check_device_map
from transformers import AutoConfig, AutoModelForCausalLM

from simulator.exports import export
from simulator.exports.accelerate import BESIDE_EXPERTS
from simulator.policies.config import parse_config
from tests.simulator.export_cases import sparse_shape

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "shared_expert_intermediate_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 8}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | {"first_k_dense_replace": 1},
    "deepseek_v3": LATENT | GROUPS,
    "glm4_moe": GROUPS,
    "glm4_moe_lite": LATENT | GROUPS,
    "gpt_oss": {"head_dim": 8},
}


@pytest.mark.parametrize("architecture", BESIDE_EXPERTS)
def test_every_weight_is_placed_and_only_experts_leave(architecture: str) -> None:
    config = AutoConfig.for_model(architecture, **(SIZES | EXTRA.get(architecture, {})))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    dense = 1 if "first_k_dense_replace" in EXTRA.get(architecture, {}) else 0
    shape = sparse_shape(dense_first=dense, layers=4 - dense, architecture=architecture, num_experts=4)
    slots = [4, 2, 4, 2][dense:]  # room for all layers but one, which is then the first with few slots
    done = export(parse_config({"cache": {"slots_per_layer": slots}}), "accelerate", shape)
    device_map = json.loads(done.files[0].text)
    check_device_map(model, device_map)
    modules = dict(model.named_modules())
    assert set(device_map) <= set(modules)
    for name in model.state_dict():
        keys = [key for key in device_map if name == key or name.startswith(f"{key}.")]
        assert len(keys) == 1, f"{name} is placed by {keys}"
        leaves = name.startswith("model.layers.1.mlp.experts.")
        assert device_map[keys[0]] == ("cpu" if leaves else 0), name
