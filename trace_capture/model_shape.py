"""What the simulator must know of a Mixture-of-Experts model: counts and bytes, no weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trace_capture.errors import ModelError
from trace_capture.weight_formats import find_weight_bits, is_whole_file_format, weight_bits

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class AttentionKind(BaseModel):
    """What the layers of one kind of attention read and compute per pass beside their weights.

    A layer with two mechanisms (a sparse one and its index, a window and a compressed past) is in two of these.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["full", "sliding", "latent", "linear", "sparse", "index", "compressed"]
    layers: tuple[NonNegativeInt, ...]
    """Decoder layers."""
    kv_bytes_per_token: NonNegativeInt = 0
    """Bytes that one token of context adds to one layer's cache."""
    window: PositiveInt | None = None
    """Tokens of context that a new token reads at most; None for all."""
    state_bytes: NonNegativeInt = 0
    """Recurrent state of one layer, read and written once per pass."""
    flops_per_pair: NonNegativeInt = 0
    """Operations of one layer per new token and token of context it reads."""
    flops_per_token: NonNegativeInt = 0
    """Operations of one layer per new token, whatever the context."""

    def read_tokens(self, context: int) -> int:
        """Tokens of context that a pass reads from the cache."""
        return context if self.window is None else min(context, self.window)

    def pairs(self, tokens: int, context: int) -> int:
        """Pairs of a new token and a token that it attends to, itself and new ones before it included."""
        if self.window is None or context + tokens <= self.window:
            return tokens * context + tokens * (tokens + 1) // 2
        growing = max(0, self.window - context)
        return growing * context + growing * (growing + 1) // 2 + (tokens - growing) * self.window


