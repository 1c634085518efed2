"""Model shapes from a Hugging Face `config.json`: the architecture's arithmetic, without weights or torch.

Every byte follows from the configuration: attention (`trace_capture.attention_layers`), norms, router, shared
experts, dense layers and head are counted matrix by matrix. A test holds the sums equal to the parameter counts of
the transformers implementation. Letters in comments: H hidden size, d head dimension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trace_capture.attention_layers import LayerAttention, attention_of
from trace_capture.config_fields import ConfigFields, Storage
from trace_capture.errors import ModelError
from trace_capture.model_shape import AttentionKind, ModelShape

_FLOAT32_ROUTER_BIAS = frozenset(
    {"deepseek_v3", "deepseek_v4", "kimi_k2", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2"}
)
SUPPORTED_TYPES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "gemma4",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "kimi_k2",
    "laguna",
    "llama4",
    "llama4_text",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
_FIRST_DENSE = {"glm4_moe_lite": 1, "glm_moe_dsa": 3, "laguna": 1}
_LLAMA4 = ("llama4", "llama4_text")
_GEMMA4 = ("gemma4", "gemma4_text")


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
    engines and current transformers keep.

    Args:
        config: keys as in the file.
        name: what reports call the model.
        where: how messages call the configuration.

    Raises:
        ModelError: a model type whose arithmetic is not known, or a field that is missing or wrong.
    """
    fields = ConfigFields.of_language_model(config, where)
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
    attention = [attention_of(fields, store, layer) for layer in range(num_layers)]
    kinds = _attention_kinds(attention)
    try:
        return ModelShape(
            name=name,
            architecture=fields.model_type,
            num_layers=num_layers,
            moe_layer_ids=moe_layers,
            num_experts=fields.num_experts,
            top_k=fields.first("num_experts_per_tok", "top_k_experts"),
            num_shared_experts=_num_shared(fields),
            hidden_size=fields.hidden,
            moe_intermediate_size=fields.moe_intermediate,
            vocab_size=fields.integer("vocab_size"),
            weight_dtype=store.expert_dtype,
            expert_bytes=(_expert_bytes(fields, store),) * len(moe_layers),
            head_bytes=store.plain(fields.hidden * (fields.integer("vocab_size") + 1)),
            kv_bytes_per_token=sum(kind.kv_bytes_per_token * len(kind.layers) for kind in kinds),
            kv_counts="latent" if fields.has_latent_attention else "heads",
            attention=kinds,
            dense_dtype=store.dense_dtype,
            **_dense_parts(fields, store, moe_layers, [layer.weight_bytes for layer in attention]),
        )
    except ValidationError as error:
        place, what = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise ModelError(f"{where}: {'.'.join(map(str, place))}: {what}; mend the configuration") from error


def _attention_kinds(layers: Sequence[LayerAttention]) -> tuple[AttentionKind, ...]:
    """Equal mechanisms of different layers as one entry with their numbers."""
    found: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for number, layer in enumerate(layers):
        for mechanism in layer.mechanisms:
            found.setdefault(tuple(sorted(mechanism.items())), []).append(number)
    return tuple(AttentionKind(layers=tuple(numbers), **dict(items)) for items, numbers in found.items())


def _num_shared(fields: ConfigFields) -> int:
    if fields.model_type in (*_LLAMA4, *_GEMMA4):
        return 1  # Gemma's dense MLP runs beside the experts in every layer
    has_one = bool(fields.config.get("shared_expert_intermediate_size"))
    return fields.integer("n_shared_experts", int(has_one))


