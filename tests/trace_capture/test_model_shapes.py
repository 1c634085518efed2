"""Built-in shapes and shapes from config.json, against published sizes and against transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trace_capture.config_shape import SUPPORTED_TYPES, shape_from_config, shape_from_config_json
from trace_capture.errors import ModelError
from trace_capture.known_shapes import known_shape, known_shape_names

PUBLISHED = {
    # name: MoE layers, E, K, shared, expert matrices in bytes, parameters in 10^9
    "qwen3-30b-a3b": (48, 128, 8, 0, 9_437_184, 30.5),
    "gpt-oss-20b": (24, 32, 4, 0, 49_766_400, 20.9),
    "gpt-oss-120b": (36, 128, 4, 0, 49_766_400, 116.8),
    "glm-4.7-flash": (46, 64, 4, 1, 18_874_368, 30.0),
    "qwen3-235b-a22b": (94, 128, 8, 0, 37_748_736, 235.0),
    "deepseek-v2-lite": (26, 64, 6, 2, 17_301_504, 15.7),
    "mixtral-8x7b": (32, 8, 2, 0, 352_321_536, 46.7),
}
GPT_OSS_BIAS_BYTES = (5_760 + 2_880) * 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_in_shape_has_the_published_counts_and_sizes(name: str) -> None:
    layers, experts, top_k, shared, expert_bytes, billions = PUBLISHED[name]
    shape = known_shape(name)
    assert (shape.num_moe_layers, shape.num_experts, shape.top_k, shape.num_shared_experts) == (
        layers,
        experts,
        top_k,
        shared,
    )
    biases = GPT_OSS_BIAS_BYTES if name.startswith("gpt-oss") else 0
    assert set(shape.expert_bytes) == {expert_bytes + biases}
    assert shape.weight_dtype == "bfloat16"
    embedding = shape.head_bytes  # as large as the head in all of these
    total = shape.total_expert_bytes + sum(shape.dense_bytes) + shape.head_bytes + embedding
    assert total / 2e9 == pytest.approx(billions, rel=0.005)


def test_dense_first_layer_is_counted_with_the_first_moe_layer() -> None:
    shape = known_shape("deepseek-v2-lite")
    assert shape.moe_layer_ids == tuple(range(1, 27)) and shape.num_layers == 27
    dense_mlp, shared, router = 3 * 2048 * 10944 * 2, 3 * 2048 * 2816 * 2, 64 * 2048 * 2
    extra = shape.dense_bytes[0] - shape.dense_bytes[1]
    assert extra == dense_mlp + (shape.dense_bytes[1] - shared - router)


def test_cache_bytes_per_token_of_grouped_and_latent_attention() -> None:
    assert known_shape("qwen3-30b-a3b").kv_bytes_per_token == 48 * 2 * 4 * 128 * 2
    assert known_shape("deepseek-v2-lite").kv_bytes_per_token == 27 * (512 + 64) * 2


def test_mxfp4_experts_are_as_large_as_the_published_tensors() -> None:
    """Blocks [5760, 90, 16] and [2880, 90, 16] bytes, one scale byte per block, biases in bfloat16."""
    shape = known_shape("gpt-oss-120b-mxfp4")
    assert shape.expert_bytes[0] == (5760 + 2880) * 90 * 17 + GPT_OSS_BIAS_BYTES
    assert shape.dense_bytes == known_shape("gpt-oss-120b").dense_bytes
    assert shape.weight_dtype == "mxfp4"


def test_names_are_found_whatever_their_case_and_unknown_ones_get_a_hint() -> None:
    assert known_shape("Qwen3-30B-A3B") == known_shape("qwen3-30b-a3b")
    assert set(PUBLISHED) <= set(known_shape_names())
    with pytest.raises(ModelError, match=r"'qwen3-30b'; did you mean 'qwen3-30b-a3b'\? .*config\.json"):
        known_shape("qwen3-30b")


QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}


def test_sparse_step_and_dense_layers_choose_the_moe_layers() -> None:
    shape = shape_from_config(QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, "x")
    assert shape.moe_layer_ids == (1, 5)
    whole = shape_from_config(QWEN, "x")
    assert sum(shape.dense_bytes) == sum(whole.dense_bytes) + 4 * (3 * 64 * 96 * 2) - 4 * 8 * 64 * 2


def test_dense_layers_behind_the_last_moe_layer_are_counted_too() -> None:
    shape = shape_from_config(QWEN | {"mlp_only_layers": [4, 5]}, "x")
    assert shape.moe_layer_ids == (0, 1, 2, 3)
    assert shape.dense_bytes[3] - shape.dense_bytes[2] == 2 * (shape.dense_bytes[0] - 8 * 64 * 2 + 3 * 64 * 96 * 2)


def test_float8_weights_carry_block_scales() -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    shape = shape_from_config(QWEN | {"quantization_config": quantised}, "x")
    assert shape.expert_bytes[0] == 3 * (64 * 32 + 4 * 4 * 2) and shape.weight_dtype == "float8"
    assert shape.dense_bytes[0] < shape_from_config(QWEN, "x").dense_bytes[0]


def test_float32_doubles_every_byte() -> None:
    half, full = shape_from_config(QWEN, "x"), shape_from_config(QWEN | {"torch_dtype": "float32"}, "x")
    assert full.expert_bytes[0] == 2 * half.expert_bytes[0] and full.dense_bytes[0] == 2 * half.dense_bytes[0]
    assert full.weight_dtype == "float32"


def test_file_or_folder_and_the_name_it_gets(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    shape = shape_from_config_json(folder)
    assert shape == shape_from_config_json(folder / "config.json") == shape_from_config(QWEN, "My-Model")
    assert shape_from_config_json(folder, "other").name == "other"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' has no shape arithmetic here .*capture the model once"),
        ({"model_type": None}, "model_type 'None'"),
        ({"num_experts": None}, "none of num_experts, num_local_experts, n_routed_experts is there"),
        ({"hidden_size": None}, "field 'hidden_size' is missing"),
        ({"hidden_size": "64"}, "field 'hidden_size' is '64', wanted a whole number"),
        ({"vocab_size": -1}, "field 'vocab_size' is -1"),
        ({"num_experts_per_tok": 9}, "top_k = 9 exceeds num_experts = 8"),
        ({"num_experts_per_tok": 0}, "top_k: "),
        ({"decoder_sparse_step": 9}, "no layer has experts"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types has not one entry for each of 6 layers"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, wanted a list"),
        ({"torch_dtype": "int3"}, "torch_dtype 'int3'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' has no byte arithmetic"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8' has no byte arithmetic"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}, "weight_block_size"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads"),
    ],
)
def test_config_that_cannot_be_counted_is_one_clear_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"here.json: .*{message}") as caught:
        shape_from_config(QWEN | change, "x", where="here.json")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read .*gone"):
        shape_from_config_json(tmp_path / "gone")
    for content, message in ((b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "holds no JSON object")):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=message):
            shape_from_config_json(tmp_path)


SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": ROUTED | LATENT | {"q_lora_rank": None},
    "deepseek_v3": ROUTED | LATENT | ONE_GROUP,
    "glm4_moe": ROUTED | ONE_GROUP | {"use_qk_norm": True, "attention_bias": True, "head_dim": 24},
    "glm4_moe_lite": ROUTED | LATENT | ONE_GROUP | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 24},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 24, "mlp_only_layers": [1]},
}


def counted_bytes(model: Any) -> tuple[int, int]:
    """Bytes in all decoder layers, and those of the final norm and head: bfloat16, selection biases float32."""
    parameters = {name: 2 * tensor.numel() for name, tensor in model.named_parameters()}
    biases = [4 * tensor.numel() for name, tensor in model.named_buffers() if name.endswith("correction_bias")]
    layers = sum(size for name, size in parameters.items() if ".layers." in name) + sum(biases)
    return layers, parameters["model.norm.weight"] + parameters["lm_head.weight"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_arithmetic_equals_the_parameters_of_the_transformers_model(model_type: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = SMALL | FAMILIES[model_type]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(fields | {"model_type": model_type}, "x")
    layers, head = counted_bytes(model)
    assert shape.num_experts * sum(shape.expert_bytes) + sum(shape.dense_bytes) == layers
    assert shape.head_bytes == head
    assert set(FAMILIES) | {"kimi_k2"} == set(SUPPORTED_TYPES)
