"""Default vectors as a file: the mean unweighted output of every expert (arXiv 2603.19289, after 2504.12463), and the
mean of what each layer adds beside its routed experts (`runtime.remainder`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trace_capture.errors import ModelError
from trace_capture.files import atomic_path
from trace_capture.hooks import MoeSite

VECTORS_FILE = "default_vectors.safetensors"
"""Name of the file beside a model's weights."""


class LayerDefaults(NamedTuple):
    """What makes a layer default d_l: the weighted vectors of its executed experts, and what comes beside them.

    Attributes:
        vectors: mean unweighted output of each expert [L, E, H], float32.
        beside: mean of what each layer adds beside its routed experts [L, H], float32, such as a shared expert's
            output; None where that is nothing.
    """

    vectors: Tensor
    beside: Tensor | None = None


@dataclass
class DefaultVectors:
    """Running float64 means of unweighted expert outputs [L, E, H] and the tokens behind each [L, E].

    Attributes:
        beside: mean of what each layer adds beside its routed experts [L, H], float32, once it is known.
    """

    sums: Tensor
    counts: Tensor = field(repr=False)
    beside: Tensor | None = field(default=None, repr=False)

    @staticmethod
    def empty(num_layers: int, num_experts: int, hidden: int) -> DefaultVectors:
        """No tokens seen yet."""
        sums = torch.zeros(num_layers, num_experts, hidden, dtype=torch.float64)
        return DefaultVectors(sums, torch.zeros(num_layers, num_experts, dtype=torch.int64))

    def add(self, site: MoeSite, hidden: Tensor, ids: Tensor) -> None:
        """Add the outputs of a site's experts for `hidden` [T, H] routed to `ids` [T, K], weights left out.

        Raises:
            ModelError: the experts work in a space of their own.
        """
        top_k = ids.shape[1]
        pairs = ids.reshape(-1, 1)
        ones = torch.ones_like(pairs, dtype=hidden.dtype)
        output = site.experts.forward(hidden.repeat_interleave(top_k, dim=0), pairs, ones)
        flat = pairs.reshape(-1).cpu()
        if output.shape[-1] != self.sums.shape[-1]:
            raise ModelError(
                f"{site.path} works on {output.shape[-1]} numbers per token and the residual stream has "
                f"{self.sums.shape[-1]}, so it has no default vectors; prefetch by 'previous-token' instead"
            )
        self.sums[site.index].index_add_(0, flat, output.detach().to("cpu", torch.float64))
        self.counts[site.index] += torch.bincount(flat, minlength=self.counts.shape[1])

    def means(self) -> Tensor:
        """Default vectors [L, E, H], float32; zero for experts that were never seen."""
        return (self.sums / self.counts.clamp(min=1).unsqueeze(-1)).to(torch.float32)

    def defaults(self) -> LayerDefaults:
        """The means, and what comes beside them where that is anything."""
        has_any = self.beside is not None and bool(self.beside.any())
        return LayerDefaults(self.means(), self.beside if has_any else None)


def save_default_vectors(vectors: DefaultVectors, path: Path, source: str) -> None:
    """Write means [L, E, H] (float16) and the tokens behind each [L, E], with a sentence on the text they come from.

    Layers that add something beside their routed experts also have `beside` [L, H] (float16).
    """
    defaults = vectors.defaults()
    tensors = {"vectors": defaults.vectors.to(torch.float16), "counts": vectors.counts}
    if defaults.beside is not None:
        tensors["beside"] = defaults.beside.to(torch.float16)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"source": source})
        temporary.chmod(0o644)  # safetensors writes for the owner alone


def load_default_vectors(path: Path) -> LayerDefaults:
    """Read default vectors and what comes beside them, as float32.

    Raises:
        ModelError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            vectors: Tensor = file.get_tensor("vectors")
            beside: Tensor | None = file.get_tensor("beside").float() if "beside" in file.keys() else None  # noqa: SIM118
            return LayerDefaults(vectors.to(torch.float32), beside)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"no usable default vectors at {path} ({error}); make them with 'moe-studio calibrate-model', or with "
            "'moe-studio capture --predict quasi-hidden' and pass the file it writes with --vectors"
        ) from error
