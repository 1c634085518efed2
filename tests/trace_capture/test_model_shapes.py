"""Built-in shapes and shapes from config.json, against published sizes and against transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trace_capture.config_shape import SUPPORTED_TYPES, shape_from_config, shape_from_config_json
from trace_capture.errors import ModelError
from trace_capture.known_configs import KNOWN_ALIASES
from trace_capture.known_shapes import known_shape, known_shape_names
from trace_capture.model_shape import AttentionKind, ModelShape

PUBLISHED = {
    # name: MoE layers, E, K, shared, expert matrices in bytes, parameters in 10^9
    "qwen3-30b-a3b": (48, 128, 8, 0, 9_437_184, 30.5),
    "gpt-oss-20b": (24, 32, 4, 0, 49_766_400, 20.9),
    "gpt-oss-120b": (36, 128, 4, 0, 49_766_400, 116.8),
    "glm-4.7-flash": (46, 64, 4, 1, 18_874_368, 30.0),
    "qwen3-235b-a22b": (94, 128, 8, 0, 37_748_736, 235.0),
    "deepseek-v2-lite": (26, 64, 6, 2, 17_301_504, 15.7),
    "mixtral-8x7b": (32, 8, 2, 0, 352_321_536, 46.7),
    "deepseek-v3": (58, 256, 8, 1, 88_080_384, 671.0),
    "deepseek-v4-flash": (43, 256, 6, 1, 50_331_648, 284.0),
    "gemma-4-26b-a4b": (30, 128, 8, 1, 11_894_784, 26.0),
    "glm-4.5-air": (45, 128, 8, 1, 34_603_008, 106.9),
    "glm-4.7": (89, 160, 8, 1, 47_185_920, 353.0),
    "glm-5.1": (75, 256, 8, 1, 75_497_472, 744.0),
    "kimi-k2": (60, 384, 8, 1, 88_080_384, 1026.0),
    "laguna-s-2.1": (47, 256, 10, 1, 18_874_368, 118.0),
    "llama-4-maverick": (24, 128, 1, 1, 251_658_240, 401.0),
    "llama-4-scout": (48, 16, 1, 1, 251_658_240, 108.0),
    "minimax-m2": (62, 256, 8, 0, 28_311_552, 229.0),
    "olmoe-1b-7b": (16, 64, 8, 0, 12_582_912, 6.92),
    "qwen1.5-moe-a2.7b": (24, 60, 4, 1, 17_301_504, 14.3),
    "qwen3-next-80b-a3b": (48, 512, 10, 1, 6_291_456, 79.7),
    "qwen3.5-35b-a3b": (40, 256, 8, 1, 6_291_456, 34.7),
    "qwen3.5-122b-a10b": (48, 256, 8, 1, 18_874_368, 122.0),
    "qwen3.5-397b-a17b": (60, 512, 10, 1, 25_165_824, 397.0),
    "qwen3.8-flash-next": (48, 512, 10, 1, 9_830_400, 125.0),
}
"""Counts of the cards; totals where a card says less exactly, to half a percent of its name's figure."""
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
    assert total / 2e9 == pytest.approx(billions, rel=0.005), "Gemma's head is its embedding: counted twice here"


def test_dense_first_layer_is_counted_with_the_first_moe_layer() -> None:
    shape = known_shape("deepseek-v2-lite")
    assert shape.moe_layer_ids == tuple(range(1, 27)) and shape.num_layers == 27
    dense_mlp, shared, router = 3 * 2048 * 10944 * 2, 3 * 2048 * 2816 * 2, 64 * 2048 * 2
    extra = shape.dense_bytes[0] - shape.dense_bytes[1]
    assert extra == dense_mlp + (shape.dense_bytes[1] - shared - router)


def test_cache_bytes_per_token_of_grouped_and_latent_attention() -> None:
    assert known_shape("qwen3-30b-a3b").kv_bytes_per_token == 48 * 2 * 4 * 128 * 2
    latent = known_shape("deepseek-v2-lite")
    assert latent.kv_bytes_per_token == 27 * (512 + 64) * 2 and latent.kv_counts == "latent"
    assert known_shape("qwen3-30b-a3b").kv_counts == "heads"


