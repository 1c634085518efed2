"""Model shapes from a Hugging Face `config.json`: the architecture's arithmetic, without weights or torch.

Every byte follows from the configuration: attention (grouped-query, or multi-head latent), norms, router, shared
experts, dense layers and head are counted matrix by matrix. A test holds the sums equal to the parameter counts of
the transformers implementation. Letters in comments: H hidden size, d head dimension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trace_capture.config_fields import ConfigFields, Storage
from trace_capture.errors import ModelError
from trace_capture.model_shape import ModelShape

_QK_NORM_PER_HEAD = frozenset({"qwen3_moe"})
_QK_NORM_WHOLE = frozenset({"olmoe"})
_ATTENTION_BIAS_BY_DEFAULT = frozenset({"gpt_oss"})
_FLOAT32_ROUTER_BIAS = frozenset({"deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite"})
SUPPORTED_TYPES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "kimi_k2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)


def shape_from_config_json(path: Path, name: str | None = None) -> ModelShape:
    """The shape of a model from its `config.json`, or from the folder that holds one.

    Args:
        path: the file or its folder.
        name: what reports call the model; by default the folder's name.

    Raises:
        ModelError: missing, not JSON, a model type whose arithmetic is not known, or a field that is missing.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}; give a model folder or its config.json") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no JSON object; download it again")
    return shape_from_config(config, name or file.resolve().parent.name, where=str(file))


def shape_from_config(config: Mapping[str, Any], name: str, where: str = "model configuration") -> ModelShape:
    """The shape of a model from the content of its `config.json`.

    Key-value bytes of latent attention are those of the compressed cache (latent and rotary part), which serving
    engines keep; transformers' own cache is larger.

    Args:
        config: keys as in the file.
        name: what reports call the model.
        where: how messages call the configuration.

    Raises:
        ModelError: a model type whose arithmetic is not known, or a field that is missing or wrong.
    """
    fields = ConfigFields(config, where)
    if fields.model_type not in SUPPORTED_TYPES:
        raise ModelError(
            f"{where}: model_type '{fields.model_type}' has no shape arithmetic here (known: "
            f"{', '.join(SUPPORTED_TYPES)}); capture the model once and use the trace's shape"
        )
    num_layers = fields.integer("num_hidden_layers")
    moe_layers = _moe_layer_ids(fields, num_layers)
    if not moe_layers:
        raise ModelError(f"{where}: no layer has experts by its own fields; give a Mixture-of-Experts model")
    store = Storage.of(fields)
    try:
        return ModelShape(
            name=name,
            architecture=fields.model_type,
            num_layers=num_layers,
            moe_layer_ids=moe_layers,
            num_experts=fields.num_experts,
            top_k=fields.integer("num_experts_per_tok"),
            num_shared_experts=fields.integer(
                "n_shared_experts", 1 if "shared_expert_intermediate_size" in config else 0
            ),
            hidden_size=fields.hidden,
            moe_intermediate_size=fields.moe_intermediate,
            vocab_size=fields.integer("vocab_size"),
            weight_dtype=store.expert_dtype,
            expert_bytes=(_expert_bytes(fields, store),) * len(moe_layers),
            dense_bytes=_dense_bytes(fields, store, moe_layers, num_layers),
            head_bytes=store.plain(fields.hidden * (fields.integer("vocab_size") + 1)),
            kv_bytes_per_token=_kv_bytes(fields, store) * num_layers,
        )
    except ValidationError as error:
        place, what = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise ModelError(f"{where}: {'.'.join(map(str, place))}: {what}; mend the configuration") from error


