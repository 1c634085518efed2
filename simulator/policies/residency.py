"""What has a place on the device, what is on its way there, and who leaves to make room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulator.policies.cache import CachePolicy, Key
from simulator.policies.capacity import Capacity
from simulator.policies.plans import ADMISSION
from trace_capture.model_shape import ModelShape


class Residency:
    """Places in the partitions of device memory.

    Args:
        shape: layers and bytes per expert.
        capacity: partitions.
        cache: one eviction policy per partition.

    Attributes:
        of_layer: per layer, experts with a place on the device; True when the copy has landed, False until then.
        pending: copies that are queued or in flight, in order of submission, and why they were loaded.
        admissions: how many of these were loaded for having run on the CPU.
        free_bytes: per partition.
        leaving: victims chosen for the load being planned.
    """

    def __init__(self, shape: ModelShape, capacity: Capacity, cache: Sequence[CachePolicy]) -> None:
        self._expert_bytes = shape.expert_bytes
        self._partition_of_layer = capacity.partition_of_layer
        self._cache = list(cache)
        self.of_layer: list[dict[int, bool]] = [{} for _ in shape.expert_bytes]
        self.pending: dict[Key, str] = {}
        self.admissions = 0
        self.free_bytes = list(capacity.partition_bytes)
        self.leaving: Sequence[Key] = ()

    def take(self, key: Key, reason: str) -> None:
        """Give `key` its place; its copy is on its way from now on."""
        layer, expert = key
        partition = self._partition_of_layer[layer]
        self.of_layer[layer][expert] = False
        self.pending[key] = reason
        if reason == ADMISSION:
            self.admissions += 1
        self.free_bytes[partition] -= self._expert_bytes[layer]
        self._cache[partition].admitted(key)

    def land(self, key: Key) -> None:
        """The copy of `key` has finished."""
        self.of_layer[key[0]][key[1]] = True
        if self.pending.pop(key) == ADMISSION:
            self.admissions -= 1

    def leave(self, key: Key) -> None:
        """`key` gives its place up, whether its copy has landed or was withdrawn."""
        layer, expert = key
        partition = self._partition_of_layer[layer]
        del self.of_layer[layer][expert]
        if self.pending and self.pending.pop(key, "") == ADMISSION:
            self.admissions -= 1
        self.free_bytes[partition] += self._expert_bytes[layer]
        self._cache[partition].removed(key)

    def has_room(self, layer: int) -> bool:
        """Whether an expert of `layer` fits without anybody leaving."""
        return self.free_bytes[self._partition_of_layer[layer]] >= self._expert_bytes[layer]

    def victims(self, layer: int, can_leave: Callable[[Key], bool]) -> tuple[Key, ...] | None:
        """Who leaves so that an expert of `layer` fits; None when not enough of them may."""
        partition = self._partition_of_layer[layer]
        size = self._expert_bytes[layer]
        freed = self.free_bytes[partition]
        if freed >= size:
            return ()
        policy = self._cache[partition]
        victims: list[Key] = []
        self.leaving = victims
        while freed < size:
            victim = policy.choose_victim(can_leave)
            if victim is None:
                return None
            victims.append(victim)
            freed += self._expert_bytes[victim[0]]
        return tuple(victims)

    def num_bytes(self) -> int:
        """Bytes of device memory taken, those on their way included."""
        return sum(len(held) * size for held, size in zip(self.of_layer, self._expert_bytes, strict=True))

    def keys(self) -> list[Key]:
        """Keys with a place on the device, those on their way included."""
        return [(layer, expert) for layer, held in enumerate(self.of_layer) for expert in held]
