"""Attention of one decoder layer by its configuration: bytes of weights, bytes of cache, operations per token.

Kinds: grouped-query (full, or over a window), multi-head latent, gated delta rule (linear, with a state instead of a
cache), DeepSeek's sparse attention behind an index, and DeepSeek-V4's compressed past. Letters: H hidden size, d head
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trace_capture.config_fields import ConfigFields, Storage
from trace_capture.errors import ModelError

_QK_NORM_PER_HEAD = frozenset(
    {"qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "laguna", "gemma4", "gemma4_text"}
)
_QK_NORM_WHOLE = frozenset({"olmoe", "minimax_m2"})
_ATTENTION_BIAS_BY_DEFAULT = frozenset({"gpt_oss"})
_GATED_QUERY = frozenset({"qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"})
_GEMMA = frozenset({"gemma4", "gemma4_text"})
_FULL_EVERY = {"gemma4": 6, "gemma4_text": 6, "qwen3_next": 4, "qwen3_5_moe": 4, "qwen3_5_moe_text": 4}
_OTHER_KIND = {"gemma4": "sliding_attention", "gemma4_text": "sliding_attention"}


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one decoder layer: bytes of its weights, and its mechanisms as fields of `AttentionKind`."""

    weight_bytes: int
    mechanisms: tuple[dict[str, Any], ...] = field(default=())


def attention_of(fields: ConfigFields, store: Storage, layer: int) -> LayerAttention:
    """The attention of a decoder layer.

    Raises:
        ModelError: a field is missing or wrong.
    """
    kind = layer_type(fields, layer)
    if fields.model_type == "deepseek_v4":
        return _compressed(fields, store, kind)
    if kind == "linear_attention":
        return _gated_delta(fields, store)
    if fields.has_latent_attention:
        return _latent(fields, store)
    return _grouped(fields, store, layer, kind)


def layer_type(fields: ConfigFields, layer: int) -> str:
    """What `layer_types` says of a layer, or the family's own rule where it is absent."""
    kinds = fields.config.get("layer_types")
    if isinstance(kinds, list):
        if layer >= len(kinds):
            raise ModelError(f"{fields.where}: layer_types has no entry for layer {layer}; mend it")
        return str(kinds[layer])
    family = fields.model_type
    if family in _FULL_EVERY:
        every = fields.integer("full_attention_interval", _FULL_EVERY[family])
        other = _OTHER_KIND.get(family, "linear_attention")
        is_last_of_gemma = family in _GEMMA and layer == fields.integer("num_hidden_layers") - 1
        return "full_attention" if (layer + 1) % every == 0 or is_last_of_gemma else other
    if family == "gpt_oss":
        return "sliding_attention" if layer % 2 == 0 else "full_attention"
    if family in ("llama4", "llama4_text"):
        return "full_attention" if (layer + 1) % 4 == 0 else "chunked_attention"
    if family == "deepseek_v4":
        return "compressed_sparse_attention" if layer > 2 and layer % 2 else "heavily_compressed_attention"
    return "full_attention"


def _grouped(fields: ConfigFields, store: Storage, layer: int, kind: str) -> LayerAttention:
    """Grouped-query attention: q, k, v, o, with gates, biases and q/k norms where the family has them."""
    heads, kv_heads, head_dim = _head_sizes(fields, layer, kind)
    hidden, family = fields.hidden, fields.model_type
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    values = 0 if family in _GEMMA and kind == "full_attention" and fields.flag("attention_k_eq_v") else 1
    gated = 2 if family in _GATED_QUERY else 1
    total = store.linear(gated * q_size, hidden) + (1 + values) * store.linear(kv_size, hidden)
    total += store.linear(hidden, q_size) + _grouped_extras(fields, store, heads, q_size, kv_size, head_dim)
    if family == "laguna" and fields.flag("gating", True):
        total += store.linear(heads, hidden)
    window = _window(fields, kind)
    mechanism = {
        "kind": "full" if window is None else "sliding",
        "window": window,
        "kv_bytes_per_token": store.plain(2 * kv_size),
        "flops_per_pair": 4 * q_size,
    }
    return LayerAttention(total, (mechanism,))


def _grouped_extras(fields: ConfigFields, store: Storage, heads: int, q_size: int, kv_size: int, head_dim: int) -> int:
    """Biases, norms of queries and keys, attention sinks."""
    family, total = fields.model_type, 0
    has_bias = fields.flag("attention_bias", family in _ATTENTION_BIAS_BY_DEFAULT)
    if has_bias or (family == "qwen2_moe" and fields.flag("qkv_bias", True)):
        total += store.plain(q_size + 2 * kv_size)
    if has_bias and family != "glm4_moe":
        total += store.plain(fields.hidden)
    is_llama = family in ("llama4", "llama4_text")  # its q/k norm has no weights
    if family in _QK_NORM_PER_HEAD or (fields.flag("use_qk_norm") and not is_llama and family != "minimax_m2"):
        total += store.plain(2 * head_dim)
    if family in _QK_NORM_WHOLE:
        total += store.plain(q_size + kv_size)
    if family == "gpt_oss":
        total += store.plain(heads)
    return total


