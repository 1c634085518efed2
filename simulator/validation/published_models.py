"""Shapes of the models that published measurements name, with weights of any number of bits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import tomlkit

from simulator.validation.published_rows import PublishedRow
from trace_capture.model_shape import ModelShape
from trace_capture.samples import sample_folder

_BITS: tuple[tuple[str, float], ...] = (
    ("IQ1_S", 1.9), ("IQ1_M", 2.0), ("IQ2_XXS", 2.2), ("IQ2_XS", 2.4), ("IQ2_K", 2.375), ("IQ2", 2.6), ("TQ1", 1.8),
    ("Q2_K_XL", 2.8), ("Q2_K", 2.7), ("IQ3_XXS", 3.2), ("IQ3", 3.5), ("Q3_K_XL", 3.9), ("Q3_K", 3.7),
    ("IQ4_KS", 4.25), ("IQ4_XS", 4.25), ("IQ4_NL", 4.5), ("IQ4_K", 4.5), ("Q4_K_S", 4.6), ("Q4_K", 4.84), ("Q4_0", 4.5),
    ("Q4_1", 5.0), ("IQ5_K", 5.5), ("Q5_K", 5.68), ("Q5_0", 5.5), ("IQ6_K", 6.625), ("Q6_K", 6.5625), ("Q8", 8.5),
    ("NVFP4", 4.5), ("MXFP4", 4.25), ("FP8", 8.0), ("INT8", 8.0), ("AWQ", 4.25), ("GPTQ", 4.25), ("INT4", 4.25),
    ("BF16", 16.0), ("FP16", 16.0), ("F16", 16.0), ("F32", 32.0),
)  # fmt: skip
"""Bits per weight of a file type, scales included; the longest name that occurs in the cell counts."""
_GGUF_DENSE_BITS = 6.5
"""Attention, shared experts and head are kept in Q5 to Q8 in files whose experts have fewer bits."""
_DEFAULT_BITS = 4.84


@dataclass(frozen=True)
class ModelCounts:
    """Counts of weights of a model, without sizes."""

    name: str
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    hidden: int
    moe_intermediate: int
    dense_weights: int
    """All weights that a token reads beside routed experts and head."""
    vocabulary: int
    cached_values_per_token: int
    """Values that grow the cache with every token, over all layers."""
    matrices_per_expert: int = 3
    linear_attention_layers: int = 0
    shared_experts: int = 0
    native_bits: float = 16.0
    kind: str = "data sheet"

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert."""
        return self.matrices_per_expert * self.hidden * self.moe_intermediate


@dataclass(frozen=True)
class Precision:
    """Bits per weight, and whether the row gave them."""

    expert_bits: float
    dense_bits: float
    given: bool


@cache
def counts_by_name() -> dict[str, ModelCounts]:
    """All models with counts, by the lower-case part of their name after the owner."""
    path = sample_folder() / "validation" / "models.toml"
    entries = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()["model"]
    known: dict[str, ModelCounts] = {}
    for entry in entries:
        others = entry.pop("also", [])
        known |= {_key(name): ModelCounts(**entry) for name in (entry["name"], *others)}
    return known


def find_counts(name: str) -> ModelCounts | None:
    """Counts of a model by its published name; a fine-tune whose name begins with a known one has its shape."""
    known, key = counts_by_name(), _key(name)
    if key in known:
        return known[key]
    near = [entry for entry in known if key.startswith(_stem(entry))]
    return known[max(near, key=len)] if near else None


def precision_of(row: PublishedRow, counts: ModelCounts, *, gguf: bool, native: bool) -> Precision:
    """Bits per weight of experts and of the rest.

    From the row's expert size, else the name of its file type, else what the engine's users mostly run: the
    checkpoint's own precision with `native` engines, about that of Q4_K_M with the others. `gguf`: the engine reads
    files whose other weights have more bits than their experts.
    """
    named = named_bits(row.quantisation)
    if row.expert_bytes is not None:
        expert_bits, given = 8 * row.expert_bytes / counts.expert_weights, True
    else:
        expert_bits, given = named or (counts.native_bits if native else _DEFAULT_BITS), named is not None
    return Precision(expert_bits, _dense_bits(row.quantisation.upper(), expert_bits, gguf), given)


def named_bits(quantisation: str) -> float | None:
    """Bits per weight by the name of a file type, such as Q4_K_M or 4.05bpw; None for an unknown name."""
    text = quantisation.upper()
    stated = re.search(r"(\d+(?:\.\d+)?) ?(?:BPW|-BIT|BIT)", text)
    if stated:
        return float(stated.group(1))
    found = [(len(name), bits) for name, bits in _BITS if name in text]
    return max(found)[1] if found else None


def sized_shape(counts: ModelCounts, precision: Precision, top_k: int | None = None) -> ModelShape:
    """The shape with weights of the given bits; `top_k` where a run forced another one than the model's."""
    dense_bytes = counts.dense_weights * precision.dense_bits / 8 / counts.moe_layers
    first = counts.layers - counts.moe_layers
    return ModelShape(
        name=counts.name,
        architecture="published",
        num_layers=counts.layers,
        moe_layer_ids=tuple(range(first, counts.layers)),
        num_experts=counts.experts,
        top_k=top_k or counts.top_k,
        num_shared_experts=counts.shared_experts,
        hidden_size=counts.hidden,
        moe_intermediate_size=counts.moe_intermediate,
        vocab_size=counts.vocabulary,
        weight_dtype=f"{precision.expert_bits:.4g} bits",
        expert_bytes=(round(counts.expert_weights * precision.expert_bits / 8),) * counts.moe_layers,
        dense_bytes=(round(dense_bytes),) * counts.moe_layers,
        head_bytes=round(counts.hidden * counts.vocabulary * precision.dense_bits / 8),
        kv_bytes_per_token=2 * counts.cached_values_per_token,
    )


def _dense_bits(quantisation: str, expert_bits: float, gguf: bool) -> float:
    if "FP4" in quantisation and not gguf:
        return 12.0  # attention and head stay in 16 bits, shared experts mostly not
    if "MXFP4" in quantisation:
        return 9.0
    return max(expert_bits, _GGUF_DENSE_BITS) if gguf else expert_bits


def _key(name: str) -> str:
    return name.split("/")[-1].lower()


def _stem(key: str) -> str:
    return key.removesuffix("-instruct").removesuffix("-it").removesuffix("-instruct-v0.1")