class ModelShape(BaseModel):
    """Counts and byte sizes of a model whose experts may be offloaded.

    Per-layer tuples run over the L Mixture-of-Experts layers in order of execution; a layer's place in them is
    its *MoE layer index*, and `moe_layer_ids` gives the decoder layer it belongs to (dense layers have none).
    Bytes are those of the weights as stored on the host, so they are also the bytes that cross the link.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    architecture: str
    num_layers: PositiveInt
    """All decoder layers, dense ones included."""
    moe_layer_ids: tuple[NonNegativeInt, ...]
    num_experts: PositiveInt
    """Routed experts per MoE layer (E)."""
    top_k: PositiveInt
    """Routed experts per token and layer (K)."""
    num_shared_experts: NonNegativeInt = 0
    hidden_size: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    vocab_size: PositiveInt | None = None
    weight_dtype: str = "bfloat16"
    expert_bytes: tuple[PositiveInt, ...]
    """Bytes of one expert, per MoE layer [L]."""
    dense_bytes: tuple[NonNegativeInt, ...]
    """Bytes of everything a token reads in the decoder layer beside routed experts: attention, norms, router,
    shared experts; per MoE layer [L]. Dense decoder layers in front of a MoE layer are counted with it."""
    head_bytes: NonNegativeInt = 0
    """Bytes of the final norm and the language-model head, read once per pass."""
    kv_bytes_per_token: NonNegativeInt = 0
    """Bytes of key-value cache that one token of context adds, over all layers, as long as no window is full."""
    kv_counts: Literal["heads", "latent"] = "heads"
    """What those bytes are: keys and values of the heads, or the latent of a model with latent attention."""
    attention: tuple[AttentionKind, ...] = ()
    """Kinds of attention; empty where only `kv_bytes_per_token` is known, which is then full attention."""
    attention_bytes: tuple[NonNegativeInt, ...] = ()
    """Part of `dense_bytes` that is attention and norms [L]; the three parts are known together or not at all."""
    router_bytes: tuple[NonNegativeInt, ...] = ()
    shared_bytes: tuple[NonNegativeInt, ...] = ()
    """Part of `dense_bytes` that is shared experts and dense layers' MLPs [L]."""
    dense_dtype: str | None = None
    """Format of everything but the routed experts; None: `weight_dtype`."""
    expert_matrices: PositiveInt = 3
    """Matrices of hidden x inner size in one expert: gate, up, down; two without a gate."""

    @model_validator(mode="after")
    def _consistent(self) -> ModelShape:
        num_moe = len(self.moe_layer_ids)
        if num_moe == 0:
            raise ValueError("moe_layer_ids is empty: the model has no Mixture-of-Experts layer")
        if sorted(set(self.moe_layer_ids)) != list(self.moe_layer_ids) or self.moe_layer_ids[-1] >= self.num_layers:
            raise ValueError(f"moe_layer_ids must rise and stay below num_layers = {self.num_layers}")
        for name in ("expert_bytes", "dense_bytes"):
            if len(getattr(self, name)) != num_moe:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {num_moe} MoE layers")
        parts = (self.attention_bytes, self.router_bytes, self.shared_bytes)
        if any(parts) and [sum(part) for part in zip(*parts, strict=False)] != list(self.dense_bytes):
            raise ValueError("attention_bytes, router_bytes and shared_bytes do not add up to dense_bytes")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k = {self.top_k} exceeds num_experts = {self.num_experts}")
        return self

    @property
    def num_moe_layers(self) -> int:
        """L, the number of Mixture-of-Experts layers."""
        return len(self.moe_layer_ids)

    @property
    def total_expert_bytes(self) -> int:
        """Bytes of all routed experts of all layers."""
        return self.num_experts * sum(self.expert_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of routed experts that one token activates, which is what on-demand loading copies per token."""
        return self.top_k * sum(self.expert_bytes)

    @property
    def weights_per_expert(self) -> int | None:
        """Weights of one routed expert, or None where the sizes are not known."""
        if self.hidden_size is None or self.moe_intermediate_size is None:
            return None
        return self.expert_matrices * self.hidden_size * self.moe_intermediate_size

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one weight of a routed expert, scales included: by its format, else by its size, else two."""
        bits = find_weight_bits(self.weight_dtype)
        if bits is not None:
            return bits / 8
        weights = self.weights_per_expert
        return sum(self.expert_bytes) / len(self.expert_bytes) / weights if weights else 2.0

    @property
    def dense_bytes_per_weight(self) -> float:
        """Bytes of one weight of everything else, scales included."""
        bits = find_weight_bits(self.dense_dtype or self.weight_dtype)
        return self.bytes_per_weight if bits is None else bits / 8

    def decoder_layers_of(self, moe_layer: int) -> range:
        """Decoder layers that `dense_bytes` counts with a MoE layer: itself, dense ones before it, and behind the
        last MoE layer those after it."""
        first = 0 if moe_layer == 0 else self.moe_layer_ids[moe_layer - 1] + 1
        is_last = moe_layer == self.num_moe_layers - 1
        return range(first, self.num_layers if is_last else self.moe_layer_ids[moe_layer] + 1)

    def cache_bytes(self, context: int) -> int:
        """Bytes of keys, values and recurrent states after `context` tokens."""
        if not self.attention:
            return self.kv_bytes_per_token * context
        return sum(
            len(kind.layers)
            * (
                kind.kv_bytes_per_token * (kind.read_tokens(context) if kind.kind == "sliding" else context)
                + kind.state_bytes
            )
            for kind in self.attention
        )

    def with_weights(self, experts: str, dense: str | None = None) -> ModelShape:
        """The same model with its weights stored in another format, and the format behind its name.

        Args:
            experts: format of the routed experts, as `weight_bits` knows it.
            dense: format of attention, shared experts and head; None: the same where files in that format store all
                of them in it (GGUF, 16 and 8 bit floats), else as they are (MXFP4, NVFP4, int4). Routers stay.

        Raises:
            ModelError: a format is unknown, or the shape does not say how many weights an expert has.
        """
        weights = self.weights_per_expert
        if weights is None:
            raise ModelError(
                f"the shape of '{self.name}' does not say its hidden and expert sizes, so its experts cannot be stored "
                f"in '{experts}'; capture the model again, or give its config.json"
            )
        bits, old_bits = weight_bits(experts), find_weight_bits(self.weight_dtype)
        extra = [0 if old_bits is None else max(0, size - round(weights * old_bits / 8)) for size in self.expert_bytes]
        changes: dict[str, object] = {
            "name": f"{self.name.partition(':')[0]}:{experts.lower()}",
            "weight_dtype": experts.lower(),
            "dense_dtype": self.dense_dtype or self.weight_dtype,
            "expert_bytes": tuple(round(weights * bits / 8) + rest for rest in extra),
        }
        if dense is None and is_whole_file_format(experts):
            dense = experts
        if dense is not None:
            changes |= self._dense_in(dense)
        return self.model_copy(update=changes)

    def _dense_in(self, dtype: str) -> dict[str, object]:
        """Sizes beside the routed experts in another format."""
        ratio = weight_bits(dtype) / 8 / self.dense_bytes_per_weight
        router = self.router_bytes or (0,) * self.num_moe_layers
        attention = tuple(round(size * ratio) for size in self.attention_bytes)
        shared = tuple(round(size * ratio) for size in self.shared_bytes)
        dense = [round((size - kept) * ratio) + kept for size, kept in zip(self.dense_bytes, router, strict=True)]
        if attention:
            dense = [sum(parts) for parts in zip(attention, router, shared, strict=True)]
        return {
            "dense_dtype": dtype.lower(),
            "attention_bytes": attention,
            "shared_bytes": shared,
            "dense_bytes": tuple(dense),
            "head_bytes": round(self.head_bytes * ratio),
        }
