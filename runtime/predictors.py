"""Foreseeing the experts of the next layer (Speculating Experts, arXiv 2603.19289)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime.default_vectors import LayerDefaults
from trace_capture.hooks import MoeSite


class QuasiHidden:
    """The next layer's experts, foreseen from this layer's residual and a default vector per expert.

    q_l = LN_{l+1}(d_l + r_l) into the router of layer l+1, where r_l is the residual in front of layer l's
    MoE norm and d_l the sum over executed experts of router weight x default vector (Speculating Experts,
    arXiv 2603.19289, section 3; default vectors after Panda et al., arXiv 2504.12463), plus the mean of what the layer
    adds beside them, such as a shared expert's output (a rule of this project; the paper has none).

    The first Mixture-of-Experts layer is always native, also behind dense layers: predictions per token are L - 1.

    Args:
        sites: of `discover`; predictions exist for sites 1..L-1.
        defaults: what d_l is made of; a tensor [L, E, H] stands for vectors with nothing beside them.
    """

    name = "quasi-hidden"

    def __init__(self, sites: Sequence[MoeSite], defaults: Tensor | LayerDefaults) -> None:
        self._sites = sites
        device, dtype = _place(sites[0].router)
        found = LayerDefaults(defaults) if isinstance(defaults, Tensor) else defaults
        self._vectors = found.vectors.to(device=device, dtype=dtype)
        self._beside = None if found.beside is None else found.beside.to(device=device, dtype=dtype)
        self._residual: dict[int, Tensor] = {}

    def attach(self) -> list[RemovableHandle]:
        """Install the hooks that read residuals and live router arguments; the caller removes the handles."""

        def hook_for(index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                self._residual[index] = args[0]

            return hook

        sources = [(site.norm or site.router, site.index) for site in self._sites]
        handles = [module.register_forward_pre_hook(hook_for(index)) for module, index in sources]
        return handles + [handle for site in self._sites for handle in site.watch()]

    def state(self, layer: int, ids: Tensor, weights: Tensor) -> Tensor:
        """d_l + r_l of MoE layer `layer`, the quasi-hidden state in front of the next norm: [T, H]."""
        residual = self._residual[layer]
        default = (self._vectors[layer][ids] * weights.unsqueeze(-1).to(self._vectors.dtype)).sum(dim=1)
        if self._beside is not None:
            default = default + self._beside[layer]
        return residual.reshape(default.shape) + default

    def predict(self, layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights foreseen for MoE layer `layer` + 1, given the routing [T, K] of `layer`; each [T, K]."""
        return self._sites[layer + 1].route(self.state(layer, ids, weights))


def _place(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    parameter = next(module.parameters())
    return parameter.device, parameter.dtype