def test_windows_states_and_indexes_of_hybrid_attention() -> None:
    oss = known_shape("gpt-oss-120b")
    assert oss.cache_bytes(1000) == 2048 * (18 * 1000 + 18 * 128), "every second layer keeps 128 tokens"
    delta = known_shape("qwen3-next-80b-a3b")
    assert delta.cache_bytes(0) == 36 * 32 * 128 * 128 * 4, "states in float32"
    assert delta.cache_bytes(10) - delta.cache_bytes(0) == 12 * 10 * 2 * 2 * 256 * 2
    sparse = {kind.kind: kind for kind in known_shape("glm-5.1").attention}
    assert sparse["sparse"].read_tokens(10_000) == 2048 and sparse["index"].read_tokens(10_000) == 10_000
    assert known_shape("glm-5.1").cache_bytes(10_000) == 78 * 10_000 * (512 + 64 + 128) * 2, "all of it is kept"


def test_pairs_of_tokens_inside_and_beyond_a_window() -> None:
    full, near = AttentionKind(kind="full", layers=(0,)), AttentionKind(kind="sliding", layers=(0,), window=4)
    for context in range(8):
        for tokens in range(1, 8):
            seen = [context + new + 1 for new in range(tokens)]
            assert full.pairs(tokens, context) == sum(seen)
            assert near.pairs(tokens, context) == sum(min(4, count) for count in seen)


def test_layers_are_counted_with_the_moe_layer_behind_them() -> None:
    shape = known_shape("llama-4-maverick")
    assert list(shape.decoder_layers_of(0)) == [0, 1] and list(shape.decoder_layers_of(23)) == [46, 47]
    tail = shape_from_config(QWEN | {"mlp_only_layers": [0, 5]}, "x")
    assert [list(tail.decoder_layers_of(place)) for place in range(4)] == [[0, 1], [2], [3], [4, 5]]


