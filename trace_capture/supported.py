"""Which live models can be captured and offloaded, and the sentences that refuse the others."""

from __future__ import annotations

import re
from typing import Any

from trace_capture.errors import ModelError

_MIXTURE_CLASS = re.compile(r"MoE|Moe|Experts?(?![a-z])")


def architecture_name(model: Any) -> str:
    """Class and model type, as messages name a model."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return type(model).__name__ + (f" (model type '{model_type}')" if model_type else "")


def check_supported(model: Any, has_fused_experts: bool) -> None:
    """Refuse what cannot be captured or offloaded.

    Args:
        model: a transformers model.
        has_fused_experts: whether a module of it goes through the transformers experts interface.

    Raises:
        ModelError: an encoder-decoder model, experts outside the interface, or no experts at all.
    """
    name = architecture_name(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; only decoders can be captured and offloaded")
    if has_fused_experts:
        return
    if any(_MIXTURE_CLASS.search(type(module).__name__) for module in model.modules()):
        raise ModelError(
            f"{name} is not supported yet: it has no experts module that goes through the transformers experts "
            "interface, so it can neither be captured nor offloaded (Llama-4 and DBRX: call runtime.adapt(model) first)"
        )
    raise ModelError(
        f"{name} has no experts module: it is no Mixture-of-Experts model, so there is nothing to capture or offload; "
        "supported are the architectures with fused experts (Mixtral, Qwen-MoE, GPT-OSS, DeepSeek, GLM-MoE and others)"
    )
