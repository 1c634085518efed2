"""Shapes of well-known models by name, so that a what-if needs neither download nor capture.

Each entry holds the fields of the model's published `config.json`; `trace_capture.config_shape` does the arithmetic.
The fields come from the models' cards and configurations as general knowledge, and were compared where they could
be: with the defaults of transformers 5.24 (gpt-oss-120b, GLM-4.7-Flash, Mixtral-8x7B) and with the sizes in
Speculating Experts (arXiv 2603.19289, tables 1 and 2: Qwen3-30B-A3B, Qwen3-235B-A22B, gpt-oss-20b).
"""

from __future__ import annotations

import difflib
from typing import Any

from trace_capture.config_shape import shape_from_config
from trace_capture.errors import ModelError
from trace_capture.model_shape import ModelShape

_QWEN3_30B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
_QWEN3_235B = _QWEN3_30B | {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
}
_GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "vocab_size": 201088,
}
_GPT_OSS_20B = _GPT_OSS_120B | {"num_hidden_layers": 24, "num_local_experts": 32}
_MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
_GLM_4_7_FLASH = {
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 47,
    "hidden_size": 2048,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "intermediate_size": 10240,
    "first_k_dense_replace": 1,
    "num_attention_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
_DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10944,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
_MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "glm-4.7-flash": _GLM_4_7_FLASH,
    "gpt-oss-120b": _GPT_OSS_120B,
    "gpt-oss-120b-mxfp4": _GPT_OSS_120B | _MXFP4,
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-20b-mxfp4": _GPT_OSS_20B | _MXFP4,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "qwen3-235b-a22b": _QWEN3_235B,
    "qwen3-30b-a3b": _QWEN3_30B,
}


def known_shape(name: str) -> ModelShape:
    """The shape of a well-known model, in bfloat16 unless the name says otherwise.

    Raises:
        ModelError: the name is not in `known_shape_names`.
    """
    key = name.lower()
    if key not in _CONFIGS:
        near = difflib.get_close_matches(key, _CONFIGS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ModelError(
            f"no built-in shape of model '{name}'; {hint}choose one of {', '.join(known_shape_names())}, "
            "or give the model's config.json"
        )
    return shape_from_config(_CONFIGS[key], key, where=f"built-in shape '{key}'")


def known_shape_names() -> list[str]:
    """Names of the models with a built-in shape."""
    return sorted(_CONFIGS)
