"""What a layer adds to the residual stream beside its routed experts: the other half of the layer default d_l.

Shared experts (gated or not), scales and norms behind the experts, and whole dense layers up to the next
Mixture-of-Experts layer are all of this kind. Their mean over calibration text is one vector per layer, found without
looking for any of them by name: it is what reaches the next Mixture-of-Experts block and is neither the residual nor
the routed experts' output. Speculating Experts (arXiv 2603.19289) leaves shared experts and dense layers open.

The shared expert's true output would foresee a little better, but in nearly all architectures it is computed after the
routed experts, so it is not there yet when the next layer is predicted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trace_capture.hooks import CausalModel, MoeSite

_BLOCK = re.compile(r".*?\.\d+(?=\.|$)")


class Remainder:
    """Running float64 means [L, H] of what reaches the next block beside residual and routed experts.

    Where the blocks pass on several streams (hyper-connections), it is what the experts' own module gives beside its
    routed experts. The last layer predicts nothing and has none.

    Args:
        model: an untouched transformers causal language model.
        sites: of `discover`.
        hidden: H.
    """

    def __init__(self, model: CausalModel, sites: Sequence[MoeSite], hidden: int) -> None:
        self._model = model
        self._sites = sites
        self._sums = torch.zeros(len(sites), hidden, dtype=torch.float64)
        self._tokens = [0] * len(sites)
        self._is_rounding = [True] * len(sites)
        self._residual: dict[int, Tensor] = {}
        self._routed: dict[int, Tensor] = {}
        self._module_output: dict[int, Tensor] = {}

    def attach(self) -> list[RemovableHandle]:
        """Install the hooks that look on; the caller removes the handles."""
        handles = []
        for site, following in zip(self._sites, self._sites[1:], strict=False):
            source = site.norm or site.router
            handles.append(source.register_forward_pre_hook(self._keep_residual(site.index)))
            handles.append(site.experts.register_forward_hook(self._keep_routed(site.index)))
            for module in _modules_around(self._model, site):
                handles.append(module.register_forward_hook(self._keep_output(site.index)))
            block = self._model.get_submodule(block_path(following))
            handles.append(block.register_forward_pre_hook(self._add(site.index), with_kwargs=True))
        return handles

    def means(self) -> Tensor:
        """[L, H], float32; exactly zero for layers that add nothing else but rounding."""
        means = self._sums / torch.tensor(self._tokens, dtype=torch.float64).clamp(min=1).unsqueeze(-1)
        means[torch.tensor(self._is_rounding)] = 0
        return means.to(torch.float32)

    def _keep_residual(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._residual[index] = args[0].clone()

        return hook

    def _keep_routed(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
            self._routed[index] = output.clone()

        return hook

    def _keep_output(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.numel() == self._routed[index].numel():
                self._module_output[index] = first.clone()

        return hook

    def _add(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            routed = self._routed.pop(index)
            residual, output = self._residual.pop(index), self._module_output.pop(index, None)
            if stream.numel() == residual.numel() == routed.numel():
                self._count(index, stream, routed, residual)
            elif output is not None:
                self._count(index, output, routed, torch.zeros_like(routed))

        return hook

    def _count(self, index: int, whole: Tensor, routed: Tensor, residual: Tensor) -> None:
        width = self._sums.shape[-1]
        parts = [part.detach().reshape(-1, width).to("cpu", torch.float64) for part in (whole, residual, routed)]
        rest = parts[0] - parts[1] - parts[2]
        largest = 2 * torch.finfo(whole.dtype).eps * max(float(part.abs().max()) for part in parts)
        self._is_rounding[index] &= bool(rest.abs().max() <= largest)
        self._sums[index] += rest.sum(dim=0)
        self._tokens[index] += len(rest)


def block_path(site: MoeSite) -> str:
    """Module path of the decoder layer that a site belongs to."""
    found = _BLOCK.match(site.path)
    return found.group() if found else site.path


def _modules_around(model: CausalModel, site: MoeSite) -> list[nn.Module]:
    """The modules around a site's experts within its decoder layer that do not hold its norm, innermost first."""
    modules = []
    path = site.path.rpartition(".")[0]
    while len(path) > len(block_path(site)):
        module = model.get_submodule(path)
        if site.norm is None or all(part is not site.norm for part in module.modules()):
            modules.append(module)
        path = path.rpartition(".")[0]
    return modules
