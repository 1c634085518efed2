"""Device memory for experts: slots that the offload core's decisions fill and empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

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


class StaleSlotError(RuntimeError):
    """A slot that is about to be read does not hold what its expert's last load was to put there."""


class SlotTag(NamedTuple):
    """Whose numbers a slot holds, and of which of its loads."""

    layer: int
    expert: int
    version: int


class SlotPool:
    """The slots of one partition.

    Two books are kept and compared at every use: which load each slot was last given away for, and which load was
    last carried out into it. A slot that was given away while the copy never came, or came for somebody else, is
    thereby noticed (the released code of arXiv 2603.19289 runs its last layer on such slots).

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
        self.views = [tuple(tensor[slot] for tensor in self.tensors.values()) for slot in range(num_slots)]
        """Per slot what a copy into it fills, in the order of `tensors`; made once, since a view takes the host longer
        than everything else about a load."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[Key, int] = {}
        self._versions = [0] * num_slots
        self.given: list[SlotTag | None] = [None] * num_slots
        """The load that each slot was given away for."""
        self.written: list[SlotTag | None] = [None] * num_slots
        """The load that each slot was last filled by; the link writes it when the bytes are there."""

    def take(self, key: Key) -> int:
        """A free slot for `key`; the core guarantees that there is one."""
        slot = self._free.pop()
        self._slot_of[key] = slot
        self._versions[slot] += 1
        self.given[slot] = SlotTag(*key, self._versions[slot])
        return slot

    def stamp_of(self, slot: int) -> Callable[[], None]:
        """What a link calls when it has carried out the load that `slot` was just given away for."""
        return partial(self.written.__setitem__, slot, self.given[slot])

    def checked_slot(self, key: Key) -> int:
        """The slot of a resident key, which holds its numbers.

        Raises:
            StaleSlotError: it holds something else.
        """
        slot = self._slot_of[key]
        tag = self.given[slot]
        if tag is None or self.written[slot] != tag or tag[:2] != key:
            raise StaleSlotError(
                f"slot {slot} is expert {key[1]}'s of MoE layer {key[0]} (given away for {tag}), but holds "
                f"{self.written[slot]}"
            )
        return slot

    def release(self, key: Key) -> None:
        """`key` has left."""
        slot = self._slot_of.pop(key)
        self.given[slot] = None
        self._free.append(slot)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._slot_of.clear()
        self.given = [None] * self.num_slots
        self.written[:] = [None] * self.num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory of this pool."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def make_pools(
    banks: Sequence[ExpertBanks], capacity: Capacity, expert_bytes: Sequence[int], device: torch.device
) -> list[SlotPool]:
    """One pool per partition.

    Raises:
        ConfigError: layers that would share a pool have experts of different shapes, or the device has no room.
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
        try:
            pools.append(SlotPool(banks[layers[0]], size // expert_bytes[layers[0]], device))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{device} has no room for slots of {capacity.total_bytes:,} bytes; make cache.budget_ratio, "
                "budget_bytes or slots_per_layer smaller, or free device memory"
            ) from error
    return pools
