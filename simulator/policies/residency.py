"""What has a place on the device, what is on its way there, and who leaves to make room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence

from simulator.policies.cache import CachePolicy, Key
from simulator.policies.capacity import Capacity
from simulator.policies.plans import ADMISSION
from trace_capture.model_shape import ModelShape

CanLeave = Callable[[Key], bool]
_FEW = 16


def for_look_ups(experts: Sequence[int]) -> Collection[int]:
    """The same experts; a few are found faster in a list than a set of them is made."""
    return experts if len(experts) <= _FEW else frozenset(experts)


def without_place(experts: Iterable[int], held: Container[int]) -> list[int]:
    """Those of a layer's experts that are not held, in order. A loop, since this is asked twice per layer and pass,
    and a comprehension makes a function each time."""
    absent: list[int] = []
    for expert in experts:
        if expert not in held:
            absent.append(expert)
    return absent


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
        key_of: per layer and expert its key, made once.
    """

    def __init__(self, shape: ModelShape, capacity: Capacity, cache: Sequence[CachePolicy]) -> None:
        self._expert_bytes = shape.expert_bytes
        self._partition_of_layer = capacity.partition_of_layer
        self._cache = list(cache)
        self.of_layer: list[dict[int, bool]] = [{} for _ in shape.expert_bytes]
        self.pending: dict[Key, str] = {}
        self.admissions = 0
        self.free_bytes = list(capacity.partition_bytes)
        layers = range(shape.num_moe_layers)
        self.key_of = [[(layer, expert) for expert in range(shape.num_experts)] for layer in layers]
        self._evicts_ahead = [policy.evicts_ahead for policy in cache]
        """Per partition, whether all who have to leave for several experts may be chosen at once."""
        for partition in range(len(cache)):
            sizes = {shape.expert_bytes[layer] for layer in layers if self._partition_of_layer[layer] == partition}
            self._evicts_ahead[partition] &= len(sizes) == 1

    def take(self, layer: int, keys: list[Key], reason: str, can_leave: CanLeave) -> list[tuple[Key, ...]]:
        """Give absent experts of a layer their places, in order, until no room can be made; their copies are on their
        way from now on.

        Returns:
            for each that got a place, who left for it.
        """
        partition = self._partition_of_layer[layer]
        size = self._expert_bytes[layer]
        free_bytes = self.free_bytes[partition]
        count = len(keys)
        evicts: list[tuple[Key, ...]]
        if free_bytes >= size * count:
            evicts = [()] * count
        elif self._evicts_ahead[partition]:
            room = free_bytes // size
            evicts = [()] * room
            for victim in self._cache[partition].evict(count - room, can_leave):
                del self.of_layer[victim[0]][victim[1]]
                evicts.append((victim,))
                free_bytes += size
            if len(evicts) < count:
                keys = keys[: len(evicts)]
        else:
            return self._take_in_turn(layer, keys, reason, can_leave)
        held, pending = self.of_layer[layer], self.pending
        for key in keys:
            held[key[1]] = False
            pending[key] = reason
        if reason == ADMISSION:
            self.admissions += len(keys)
        self.free_bytes[partition] = free_bytes - size * len(keys)
        self._cache[partition].all_admitted(keys)
        return evicts

    def land(self, keys: Iterable[Key]) -> None:
        """The copies of `keys` have finished."""
        of_layer, withdraw = self.of_layer, self.pending.pop
        for key in keys:
            layer, expert = key
            of_layer[layer][expert] = True
            if withdraw(key) == ADMISSION:
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

    def coming(self, layer: int, experts: Sequence[int]) -> tuple[tuple[Key, ...], int]:
        """Copies under way for a layer that runs `experts`: those it does not ask for, and how many it does."""
        stale: list[Key] = []
        late = 0
        for key in self.pending:
            if key[0] == layer:
                if key[1] in experts:
                    late += 1
                else:
                    stale.append(key)
        return tuple(stale), late

    def strays(self, layer: int) -> list[Key]:
        """Copies that nobody asked for and that fill the partition of a layer which can run nothing yet; they can leave
        once they have landed.

        Raises:
            RuntimeError: there is none.
        """
        partition = self._partition_of_layer[layer]
        strays = [key for key in self.pending if self._partition_of_layer[key[0]] == partition]
        if not strays:
            raise RuntimeError(f"MoE layer {layer} can neither run an expert nor wait for a copy")
        return strays

    def landed(self, layer: int) -> list[Key]:
        """Keys of a layer whose copies have landed."""
        return [(layer, expert) for expert, landed in self.of_layer[layer].items() if landed]

    def has_room(self, layer: int) -> bool:
        """Whether an expert of `layer` fits without anybody leaving."""
        return self.free_bytes[self._partition_of_layer[layer]] >= self._expert_bytes[layer]

    def num_bytes(self) -> int:
        """Bytes of device memory taken, those on their way included."""
        return sum(len(held) * size for held, size in zip(self.of_layer, self._expert_bytes, strict=True))

    def keys(self) -> list[Key]:
        """Keys with a place on the device, those on their way included."""
        return [(layer, expert) for layer, held in enumerate(self.of_layer) for expert in held]

    def _take_in_turn(self, layer: int, keys: list[Key], reason: str, can_leave: CanLeave) -> list[tuple[Key, ...]]:
        """As `take`, each expert admitted before room is made for the next."""
        partition = self._partition_of_layer[layer]
        evicts: list[tuple[Key, ...]] = []
        for key in keys:
            victims = self._victims(layer, can_leave)
            if victims is None:
                break
            for victim in victims:
                self.leave(victim)
            self.of_layer[layer][key[1]] = False
            self.pending[key] = reason
            self.admissions += reason == ADMISSION
            self.free_bytes[partition] -= self._expert_bytes[layer]
            self._cache[partition].admitted(key)
            evicts.append(victims)
        return evicts

    def _victims(self, layer: int, can_leave: CanLeave) -> tuple[Key, ...] | None:
        """Who leaves so that an expert of `layer` fits; None when not enough of them may."""
        partition = self._partition_of_layer[layer]
        size = self._expert_bytes[layer]
        freed = self.free_bytes[partition]
        victims: list[Key] = []
        while freed < size:
            victim = self._cache[partition].choose_victim(lambda key: key not in victims and can_leave(key))
            if victim is None:
                return None
            victims.append(victim)
            freed += self._expert_bytes[victim[0]]
        return tuple(victims)
