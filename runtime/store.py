"""Host copies of the experts, taken out of a model and put back bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from runtime.slots import ExpertTensors
from trace_capture.hooks import MoeSite, expert_parameters


class ExpertStore:
    """The experts of a model in host memory.

    Taking them out leaves empty parameters behind, so that what stays in the model is only what must be on the device.
    For an emulated device the store holds the model's own tensors; for CUDA, pinned copies.

    Args:
        sites: of `discover`.
        pinned: copy the experts to page-locked memory, from which CUDA copies run at full rate.

    Raises:
        RuntimeError: page-locked memory could not be had.
    """

    def __init__(self, sites: Sequence[MoeSite], pinned: bool) -> None:
        self._sites = sites
        self._originals: list[dict[str, nn.Parameter]] = [expert_parameters(site.experts) for site in sites]
        self.banks: list[ExpertTensors] = []
        for parameters in self._originals:
            bank = {name: parameter.detach() for name, parameter in parameters.items()}
            if pinned:
                bank = {name: tensor.cpu().pin_memory() for name, tensor in bank.items()}
            self.banks.append(bank)
        self._pinned = pinned
        for site, parameters in zip(sites, self._originals, strict=True):
            for name, parameter in parameters.items():
                empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                site.experts._parameters[name] = nn.Parameter(empty, requires_grad=False)
        if pinned:
            self._originals = [{name: _shell(p) for name, p in parameters.items()} for parameters in self._originals]

    def restore(self) -> None:
        """Put the experts back into their modules."""
        for site, parameters, bank in zip(self._sites, self._originals, self.banks, strict=True):
            for name, parameter in parameters.items():
                if self._pinned:
                    parameter.data = bank[name].to(parameter.device)
                site.experts._parameters[name] = parameter


def _shell(parameter: nn.Parameter) -> nn.Parameter:
    """The same parameter object without its memory; `restore` fills it again on its device."""
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return parameter