def _head_sizes(fields: ConfigFields, layer: int, kind: str) -> tuple[int, int, int]:
    """Query heads, key-value heads and head size of a layer."""
    heads, kv_heads, head_dim = fields.integer("num_attention_heads"), fields.num_kv_heads, fields.head_dim
    per_layer = fields.config.get("num_attention_heads_per_layer")
    if isinstance(per_layer, list) and layer < len(per_layer):
        heads = int(per_layer[layer])
    if fields.model_type in _GEMMA and kind == "full_attention":
        head_dim = fields.integer("global_head_dim", 512)
        kv_heads = fields.integer("num_global_key_value_heads", kv_heads)
    return heads, kv_heads, head_dim


def _window(fields: ConfigFields, kind: str) -> int | None:
    """Tokens that a layer of a kind looks back at most."""
    if kind == "sliding_attention":
        return fields.integer("sliding_window", 128 if fields.model_type == "gpt_oss" else 512)
    if kind == "chunked_attention":
        return fields.integer("attention_chunk_size", 8192)
    return None


def _latent(fields: ConfigFields, store: Storage) -> LayerAttention:
    """Multi-head latent attention: q (through a low rank where q_lora_rank is set), compressed k and v, o.

    The cache is the latent and the rotary part, and products are taken with the latent (absorbed form), as serving
    engines do in decode. With an index (DeepSeek sparse attention) only `index_topk` tokens are read.
    """
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
    mechanism: dict[str, Any] = {
        "kind": "latent",
        "kv_bytes_per_token": store.plain(latent + rope),
        "flops_per_pair": 2 * heads * (2 * latent + rope),
    }
    if fields.model_type != "glm_moe_dsa":
        return LayerAttention(total, (mechanism,))
    index_heads, index_dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    total += store.linear(index_heads * index_dim, rank) + store.linear(index_dim, hidden)
    total += store.plain(2 * index_dim) + store.linear(index_heads, hidden)
    index = {
        "kind": "index",
        "kv_bytes_per_token": store.plain(index_dim),
        "flops_per_pair": 2 * index_heads * index_dim,
    }
    return LayerAttention(total, (mechanism | {"kind": "sparse", "window": fields.integer("index_topk")}, index))


def _gated_delta(fields: ConfigFields, store: Storage) -> LayerAttention:
    """Gated delta rule: projections, a short convolution, and a state of d x d per value head in float32."""
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed = 2 * keys + values
    total = store.linear(mixed + values, fields.hidden) + 2 * store.linear(value_heads, fields.hidden)
    total += store.plain(mixed * fields.integer("linear_conv_kernel_dim") + 2 * value_heads + value_dim)
    total += store.linear(fields.hidden, values)
    mechanism = {
        "kind": "linear",
        "state_bytes": 4 * value_heads * key_dim * value_dim,
        "flops_per_token": 6 * value_heads * key_dim * value_dim,
    }
    return LayerAttention(total, (mechanism,))


def _compressed(fields: ConfigFields, store: Storage, kind: str) -> LayerAttention:
    """DeepSeek-V4: one latent head over a short window, and the past compressed to one entry per so many tokens.

    In a sparse layer an index picks `index_topk` entries; in a heavily compressed one all are read.
    """
    hidden, heads, head_dim = fields.hidden, fields.integer("num_attention_heads"), fields.head_dim
    rank, groups, inner = fields.integer("q_lora_rank"), fields.integer("o_groups"), fields.integer("o_lora_rank")
    rates = fields.config.get("compress_rates") or {"heavily_compressed_attention": 128}
    is_sparse = kind == "compressed_sparse_attention"
    rate = int(rates.get(kind, 4 if is_sparse else 128))
    total = store.plain(heads + rank + 2 * head_dim) + store.linear(rank, hidden) + store.linear(heads * head_dim, rank)
    total += store.linear(head_dim, hidden) + store.linear(groups * inner, heads * head_dim // groups)
    total += store.linear(hidden, groups * inner)
    wide = 2 if is_sparse else 1  # a sparse layer's entries overlap, so it has two sets
    total += 2 * store.linear(wide * head_dim, hidden) + store.plain(rate * wide * head_dim)
    flops = 4 * heads * head_dim
    near = {
        "kind": "sliding",
        "window": fields.integer("sliding_window"),
        "kv_bytes_per_token": store.plain(head_dim),
        "flops_per_pair": flops,
    }
    past = {
        "kind": "compressed",
        "kv_bytes_per_token": store.plain(head_dim) // rate,
        "flops_per_pair": flops // rate,
    }
    if not is_sparse:
        return LayerAttention(total, (near, past))
    index_heads, index_dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    total += 2 * store.linear(2 * index_dim, hidden) + store.plain(rate * 2 * index_dim + index_dim)
    total += store.linear(index_heads * index_dim, rank) + store.linear(index_heads, hidden)
    index = {
        "kind": "index",
        "kv_bytes_per_token": store.plain(index_dim) // rate,
        "flops_per_pair": 2 * index_heads * index_dim // rate,
    }
    return LayerAttention(total, (near, past | {"window": rate * fields.integer("index_topk")}, index))
