"""Prompts that are read in pieces: transformers' chunked prefill, and an engine that is told of it."""

from __future__ import annotations

from typing import Any

from runtime.engine import Engine
from trace_capture.errors import ConfigError
from trace_capture.hooks import CausalModel


class ChunkedPrefill:
    """Sets `prefill_chunk_size` of the model's generation settings, and marks the passes that read a prompt.

    The engine cannot tell a later piece of a prompt from a verify pass, nor a last piece of one token from a decode
    pass, so `generate`'s own prefill step says when it begins and ends.

    Args:
        model: its `generate` reads prompts in pieces until `undo`.
        engine: its passes within the prefill step count as prefill.
        micro_batch: tokens per piece.

    Raises:
        ConfigError: this transformers has no prefill step to watch.
    """

    def __init__(self, model: CausalModel, engine: Engine, micro_batch: int) -> None:
        native = getattr(model, "_prefill", None)
        if native is None or not hasattr(model.generation_config, "prefill_chunk_size"):
            raise ConfigError(
                "prefill.micro_batch needs a transformers with chunked prefill in generate, and this one has none; "
                "leave the key out, or use another version"
            )
        self._model = model
        self._before = model.generation_config.prefill_chunk_size

        def prefill(*args: Any, **kwargs: Any) -> Any:
            engine.is_reading_prompt = True
            try:
                return native(*args, **kwargs)
            finally:
                engine.is_reading_prompt = False

        model.generation_config.prefill_chunk_size = micro_batch
        model.__dict__["_prefill"] = prefill

    def remove(self) -> None:
        """The model reads prompts as before."""
        self._model.generation_config.prefill_chunk_size = self._before
        del self._model.__dict__["_prefill"]
