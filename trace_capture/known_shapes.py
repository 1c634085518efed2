"""Shapes of well-known models by name, so that a what-if needs neither download nor capture.

Each has the fields of the model's published `config.json` (`trace_capture.known_configs`);
`trace_capture.config_shape` does the arithmetic.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from trace_capture.config_shape import shape_from_config, shape_from_config_json
from trace_capture.errors import ModelError
from trace_capture.known_configs import KNOWN_ALIASES, KNOWN_CONFIGS
from trace_capture.model_shape import ModelShape


def known_shape(name: str) -> ModelShape:
    """The shape of a well-known model, in bfloat16 unless the name says otherwise.

    Args:
        name: one of `known_shape_names`, in any case and with or without an organisation in front; a weight format
            may follow a colon, as in `qwen3-30b-a3b:q4_k_m`.

    Raises:
        ModelError: the model or the weight format is not known.
    """
    text, _, weights = name.partition(":")
    key = text.lower().rpartition("/")[2]
    key = KNOWN_ALIASES.get(key, key)
    if key not in KNOWN_CONFIGS:
        near = difflib.get_close_matches(key, KNOWN_CONFIGS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ModelError(
            f"no built-in shape of model '{name}'; {hint}choose one of {', '.join(known_shape_names())}, "
            "or give the model's config.json"
        )
    shape = shape_from_config(KNOWN_CONFIGS[key], key, where=f"built-in shape '{key}'")
    return shape.with_weights(weights) if weights else shape


def find_shape(model: str) -> ModelShape:
    """The shape that an argument names.

    Args:
        model: a name that `known_shape` takes, a `config.json` or the folder of one, or a trace (`.parquet`).

    Raises:
        ModelError: no such model or configuration.
        TraceError: the trace cannot be read.
    """
    path = Path(model)
    if path.suffix == ".parquet":
        from trace_capture.trace import Trace

        return Trace.load(path).shape
    return shape_from_config_json(path) if path.exists() else known_shape(model)


def known_shape_names() -> list[str]:
    """Names of the models with a built-in shape."""
    return sorted(KNOWN_CONFIGS)
