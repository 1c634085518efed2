"""The experts outside the device: taken out of a model and put back bit for bit, or left in the model's files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.expert_files import ExpertFiles
from runtime.slots import ExpertBanks, Source, source_of
from simulator.policies.cache import Key
from trace_capture.hooks import MoeSite, expert_parameters


class ExpertStore:
    """The experts of a model in host memory.

    Taking them out leaves empty parameters behind, so that what stays in the model is only what must be on the device.
    For an emulated device the store holds the model's own tensors; for CUDA, pinned copies. Of a streamed model it
    holds what reads its files, and what is put back are shapes without numbers.

    Args:
        sites: of `discover`.
        pinned: copy the experts to page-locked memory, from which CUDA copies run at full rate.
        files: where the experts of a streamed model are.

    Attributes:
        banks: per MoE layer, its experts by parameter name.
        note: what a user should be told, such as that page-locked memory could not be had; empty when all is well.
    """

    def __init__(self, sites: Sequence[MoeSite], pinned: bool, files: ExpertFiles | None = None) -> None:
        self._sites = sites
        self._originals: list[dict[str, nn.Parameter]] = [expert_parameters(site.experts) for site in sites]
        self.banks: list[ExpertBanks] = []
        self._sources: dict[Key, tuple[Source, ...]] = {}
        self.note = ""
        for site, parameters in zip(sites, self._originals, strict=True):
            if files is not None:
                self.banks.append(files.layer(site.path, pinned))
                continue
            bank = {name: parameter.detach() for name, parameter in parameters.items()}
            if pinned:
                bank = {name: self._pinned(tensor.cpu()) for name, tensor in bank.items()}
            self.banks.append(bank)
        self._is_copied = pinned and files is None
        for site, parameters in zip(sites, self._originals, strict=True):
            for name, parameter in parameters.items():
                device = "cpu" if parameter.is_meta else parameter.device
                empty = torch.empty(0, dtype=parameter.dtype, device=device)
                site.experts._parameters[name] = nn.Parameter(empty, requires_grad=False)
        if self._is_copied:
            self._originals = [{name: _shell(p) for name, p in parameters.items()} for parameters in self._originals]

    def sources(self, key: Key) -> tuple[Source, ...]:
        """What a link copies for an expert, a source per parameter in the order of its layer's banks."""
        found = self._sources.get(key)
        if found is None:
            layer, expert = key
            found = self._sources[key] = tuple(source_of(bank, expert) for bank in self.banks[layer].values())
        return found

    def _pinned(self, tensor: Tensor) -> Tensor:
        """The tensor in page-locked memory, or as it is where the system refuses."""
        try:
            return tensor.pin_memory()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self.note = (
                f"page-locked memory could not be had ({reason}): experts are copied from pageable memory, at a "
                "fraction of the link's rate; free some RAM, or raise the limit of locked memory (ulimit -l)"
            )
            return tensor

    def restore(self) -> None:
        """Put the experts back into their modules."""
        for site, parameters, bank in zip(self._sites, self._originals, self.banks, strict=True):
            for name, parameter in parameters.items():
                if self._is_copied:
                    parameter.data = bank[name][:].to(parameter.device)
                site.experts._parameters[name] = parameter


def _shell(parameter: nn.Parameter) -> nn.Parameter:
    """The same parameter object without its memory; `restore` fills it again on its device."""
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return parameter