@pytest.mark.parametrize(
    ("name", "weights", "expected"),
    [
        ("qwen3-30b-a3b", "q8_0", 4_718_592 * 34 // 32),
        ("qwen3-30b-a3b", "Q4_K", 4_718_592 * 144 // 256),
        ("qwen3-30b-a3b", "q4_k_m", 4_718_592 * (2 * 144 + (210 + 144) / 2) / 3 / 256),
        ("qwen3-235b-a22b", "iq6_k", 15_630_336),
        ("qwen3-235b-a22b", "q6_k", 15_482_880),
        ("deepseek-v3", "iq4_k_r4", 24_772_608),
        ("deepseek-v3", "iq2_k_r4", 13_074_432),
        ("deepseek-r1", "iq4_ks_r4", 23_396_352),
        ("qwen3.8-flash-next", "nvfp4", 2_764_800),
        ("qwen3.8-flash-next", "4.05bpw", 2_488_320),
        ("deepseek-v4-flash", "mxfp4", 13_369_344),
        ("qwen3-next-80b-a3b", "fp8", 3_145_728),
    ],
)
def test_expert_bytes_in_other_formats(name: str, weights: str, expected: float) -> None:
    """The last ten are sizes that published measurements name."""
    shape = known_shape(f"{name}:{weights}")
    assert set(shape.expert_bytes) == {round(expected)}
    assert shape.bytes_per_weight == pytest.approx(expected / (shape.weights_per_expert or 0), rel=1e-6)


def test_formats_change_the_rest_only_where_such_files_do() -> None:
    base = known_shape("deepseek-v2-lite")
    gguf, mxfp4 = base.with_weights("q8_0"), base.with_weights("mxfp4")
    assert gguf.router_bytes == base.router_bytes and gguf.head_bytes == round(base.head_bytes * 8.5 / 16)
    assert gguf.attention_bytes[3] == round(base.attention_bytes[3] * 8.5 / 16)
    assert [sum(part) for part in zip(gguf.attention_bytes, gguf.router_bytes, gguf.shared_bytes, strict=True)] == list(
        gguf.dense_bytes
    )
    assert mxfp4.dense_bytes == base.dense_bytes and mxfp4.dense_dtype == "bfloat16"
    assert base.with_weights("mxfp4", dense="q8_0").dense_bytes == gguf.dense_bytes
    back = gguf.with_weights("bf16")
    assert back.expert_bytes == base.expert_bytes
    assert back.dense_bytes == pytest.approx(base.dense_bytes, abs=4)


def test_biases_of_experts_stay_when_weights_shrink() -> None:
    assert known_shape("gpt-oss-20b:mxfp4").expert_bytes == known_shape("gpt-oss-20b-mxfp4").expert_bytes


def test_unknown_formats_and_shapes_without_sizes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"unknown weight format 'q4_k_xl'; did you mean 'q4_k_\w'\? known: .*mxfp4"):
        known_shape("qwen3-30b-a3b:q4_k_xl")
    with pytest.raises(ModelError, match="unknown weight format '0bpw'"):
        known_shape("qwen3-30b-a3b:0bpw")
    bare = known_shape("qwen3-30b-a3b").model_copy(update={"hidden_size": None})
    with pytest.raises(ModelError, match="does not say its hidden and expert sizes"):
        bare.with_weights("q4_k_m")


def test_parts_that_do_not_add_up_are_refused() -> None:
    fields = known_shape("mixtral-8x7b").model_dump()
    with pytest.raises(ValueError, match="do not add up to dense_bytes"):
        ModelShape.model_validate(fields | {"router_bytes": [1] * 32})


def test_mxfp4_experts_are_as_large_as_the_published_tensors() -> None:
    """Blocks [5760, 90, 16] and [2880, 90, 16] bytes, one scale byte per block, biases in bfloat16."""
    shape = known_shape("gpt-oss-120b-mxfp4")
    assert shape.expert_bytes[0] == (5760 + 2880) * 90 * 17 + GPT_OSS_BIAS_BYTES
    assert shape.dense_bytes == known_shape("gpt-oss-120b").dense_bytes
    assert shape.weight_dtype == "mxfp4"


def test_names_are_found_whatever_their_case_and_unknown_ones_get_a_hint() -> None:
    assert known_shape("Qwen/Qwen3-30B-A3B") == known_shape("qwen3-30b-a3b")
    assert known_shape("moonshotai/Kimi-K2-Thinking") == known_shape("kimi-k2")
    assert set(KNOWN_ALIASES.values()) <= set(known_shape_names())
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
INDEX = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
# fmt: off
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": ROUTED | LATENT | {"q_lora_rank": None},
    "deepseek_v3": ROUTED | LATENT | ONE_GROUP,
    "deepseek_v4": {
        "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 80, "head_dim": 32, "q_lora_rank": 20,
        "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 4, "hc_mult": 4,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["moe", "moe", "moe"], "qk_rope_head_dim": 8,
    } | INDEX,
    "gemma4_text": {
        "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48, "enable_moe_block": True, "head_dim": 24,
        "num_global_key_value_heads": 1, "global_head_dim": 32, "attention_k_eq_v": True, "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm_moe_dsa": ROUTED | LATENT | ONE_GROUP | INDEX | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "laguna": {
        "num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "head_dim": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 8,
        "num_attention_heads_per_layer": [4, 6, 6],
    },
    "llama4_text": {"num_local_experts": 8, "head_dim": 16, "intermediate_size_mlp": 112, "moe_layers": [1]},
    "minimax_m2": {"num_local_experts": 8, "head_dim": 24},
    "qwen3_5_moe_text": DELTA
    | {"num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "head_dim": 24},
    "qwen3_next": DELTA
    | {"num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "head_dim": 24},
    "glm4_moe": ROUTED | ONE_GROUP | {"use_qk_norm": True, "attention_bias": True, "head_dim": 24},
    "glm4_moe_lite": ROUTED | LATENT | ONE_GROUP | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 24},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 24, "mlp_only_layers": [1]},
}
# fmt: on


def counted_bytes(model: Any) -> tuple[int, int]:
    """Bytes in all decoder layers, and those of the final norm and head: bfloat16, selection biases float32."""
    parameters = {name: 2 * tensor.numel() for name, tensor in model.named_parameters()}
    in_float32 = ("correction_bias", "layer_scalar")
    biases = [4 * tensor.numel() for name, tensor in model.named_buffers() if name.endswith(in_float32)]
    layers = sum(size for name, size in parameters.items() if ".layers." in name) + sum(biases)
    head = parameters.get("lm_head.weight", parameters["model.embed_tokens.weight"])  # tied in Gemma
    return layers, parameters["model.norm.weight"] + head


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
    parts = shape.attention_bytes, shape.router_bytes, shape.shared_bytes
    assert [sum(sizes) for sizes in zip(*parts, strict=True)] == list(shape.dense_bytes)
    assert shape.num_experts * shape.num_moe_layers * sum(shape.router_bytes) > 0
    outer = {"kimi_k2", "gemma4", "llama4", "qwen3_5_moe"}  # the same models under another name or with vision
    assert set(FAMILIES) | outer == set(SUPPORTED_TYPES)
