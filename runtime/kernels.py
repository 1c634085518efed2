"""Running experts from slots with transformers' own kernels, so that results are those of the untouched model.

A look-alike of the experts module whose weights are the slots is handed to the very kernel that the model would have
used, with expert ids replaced by slot numbers. Every layout (transposed, biases, interleaved, clamped) comes for free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from runtime.slots import ExpertTensors

Kernel = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class SlotExperts:
    """Looks like `module` to a kernel, but its expert weights are `tensors` [S, ...] and it has S experts."""

    def __init__(self, module: nn.Module, tensors: ExpertTensors) -> None:
        self._module = module
        for name, tensor in tensors.items():
            setattr(self, name, tensor)
        self.num_experts = int(next(iter(tensors.values())).shape[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def stock_kernel(module: nn.Module, implementation: str | None) -> tuple[Kernel, bool]:
    """The kernel that an untouched model would run for `module`.

    Returns:
        the kernel, and whether it adds experts up in order of their number (the eager loop does), so that slots must
        be presented in that order for equal rounding.
    """
    if implementation in (None, "eager"):
        return type(module).forward.__wrapped__, True  # type: ignore[attr-defined]
    return ALL_EXPERTS_FUNCTIONS[implementation], False


def gathered(module: nn.Module, tensors: ExpertTensors, slots: Sequence[int]) -> SlotExperts:
    """A look-alike with just the given slots, in that order: copies them together in device memory."""
    index = torch.tensor(slots, device=next(iter(tensors.values())).device)
    return SlotExperts(module, {name: tensor.index_select(0, index) for name, tensor in tensors.items()})


class WaveSum:
    """A layer computed in waves, with the rounding of a layer computed at once.

    Each (token, expert) pair is computed by itself, unweighted; weighting and adding up over K happens once at the end,
    in the kernels' own order. Pairs whose id is no expert (a sentinel) count as zero.

    Args:
        hidden: [T, H].
        top_k_index, top_k_weights: [T, K].
    """

    def __init__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        self._hidden = hidden
        self._ids = top_k_index.reshape(-1)
        self._weights = top_k_weights
        self._pairs = torch.zeros(self._ids.shape[0], hidden.shape[1], dtype=hidden.dtype, device=hidden.device)

    def add(self, kernel: Kernel, experts: SlotExperts, slot_of: Mapping[int, int]) -> None:
        """Compute the pairs of the experts in `slot_of` (expert id -> slot of `experts`)."""
        chosen = torch.tensor(list(slot_of), device=self._ids.device)
        rows = torch.isin(self._ids, chosen).nonzero().squeeze(1)
        lookup = torch.zeros(int(chosen.max()) + 1, dtype=self._ids.dtype, device=self._ids.device)
        lookup[chosen] = torch.tensor(list(slot_of.values()), dtype=self._ids.dtype, device=self._ids.device)
        slots = lookup[self._ids[rows]].unsqueeze(1)
        ones = torch.ones(len(rows), 1, dtype=self._hidden.dtype, device=self._hidden.device)
        self._pairs[rows] = kernel(experts, self._hidden[rows // self._weights.shape[1]], slots, ones)

    def total(self) -> Tensor:
        """The layer's output [T, H]."""
        tokens, top_k = self._weights.shape
        weighted = self._pairs * self._weights.reshape(-1, 1)
        return weighted.view(tokens, top_k, -1).sum(dim=1).to(self._hidden.dtype)
