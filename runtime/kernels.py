"""Running experts from slots with transformers' own kernels, so that results are those of the untouched model.

A look-alike of the experts module whose weights are the slots is handed to the very kernel that the model would have
used, with expert ids replaced by slot numbers. Every layout (transposed, biases, interleaved, clamped) comes for free.
The same call on the experts in host memory is how the CPU runs some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

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


def on_device(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers known to the host as a tensor on a device, behind what that computes and without waiting for it.

    A plain copy to CUDA makes the host wait until the stream has come that far, and with it for every expert's copy
    that the stream waits for; one from page-locked memory does not.
    """
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def gathered(module: nn.Module, tensors: ExpertTensors, slots: Sequence[int]) -> SlotExperts:
    """A look-alike with just the given slots, in that order: copies them together in device memory."""
    index = on_device(slots, next(iter(tensors.values())).device)
    return SlotExperts(module, {name: tensor.index_select(0, index) for name, tensor in tensors.items()})


class Routed(NamedTuple):
    """What one layer of a pass is to compute: hidden [T, H], the experts of each token by number [T][K], and their
    weights [T, K]."""

    hidden: Tensor
    rows: list[list[int]]
    weights: Tensor


class Pairs(NamedTuple):
    """Some of a layer's (token, expert) pairs: their places among all T x K, and the slot of each pair's expert."""

    places: list[int]
    slots: list[int]


def pairs_of(rows: list[list[int]], slot_of: Mapping[int, int]) -> Pairs:
    """The pairs whose expert is in `slot_of`."""
    found = [(place, slot_of[expert]) for place, expert in enumerate(chain.from_iterable(rows)) if expert in slot_of]
    return Pairs([place for place, _ in found], [slot for _, slot in found])


def run_pairs(kernel: Kernel, experts: SlotExperts, hidden: Tensor, top_k: int, pairs: Pairs) -> Tensor:
    """Outputs [pairs, H] of some pairs, each by itself and unweighted, where `hidden` [T, H] is."""
    tokens = on_device([place // top_k for place in pairs.places], hidden.device)
    slots = on_device(pairs.slots, hidden.device).unsqueeze(1)
    ones = torch.ones(len(pairs.places), 1, dtype=hidden.dtype, device=hidden.device)
    return kernel(experts, hidden[tokens], slots, ones)


class WaveSum:
    """A layer computed in parts, with the rounding of a layer computed at once.

    Each (token, expert) pair is computed by itself, unweighted; weighting and adding up over K happens once at the end,
    in the kernels' own order. So it does not matter which part ran where or first, as long as the kernel gives a pair
    the same numbers there. Pairs whose id is no expert (a sentinel) count as zero.

    Args:
        routed: the layer.
        in_expert_order: whether the kernel adds experts up in order of their number, as `stock_kernel` tells.

    Attributes:
        computed: pairs that have been put in.
    """

    def __init__(self, routed: Routed, in_expert_order: bool) -> None:
        self._routed = routed
        self._in_expert_order = in_expert_order
        tokens, top_k = routed.weights.shape
        hidden = routed.hidden
        self._pairs = torch.zeros(tokens * top_k, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        self.computed = 0

    def add(self, kernel: Kernel, experts: SlotExperts, slot_of: Mapping[int, int]) -> None:
        """Compute the pairs of the experts in `slot_of` (expert id -> slot of `experts`)."""
        pairs = pairs_of(self._routed.rows, slot_of)
        self.put(pairs.places, run_pairs(kernel, experts, self._routed.hidden, self._routed.weights.shape[1], pairs))

    def put(self, places: Sequence[int], outputs: Tensor) -> None:
        """Take in pairs that were computed elsewhere: `outputs` [pairs, H]."""
        self._pairs[on_device(places, self._pairs.device)] = outputs
        self.computed += len(places)

    def total(self) -> Tensor:
        """The layer's output [T, H]."""
        weights, dtype = self._routed.weights, self._pairs.dtype
        tokens, top_k = weights.shape
        weighted = (self._pairs * weights.reshape(-1, 1)).view(tokens, top_k, -1)
        if not self._in_expert_order:
            return weighted.sum(dim=1).to(dtype)
        order = torch.tensor(self._routed.rows, device=weights.device).argsort(dim=1, stable=True)
        weighted = weighted.to(dtype).gather(1, order.unsqueeze(-1).expand_as(weighted))
        total = weighted[:, 0]
        for place in range(1, top_k):
            total = total + weighted[:, place]
        return total
