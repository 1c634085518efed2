"""Hooks that tell the engine of every forward pass of its model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from runtime.engine import Engine
from runtime.refusals import Unconverted


def cached_tokens(kwargs: dict[str, Any]) -> int:
    """Tokens that a forward call finds in its key-value cache."""
    for name in ("past_key_values", "cache"):
        cache = kwargs.get(name)
        if cache is not None and hasattr(cache, "get_seq_length"):
            return int(cache.get_seq_length())
    return 0


def watch_passes(model: nn.Module, engine: Engine) -> list[RemovableHandle]:
    """Tell the engine of every forward pass of the model, and let threads take turns; gives the hooks' handles.

    A pass of a model that was converted meanwhile raises `ModelError`.
    """
    unconverted = Unconverted(model)

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        unconverted.check()
        inputs = kwargs.get("input_ids", args[0] if args else None)
        if inputs is None:
            inputs = kwargs.get("inputs_embeds")
        tokens = int(inputs.shape[1]) if inputs is not None else 1
        engine.turns.take()
        is_prefill = engine.is_reading_prompt or (tokens > 1 and cached_tokens(kwargs) == 0)
        engine.announce_pass(is_prefill, tokens)

    def end(*_: Any) -> None:
        engine.turns.give()

    return [
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, always_call=True),
    ]