def _moe_layer_ids(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Decoder layers with experts, by whichever rule the family states."""
    config = fields.config
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ModelError(
                f"{fields.where}: mlp_layer_types has not one entry for each of {num_layers} layers; mend it"
            )
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if fields.model_type in ("qwen2_moe", "qwen3_moe"):
        step, dense = fields.integer("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise ModelError(f"{fields.where}: mlp_only_layers is {dense!r}, wanted a list of layer numbers; mend it")
        return tuple(x for x in range(num_layers) if x not in dense and step > 0 and (x + 1) % step == 0)
    first = fields.integer("first_k_dense_replace", 1 if fields.model_type == "glm4_moe_lite" else 0)
    every = fields.integer("moe_layer_freq", 1) or 1
    return tuple(layer for layer in range(first, num_layers) if layer % every == 0)


def _expert_bytes(fields: ConfigFields, store: Storage) -> int:
    """Gate, up and down matrices of one routed expert, and in GPT-OSS their biases."""
    hidden, inner = fields.hidden, fields.moe_intermediate
    biases = store.plain(2 * inner + hidden) if fields.model_type == "gpt_oss" else 0
    return 2 * store.expert(inner, hidden) + store.expert(hidden, inner) + biases


def _dense_bytes(fields: ConfigFields, store: Storage, moe_layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Per MoE layer: what its decoder layer and the dense ones before it hold beside routed experts."""
    always = _attention_bytes(fields, store) + store.plain(2 * fields.hidden)
    dense_layer = always + _mlp_bytes(fields, store, fields.integer("intermediate_size", 0))
    moe_layer = always + _router_bytes(fields, store) + _shared_bytes(fields, store)
    before = [layer - previous - 1 for previous, layer in zip((-1, *moe_layers), moe_layers, strict=False)]
    result = [moe_layer + count * dense_layer for count in before]
    result[-1] += (num_layers - 1 - moe_layers[-1]) * dense_layer
    return tuple(result)


def _attention_bytes(fields: ConfigFields, store: Storage) -> int:
    return _latent_attention_bytes(fields, store) if fields.has_latent_attention else _grouped_bytes(fields, store)


def _grouped_bytes(fields: ConfigFields, store: Storage) -> int:
    """Grouped-query attention: q, k, v, o, with biases and q/k norms where the family has them."""
    hidden, head_dim, kind = fields.hidden, fields.head_dim, fields.model_type
    q_size, kv_size = fields.integer("num_attention_heads") * head_dim, fields.num_kv_heads * head_dim
    total = store.linear(q_size, hidden) + 2 * store.linear(kv_size, hidden) + store.linear(hidden, q_size)
    has_bias = fields.flag("attention_bias", kind in _ATTENTION_BIAS_BY_DEFAULT)
    if has_bias or (kind == "qwen2_moe" and fields.flag("qkv_bias", True)):
        total += store.plain(q_size + 2 * kv_size)
    if has_bias and kind != "glm4_moe":
        total += store.plain(hidden)
    if kind in _QK_NORM_PER_HEAD or fields.flag("use_qk_norm"):
        total += store.plain(2 * head_dim)
    if kind in _QK_NORM_WHOLE:
        total += store.plain(hidden + kv_size)
    if kind == "gpt_oss":
        total += store.plain(fields.integer("num_attention_heads"))  # attention sinks
    return total


def _latent_attention_bytes(fields: ConfigFields, store: Storage) -> int:
    """Multi-head latent attention: q (through a low rank where q_lora_rank is set), compressed k and v, o."""
    hidden, heads, latent = fields.hidden, fields.integer("num_attention_heads"), fields.integer("kv_lora_rank")
    rope, nope, value = (fields.integer(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    rank, q_size = fields.integer("q_lora_rank", 0), heads * (nope + rope)
    if rank:
        total = store.linear(rank, hidden) + store.plain(rank) + store.linear(q_size, rank)
    else:
        total = store.linear(q_size, hidden)
    total += store.linear(latent + rope, hidden) + store.plain(latent) + store.linear(heads * (nope + value), latent)
    total += store.linear(hidden, heads * value)
    if fields.flag("attention_bias"):
        total += store.plain(rank + latent + rope + hidden)
    return total


def _mlp_bytes(fields: ConfigFields, store: Storage, inner: int) -> int:
    return 2 * store.linear(inner, fields.hidden) + store.linear(fields.hidden, inner)


def _router_bytes(fields: ConfigFields, store: Storage) -> int:
    """Router matrix, with GPT-OSS's bias or the float32 selection bias of DeepSeek-V3 and its kin."""
    biases = 4 * fields.num_experts if fields.model_type in _FLOAT32_ROUTER_BIAS else 0
    if fields.model_type == "gpt_oss":
        biases = store.plain(fields.num_experts)
    return store.plain(fields.num_experts * fields.hidden) + biases


def _shared_bytes(fields: ConfigFields, store: Storage) -> int:
    """Shared experts, which run for every token; Qwen2-MoE's has a gate of its own."""
    single = fields.integer("shared_expert_intermediate_size", 0)
    if single:
        return _mlp_bytes(fields, store, single) + store.plain(fields.hidden)
    return _mlp_bytes(fields, store, fields.integer("n_shared_experts", 0) * fields.moe_intermediate)


def _kv_bytes(fields: ConfigFields, store: Storage) -> int:
    """Bytes that one token adds to one layer's cache."""
    if fields.has_latent_attention:
        return store.plain(fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"))
    return store.plain(2 * fields.num_kv_heads * fields.head_dim)
