"""What the simulator must know of a Mixture-of-Experts model: counts and bytes, no weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]


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
    """Bytes of key-value cache that one token of context adds, over all layers."""

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
