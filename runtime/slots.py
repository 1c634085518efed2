"""Device memory for experts: slots that the offload core's decisions fill and empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from simulator.policies.cache import Key
from simulator.policies.capacity import Capacity
from trace_capture.errors import ConfigError

ExpertTensors = Mapping[str, Tensor]
"""Fused parameters of one layer by name, first axis the expert (or slot)."""
Source = Tensor | Callable[[], Tensor]
"""One expert's slice in host memory, or what reads it."""


class ExpertBank(Protocol):
    """One parameter of a layer's experts in host memory or in files: what a tensor [E, ...] offers of it."""

    @property
    def shape(self) -> torch.Size:
        """Of all experts together."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""

    def __getitem__(self, expert: Any, /) -> Tensor:
        """One expert's slice [...]."""


ExpertBanks = Mapping[str, ExpertBank]
"""The banks of one layer by parameter name."""


def source_of(bank: ExpertBank, expert: int) -> Source:
    """What a link copies: the slice itself, or, where a file must be read, a call that the link's thread makes."""
    return bank[expert] if isinstance(bank, Tensor) else partial(bank.__getitem__, expert)


class SlotPool:
    """The slots of one partition.

    Args:
        like: parameters whose shape behind the first axis and whose dtype a slot must hold.
        num_slots: slots to allocate.
        device: where.
    """

    def __init__(self, like: ExpertBanks, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.tensors = {
            name: torch.zeros(num_slots, *tensor.shape[1:], dtype=tensor.dtype, device=device)
            for name, tensor in like.items()
        }
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[Key, int] = {}
        self.holder: list[Key | None] = [None] * num_slots
        """Which expert each slot holds or is being filled with: the provenance that checks are made against."""

    def take(self, key: Key) -> int:
        """A free slot for `key`; the core guarantees that there is one."""
        slot = self._free.pop()
        self._slot_of[key] = slot
        self.holder[slot] = key
        return slot

    def release(self, key: Key) -> None:
        """`key` has left."""
        slot = self._slot_of.pop(key)
        self.holder[slot] = None
        self._free.append(slot)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._slot_of.clear()
        self.holder = [None] * self.num_slots

    def slot_of(self, key: Key) -> int:
        """The slot of a resident key."""
        return self._slot_of[key]

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory of this pool."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def make_pools(
    banks: Sequence[ExpertBanks], capacity: Capacity, expert_bytes: Sequence[int], device: torch.device
) -> list[SlotPool]:
    """One pool per partition.

    Raises:
        ConfigError: layers that would share a pool have experts of different shapes.
    """
    pools = []
    for partition, size in enumerate(capacity.partition_bytes):
        layers = [layer for layer, owner in enumerate(capacity.partition_of_layer) if owner == partition]
        shapes = {
            tuple((name, tensor.shape[1:], tensor.dtype) for name, tensor in banks[layer].items()) for layer in layers
        }
        if len(shapes) > 1:
            raise ConfigError(
                "cache.scope = 'global' needs experts of one shape, and this model's layers differ; use scope = 'layer'"
            )
        pools.append(SlotPool(banks[layers[0]], size // expert_bytes[layers[0]], device))
    return pools