def _moe_layer_ids(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Decoder layers with experts, by whichever rule the family states."""
    config = fields.config
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ModelError(
                f"{fields.where}: mlp_layer_types has not one entry for each of {num_layers} layers; mend it"
            )
        return tuple(layer for layer, kind in enumerate(kinds) if kind != "dense")
    if fields.model_type in _LLAMA4:
        return _llama4_moe_layers(fields, num_layers)
    if fields.model_type in _GEMMA4:
        return tuple(range(num_layers)) if fields.flag("enable_moe_block") else ()
    if fields.model_type in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        step, dense = fields.integer("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise ModelError(f"{fields.where}: mlp_only_layers is {dense!r}, wanted a list of layer numbers; mend it")
        return tuple(x for x in range(num_layers) if x not in dense and step > 0 and (x + 1) % step == 0)
    first = fields.integer("first_k_dense_replace", _FIRST_DENSE.get(fields.model_type, 0))
    every = fields.integer("moe_layer_freq", 1) or 1
    return tuple(layer for layer in range(first, num_layers) if layer % every == 0)


def _expert_bytes(fields: ConfigFields, store: Storage) -> int:
    """Gate, up and down matrices of one routed expert, and in GPT-OSS their biases."""
    hidden, inner = fields.hidden, fields.moe_intermediate
    biases = store.plain(2 * inner + hidden) if fields.model_type == "gpt_oss" else 0
    return 2 * store.expert(inner, hidden) + store.expert(hidden, inner) + biases


def _llama4_moe_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    given = fields.config.get("moe_layers")
    if isinstance(given, list) and given:
        return tuple(sorted(int(layer) for layer in given))
    step = fields.integer("interleave_moe_layer_step", 1) or 1
    return tuple(range(step - 1, num_layers, step))


def _dense_parts(
    fields: ConfigFields, store: Storage, moe_layers: tuple[int, ...], attention: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Per MoE layer, what its decoder layer and the dense ones counted with it hold beside routed experts."""
    parts: dict[str, list[int]] = {"attention_bytes": [], "router_bytes": [], "shared_bytes": []}
    first = 0
    for place, moe_layer in enumerate(moe_layers):
        stop = len(attention) if place == len(moe_layers) - 1 else moe_layer + 1
        dense_layers = stop - first - 1
        norms = _norm_bytes(fields, store, True) + dense_layers * _norm_bytes(fields, store, False)
        parts["attention_bytes"].append(sum(attention[first:stop]) + norms)
        parts["router_bytes"].append(_router_bytes(fields, store))
        dense_mlp = _mlp_bytes(fields, store, fields.dense_intermediate) if dense_layers else 0
        parts["shared_bytes"].append(_shared_bytes(fields, store) + dense_layers * dense_mlp)
        first = stop
    totals = tuple(sum(sizes) for sizes in zip(*parts.values(), strict=True))
    return {name: tuple(sizes) for name, sizes in parts.items()} | {"dense_bytes": totals}


def _norm_bytes(fields: ConfigFields, store: Storage, has_experts: bool) -> int:
    """Norms of a decoder layer, and in DeepSeek-V4 the mixing of its residual streams."""
    if fields.model_type in _GEMMA4:
        return store.plain((7 if has_experts else 4) * fields.hidden) + 4  # a scalar per layer in float32
    streams = fields.integer("hc_mult", 4) if fields.model_type == "deepseek_v4" else 0
    mixing = streams * (streams + 2)
    return store.plain(2 * fields.hidden + 2 * (mixing * streams * fields.hidden + mixing + (3 if streams else 0)))


def _mlp_bytes(fields: ConfigFields, store: Storage, inner: int) -> int:
    return 2 * store.linear(inner, fields.hidden) + store.linear(fields.hidden, inner)


def _router_bytes(fields: ConfigFields, store: Storage) -> int:
    """Router matrix, with GPT-OSS's bias or the float32 selection bias of DeepSeek-V3 and its kin."""
    biases = 4 * fields.num_experts if fields.model_type in _FLOAT32_ROUTER_BIAS else 0
    if fields.model_type == "laguna":
        biases = store.plain(fields.num_experts)
    if fields.model_type in _GEMMA4:
        biases = store.plain(fields.hidden + fields.num_experts)
    if fields.model_type == "gpt_oss":
        biases = store.plain(fields.num_experts)
    return store.plain(fields.num_experts * fields.hidden) + biases


def _shared_bytes(fields: ConfigFields, store: Storage) -> int:
    """Shared experts, which run for every token; Qwen's has a gate of its own, Gemma's is the dense MLP."""
    if fields.model_type in (*_LLAMA4, *_GEMMA4):
        return _mlp_bytes(fields, store, fields.integer("intermediate_size"))
    single = fields.integer("shared_expert_intermediate_size", 0)
    if single and fields.model_type == "laguna":
        return _mlp_bytes(fields, store, single)
    if single:
        return _mlp_bytes(fields, store, single) + store.plain(fields.hidden)
    return _mlp_bytes(fields, store, fields.integer("n_shared_experts", 0) * fields.moe_intermediate)
