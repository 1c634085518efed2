"""Default vectors as a file: the mean unweighted output of every expert (arXiv 2603.19289, after 2504.12463)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trace_capture.errors import ModelError
from trace_capture.files import atomic_path
from trace_capture.hooks import DefaultVectors

VECTORS_FILE = "default_vectors.safetensors"
"""Name of the file beside a model's weights."""


def save_default_vectors(vectors: DefaultVectors, path: Path, source: str) -> None:
    """Write means [L, E, H] (float16) and the tokens behind each [L, E], with a sentence on the text they come from."""
    tensors = {"vectors": vectors.means().to(torch.float16), "counts": vectors.counts}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"source": source})


def load_default_vectors(path: Path) -> Tensor:
    """Read default vectors [L, E, H] as float32.

    Raises:
        ModelError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            vectors: Tensor = file.get_tensor("vectors")
            return vectors.to(torch.float32)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"no usable default vectors at {path} ({error}); make them with "
            "'moe-studio capture --predict quasi-hidden', which writes them beside the trace, and pass --vectors"
        ) from error
