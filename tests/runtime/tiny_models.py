"""A tiny random model of every architecture that transformers can load as a causal language model with fused experts.

The architectures are found, not listed: modelling files that carry the experts decorator, joined with transformers' own
table of causal language models. One table of small sizes fits nearly all configurations, since the family shares its
field names; what an architecture needs beside that stands in `CORRECTIONS`.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from runtime.models import quiet_transformers

NUM_EXPERTS, TOP_K, NUM_LAYERS, HIDDEN = 8, 2, 4, 32
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "unpadded_vocab_size": 64,
    "max_position_embeddings": 128,
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": HIDDEN,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    # heads
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 4,
    "rotary_dim": 4,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "rel_extent": 16,
    # latent attention and its indexer
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "o_lora_rank": 8,
    "o_groups": 2,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 8,
    "index_block_size": 8,
    "index_topk_blocks": 2,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "use_mamba_kernels": False,
    # experts
    "intermediate_size": 32,
    "dense_intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "enable_moe_block": True,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "moe_num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "top_k_experts": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 2,
    "n_groups": 2,
    "topk_group": 1,
    "router_hidden_size": 8,
    # speculative heads are not part of the model proper
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}
ONE_HEAD_EACH = {"num_key_value_heads": 4}
HALF_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": HALF_LINEAR,
    "dots3_note": {"vision_config": {"adapter_out_dim": HIDDEN}, "audio_config": {"adapter_out_dim": HIDDEN}},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "gemma4_text": {"global_head_dim": 8},
    "granitemoehybrid": HALF_LINEAR,
    "inkling2_text": {"n_layers_per_attn_res_block": 1},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_gate_rank": 8,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": HALF_LINEAR,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp", "moe"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32, "initializer_range": 0.5},
}

UNDECORATED = {
    "dbrx": partial(
        transformers.DbrxConfig,
        d_model=32,
        n_heads=4,
        n_layers=2,
        vocab_size=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "jetmoe": partial(
        transformers.JetMoeConfig,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=16,
        num_local_experts=4,
        vocab_size=64,
    ),
    "llama4_text": partial(
        transformers.Llama4TextConfig,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        intermediate_size_mlp=16,
        num_local_experts=4,
        vocab_size=64,
        pad_token_id=0,
    ),
    "longcat_flash": partial(
        transformers.LongcatFlashConfig,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        head_dim=4,
        ffn_hidden_size=32,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        vocab_size=64,
    ),
    "doge": partial(
        transformers.DogeConfig,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=2,
        is_moe=True,
        vocab_size=64,
    ),
}
"""Mixtures whose experts do not go through the interface."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A registered architecture: its model type and the folder of its modelling file."""

    model_type: str
    folder: str


@cache
def architectures() -> tuple[Architecture, ...]:
    """Causal language models whose modelling file decorates an experts class, in order of their name."""
    folder_of: dict[str, str] = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = file.read_text()
        if re.search(r"^@use_experts_implementation", text, re.MULTILINE):
            folder_of.update(dict.fromkeys(re.findall(r"^class (\w+)\(", text, re.MULTILINE), file.parent.name))
    found = []
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = names if isinstance(names, str) else names[0]
        if name in folder_of:
            found.append(Architecture(model_type, folder_of[name]))
    return tuple(sorted(found, key=lambda one: one.model_type))


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The smallest useful configuration of an architecture; of a multimodal one, around a tiny text part."""
    kind = CONFIG_MAPPING[model_type]
    own = {field.name for field in dataclasses.fields(kind)}
    if "text_config" in own:
        text = tiny_config(kind.sub_configs["text_config"].model_type, **changes)
        return kind(**({"text_config": text} | CORRECTIONS.get(model_type, {})))
    sizes = {name: value for name, value in SIZES.items() if name in own}
    if "kv_lora_rank" in own:
        sizes |= ONE_HEAD_EACH
    return kind(**(sizes | CORRECTIONS.get(model_type, {}) | changes))


def tiny_model(model_type: str, **changes: Any) -> torch.nn.Module:
    """A tiny random float32 model in evaluation mode, the same for the same arguments."""
    torch.manual_seed(0)
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).eval()
    model.generation_config.eos_token_id = None
    _leave_no_zeros(model)
    return model


def tiny_undecorated(model_type: str, **changes: Any) -> torch.nn.Module:
    """A tiny random model of those in `UNDECORATED`."""
    torch.manual_seed(0)
    with quiet_transformers():
        config = UNDECORATED[model_type](initializer_range=0.2, **changes)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def _leave_no_zeros(model: torch.nn.Module) -> None:
    """Fill what a fresh model leaves at zero and a trained one does not: biases of routers and of experts, tables of
    experts by token id, weights of norms around one. Zaya's biases of balance, which speak against its skip expert."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            tensor.copy_(torch.rand(len(tensor), NUM_EXPERTS).argsort(dim=1)[:, : tensor.shape[1]])
        elif tensor.is_floating_point() and not tensor.any() or name.endswith("balancing_biases"):
            tensor.normal_(std=0.1)
