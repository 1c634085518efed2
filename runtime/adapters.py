"""Architectures whose experts do not go through the transformers experts interface, led through it.

`adapt` puts modules of the same numbers in place of the originals; from then on the model is one like all others to
capture, discovery and the engine. An adapter is one function here and one line in `_ADAPTERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from trace_capture.errors import ModelError
from trace_capture.hooks import CausalModel

_IMPLEMENTATION = "grouped_mm"
"""What transformers runs by default where there is a choice."""


def adapt(model: CausalModel) -> CausalModel:
    """Lead a model's experts through the experts interface, in place, where they do not go through it and an adapter
    is known (Llama-4, DBRX); other models are left alone.

    The outputs stay what they were up to rounding. Llama-4 shares its parameters and keeps their names. DBRX's experts
    are fused into new ones, layer by layer, so it cannot be saved afterwards.

    Returns:
        the same model.

    Raises:
        ModelError: a setting of the architecture that has no adapter, such as Llama-4 with more than one expert per
            token.
    """
    places = [(path, module) for path, module in model.named_modules() if type(module).__name__ in _ADAPTERS]
    if not places:
        return model
    config = model.config.get_text_config()
    for path, module in places:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, _ADAPTERS[type(module).__name__](module, config))
    if any(isinstance(module, _DbrxFfn) for module in model.modules()):
        model.save_pretrained = _refuse_to_save
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # transformers reads this off the source, where no decorator stands
            type(part)._can_set_experts_implementation_cached_value = True
    model.set_experts_implementation(_IMPLEMENTATION)
    return model


class _Experts(nn.Module):
    """Fused experts; the decorated subclasses say how they lie."""

    def __init__(self, config: Any, gate_up_proj: nn.Parameter, down_proj: nn.Parameter, act_fn: nn.Module) -> None:
        super().__init__()
        self.num_experts = gate_up_proj.shape[0]
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.act_fn = act_fn


def _eager(experts: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    output: Tensor = ALL_EXPERTS_FUNCTIONS[_IMPLEMENTATION](experts, hidden, top_k_index, top_k_weights)
    return output


class _Llama4Experts(_Experts):
    forward = _eager


class _DbrxExperts(_Experts):
    forward = _eager


use_experts_implementation(_Llama4Experts, is_transposed=True)
use_experts_implementation(_DbrxExperts)


class _Llama4Router(nn.Module):
    """Gives the score beside weights of one: it scales what goes into an expert, not what comes out."""

    def __init__(self, weight: nn.Parameter, top_k: int) -> None:
        super().__init__()
        self.weight = weight
        self.top_k = top_k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden, self.weight)
        best, ids = torch.topk(logits, self.top_k, dim=-1)
        scores = torch.sigmoid(best.float()).to(best.dtype)
        return logits, torch.ones_like(scores), ids, scores


class _Llama4Moe(nn.Module):
    def __init__(self, original: Any, config: Any) -> None:
        super().__init__()
        own = original.experts
        self.router = _Llama4Router(original.router.weight, original.top_k)
        self.experts = _Llama4Experts(config, own.gate_up_proj, own.down_proj, own.act_fn)
        self.shared_expert = original.shared_expert

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits, weights, ids, scores = self.router(flat)
        return self.shared_expert(flat) + self.experts(flat * scores, ids, weights), logits


class _DbrxRouter(nn.Module):
    def __init__(self, original: Any) -> None:
        super().__init__()
        self.layer = original.router.layer
        self.top_k = original.top_k
        self.order = original.moe_normalize_expert_weights

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.layer(hidden)
        weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=logits.dtype), self.top_k, dim=-1)
        if self.order is not None:
            weights = weights / torch.norm(weights, p=self.order, dim=-1, keepdim=True)
        return logits, weights, ids


class _DbrxFfn(nn.Module):
    def __init__(self, original: Any, config: Any) -> None:
        super().__init__()
        self.router = _DbrxRouter(original)
        own = original.experts.mlp
        shape = (own.moe_num_experts, own.ffn_hidden_size, own.hidden_size)
        with torch.no_grad():
            gate_up = torch.cat([own.w1.view(shape), own.v1.view(shape)], dim=1)
            down = own.w2.view(shape).transpose(1, 2).contiguous()
        self.experts = _DbrxExperts(config, nn.Parameter(gate_up), nn.Parameter(down), own.activation_fn)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        _, weights, ids = self.router(flat)
        output: Tensor = self.experts(flat, ids, weights)
        return output.view_as(hidden)


def _adapt_llama4(original: Any, config: Any) -> nn.Module:
    if original.top_k != 1:
        raise ModelError(
            f"Llama-4 with {original.top_k} experts per token is not supported, only with one, as all its checkpoints "
            "have: the score scales an expert's input, so experts of one token see different inputs"
        )
    return _Llama4Moe(original, config)


_ADAPTERS: dict[str, Callable[[Any, Any], nn.Module]] = {"Llama4TextMoe": _adapt_llama4, "DbrxFFN": _DbrxFfn}


def _refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    raise ModelError("the experts of this model were fused by adapt, so it cannot be saved; copy its folder instead")
