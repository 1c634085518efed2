"""What has a place on the device, what is on its way there, and who leaves to make room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from simulator.policies.cache import CachePolicy, Key
from simulator.policies.capacity import Capacity
from simulator.policies.plans import REASONS, Load, make_load
from trace_capture.model_shape import ModelShape

CanLeave = Callable[[Key], bool]
_FEW = 16
Item = TypeVar("Item", int, Key)


def for_look_ups(items: Sequence[Item]) -> Collection[Item]:
    """The same experts or keys; a few are found faster in a list than a set of them is made."""
    return items if len(items) <= _FEW else frozenset(items)


class Residency:
    """Places in the partitions of device memory.

    Args:
        shape: layers and bytes per expert.
        capacity: partitions.
        cache: one eviction policy per partition.

    Attributes:
        of_layer: per layer, experts with a place on the device; True when the copy has landed, False until then.
        under_way: per layer, experts whose copies are queued or in flight, in order of submission, and why.
        under_way_for: how many these are, by reason.
        free_bytes: per partition.
        key_of: per layer and expert its key, made once.
        expert_bytes: size of an expert of each layer.
    """

    def __init__(self, shape: ModelShape, capacity: Capacity, cache: Sequence[CachePolicy]) -> None:
        self.expert_bytes = shape.expert_bytes
        self._partition_of_layer = capacity.partition_of_layer
        self._cache = list(cache)
        self.of_layer: list[dict[int, bool]] = [{} for _ in shape.expert_bytes]
        self.under_way: list[dict[int, str]] = [{} for _ in shape.expert_bytes]
        self.under_way_for = dict.fromkeys(REASONS, 0)
        self.free_bytes = list(capacity.partition_bytes)
        layers = range(shape.num_moe_layers)
        self.key_of = [[(layer, expert) for expert in range(shape.num_experts)] for layer in layers]
        self._evicts_ahead = [policy.evicts_ahead for policy in cache]
        """Per partition, whether all who have to leave for several experts may be chosen at once."""
        for partition in range(len(cache)):
            sizes = {shape.expert_bytes[layer] for layer in layers if self._partition_of_layer[layer] == partition}
            self._evicts_ahead[partition] &= len(sizes) == 1

    def without_place(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Experts of a layer that have no place, in order. A loop, since this is asked in every layer and pass, and a
        comprehension makes a function each time."""
        held = self.of_layer[layer]
        absent: list[int] = []
        for expert in experts:
            if expert not in held:
                absent.append(expert)
        return absent

    def take(
        self, layer: int, experts: Sequence[int], reason: str, priority: int, can_leave: CanLeave
    ) -> tuple[list[Load], int]:
        """Give absent experts of a layer their places, in order, until no room can be made.

        Returns:
            a load for each that got a place, whose copies are on their way from now on; and how many left for them.
        """
        partition = self._partition_of_layer[layer]
        size = self.expert_bytes[layer]
        room = self.free_bytes[partition] // size
        count = len(experts)
        victims: list[Key] = []
        if room < count:
            if not self._evicts_ahead[partition]:
                return self._take_in_turn(layer, experts, reason, priority, can_leave)
            victims = self._cache[partition].evict(count - room, can_leave)
            for gone, expert in victims:
                del self.of_layer[gone][expert]
            if room + len(victims) < count:
                count = room + len(victims)
                experts = experts[:count]
        self.free_bytes[partition] -= size * (count - len(victims))
        row, held, under_way = self.key_of[layer], self.of_layer[layer], self.under_way[layer]
        loads: list[Load] = []
        evicts: tuple[Key, ...] = ()
        for expert in experts:
            held[expert] = False
            under_way[expert] = reason
            if len(loads) >= room:
                evicts = (victims[len(loads) - room],)
            loads.append(make_load((row[expert], size, reason, priority, evicts)))
        self.under_way_for[reason] += count
        self._cache[partition].all_admitted(row, experts)
        return loads, len(victims)

    def land(self, keys: Iterable[Key]) -> None:
        """The copies of `keys` have finished."""
        of_layer, under_way, under_way_for = self.of_layer, self.under_way, self.under_way_for
        for layer, expert in keys:
            of_layer[layer][expert] = True
            under_way_for[under_way[layer].pop(expert)] -= 1

    def leave(self, key: Key) -> None:
        """`key` gives its place up, whether its copy has landed or was withdrawn."""
        layer, expert = key
        partition = self._partition_of_layer[layer]
        if not self.of_layer[layer].pop(expert):
            self.under_way_for[self.under_way[layer].pop(expert)] -= 1
        self.free_bytes[partition] += self.expert_bytes[layer]
        self._cache[partition].removed(key)

    def reason_of(self, key: Key) -> str:
        """Why a copy under way was loaded."""
        return self.under_way[key[0]][key[1]]

    def coming(self) -> Iterator[Key]:
        """Copies under way, layer by layer in order of submission."""
        return ((layer, expert) for layer, experts in enumerate(self.under_way) for expert in experts)

    def not_asked(self, layer: int, awaited: Collection[int]) -> tuple[Key, ...]:
        """Copies under way for a layer, without those that it awaits."""
        row = self.key_of[layer]
        return tuple([row[expert] for expert in self.under_way[layer] if expert not in awaited])

    def strays(self, layer: int) -> list[Key]:
        """Copies that nobody asked for and that fill the partition of a layer which can run nothing yet; they can leave
        once they have landed.

        Raises:
            RuntimeError: there is none.
        """
        partition = self._partition_of_layer[layer]
        strays = [key for key in self.coming() if self._partition_of_layer[key[0]] == partition]
        if not strays:
            raise RuntimeError(f"MoE layer {layer} can neither run an expert nor wait for a copy")
        return strays

    def landed(self, layer: int) -> list[Key]:
        """Keys of a layer whose copies have landed."""
        return [(layer, expert) for expert, landed in self.of_layer[layer].items() if landed]

    def has_room(self, layer: int) -> bool:
        """Whether an expert of `layer` fits without anybody leaving."""
        return self.free_bytes[self._partition_of_layer[layer]] >= self.expert_bytes[layer]

    def num_bytes(self) -> int:
        """Bytes of device memory taken, those on their way included."""
        return sum(len(held) * size for held, size in zip(self.of_layer, self.expert_bytes, strict=True))

    def keys(self) -> list[Key]:
        """Keys with a place on the device, those on their way included."""
        return [(layer, expert) for layer, held in enumerate(self.of_layer) for expert in held]

    def _take_in_turn(
        self, layer: int, experts: Sequence[int], reason: str, priority: int, can_leave: CanLeave
    ) -> tuple[list[Load], int]:
        """As `take`, each expert admitted before room is made for the next."""
        partition = self._partition_of_layer[layer]
        size = self.expert_bytes[layer]
        loads: list[Load] = []
        evicted = 0
        for expert in experts:
            victims = self._victims(layer, can_leave)
            if victims is None:
                break
            for victim in victims:
                self.leave(victim)
            self.of_layer[layer][expert] = False
            self.under_way[layer][expert] = reason
            self.under_way_for[reason] += 1
            self.free_bytes[partition] -= size
            key = self.key_of[layer][expert]
            self._cache[partition].admitted(key)
            loads.append(make_load((key, size, reason, priority, victims)))
            evicted += len(victims)
        return loads, evicted

    def _victims(self, layer: int, can_leave: CanLeave) -> tuple[Key, ...] | None:
        """Who leaves so that an expert of `layer` fits; None when not enough of them may."""
        partition = self._partition_of_layer[layer]
        size = self.expert_bytes[layer]
        freed = self.free_bytes[partition]
        victims: list[Key] = []
        while freed < size:
            victim = self._cache[partition].choose_victim(lambda key: key not in victims and can_leave(key))
            if victim is None:
                return None
            victims.append(victim)
            freed += self.expert_bytes[victim[0]]
        return tuple(victims)
