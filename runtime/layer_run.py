"""What the live engine holds of a layer while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from runtime.host_experts import HostJob
from runtime.kernels import Routed, WaveSum


class Foreseen(NamedTuple):
    """Routing predicted for the next layer: ids and weights [T, K], and the ids as the host has them [T][K]."""

    ids: Tensor
    weights: Tensor
    rows: list[list[int]]


@dataclass
class LayerRun:
    """One layer of a pass while it runs."""

    layer: int
    routed: Routed
    index: Tensor
    num_asked: int = 0
    """Distinct ids in the layer's rows, sentinels among them."""
    output: Tensor | None = None
    parts: WaveSum | None = None
    job: HostJob | None = None
    num_loads: int = 0
    submitted_ns: tuple[int, int, int] | None = None
    """Moments decided, predicted, submitted."""
    landed_ns: int = 0

    @property
    def moments_ns(self) -> tuple[int, int, int, int]:
        """Decided, predicted, submitted, landed; 0 for a layer that asked for nothing."""
        return (*(self.submitted_ns or (0, 0, 0)), self.landed_ns)
