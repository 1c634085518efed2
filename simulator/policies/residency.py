"""What has a place on the device, what is on its way there, and who leaves to make room."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

from simulator.policies.capacity import Capacity
from simulator.policies.eviction import CachePolicy, Key, Leavers
from simulator.policies.plans import ABSENT, BEHIND_PRIORITY, COMING, LANDED, Load, make_load
from trace_capture.model_shape import ModelShape

_FEW = 16
Item = TypeVar("Item", int, Key)


@lru_cache(maxsize=4)
def _keys(layers: int, experts: int) -> list[list[Key]]:
    """The keys of a model, which all replays of it share."""
    return [[(layer, expert) for expert in range(experts)] for layer in range(layers)]


def for_look_ups(items: Sequence[Item]) -> Collection[Item]:
    """The same experts or keys; a few are found faster in a list than a set of them is made."""
    return items if len(items) <= _FEW else frozenset(items)


class Unneeded(Leavers):
    """What has landed may leave, but for what the current layer still has to run.

    Args:
        places, under_way: as of `Residency`.

    Attributes:
        layer: the current one.
        active: those of its experts.
    """

    def __init__(self, places: list[bytearray], under_way: list[list[Load]]) -> None:
        self._places = places
        self._under_way = under_way
        self.layer = -1
        self.active: Collection[int] = ()

    def allow(self, key: Key) -> bool:
        """See `Leavers`."""
        layer, expert = key
        places = self._places[layer]
        return places[expert] == LANDED and (layer != self.layer or expert not in self.active)

    def kept_back(self) -> list[Key]:
        """See `Leavers`."""
        kept: list[Key] = []
        for loads in self._under_way:
            for load in loads:
                kept.append(load.key)
        for expert in self.active:
            kept.append((self.layer, expert))
        return kept


class Unforeseen(Leavers):
    """As `Unneeded`; what the next layer may need stays as well.

    Args:
        unneeded: the others.
        num_experts: E.
    """

    def __init__(self, unneeded: Unneeded, num_experts: int) -> None:
        self._unneeded = unneeded
        self._experts: Sequence[int] = ()
        self._is_foreseen = bytearray(num_experts)

    def foresee(self, experts: Sequence[int]) -> None:
        """These experts of the layer after the current one may be needed, and no others."""
        for expert in self._experts:
            self._is_foreseen[expert] = 0
        for expert in experts:
            self._is_foreseen[expert] = 1
        self._experts = experts

    def allow(self, key: Key) -> bool:
        """See `Leavers`."""
        if not self._unneeded.allow(key):
            return False
        layer, expert = key
        return layer != self._unneeded.layer + 1 or not self._is_foreseen[expert]

    def kept_back(self) -> list[Key]:
        """See `Leavers`."""
        kept = self._unneeded.kept_back()
        for expert in self._experts:
            kept.append((self._unneeded.layer + 1, expert))
        return kept


class Except(Leavers):
    """As others, without some keys."""

    def __init__(self, keys: Collection[Key], others: Leavers) -> None:
        self._keys = keys
        self._others = others

    def allow(self, key: Key) -> bool:
        """See `Leavers`."""
        return key not in self._keys and self._others.allow(key)

    def kept_back(self) -> list[Key] | None:
        """See `Leavers`."""
        kept = self._others.kept_back()
        return None if kept is None else [*kept, *self._keys]


class Residency:
    """Places in the partitions of device memory.

    Args:
        shape: layers and bytes per expert.
        capacity: partitions.
        cache: one eviction policy per partition.

    Attributes:
        places: per layer what place each expert has, a byte each.
        under_way: per layer, loads that are queued or in flight, in order of submission. They are few, so that a list
            is faster than a dictionary.
        num_behind: how many of these are for later passes.
        free_bytes: per partition.
        key_of: per layer and expert its key, made once.
        expert_bytes: size of an expert of each layer.
    """

    def __init__(self, shape: ModelShape, capacity: Capacity, cache: Sequence[CachePolicy]) -> None:
        self.expert_bytes = list(shape.expert_bytes)
        self._partition_of_layer = list(capacity.partition_of_layer)
        self._cache = list(cache)
        layers = range(shape.num_moe_layers)
        self.places = [bytearray(shape.num_experts) for _ in layers]
        self.under_way: list[list[Load]] = [[] for _ in layers]
        self.num_behind = 0
        self.free_bytes = list(capacity.partition_bytes)
        self.key_of = _keys(shape.num_moe_layers, shape.num_experts)
        sizes: list[set[int]] = [set() for _ in cache]
        for partition, size in zip(self._partition_of_layer, self.expert_bytes, strict=True):
            sizes[partition].add(size)
        self._evicts_ahead = [policy.evicts_ahead and len(held) == 1 for policy, held in zip(cache, sizes, strict=True)]
        """Per partition, whether all who have to leave for several experts may be chosen at once."""

    def without_place(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Experts of a layer that have no place, in order. A loop, since this is asked in every layer and pass, and a
        comprehension makes a function each time."""
        places = self.places[layer]
        absent: list[int] = []
        for expert in experts:
            if not places[expert]:
                absent.append(expert)
        return absent

    def take(
        self, layer: int, experts: Sequence[int], reason: str, priority: int, leavers: Leavers
    ) -> tuple[list[Load], int]:
        """Give absent experts of a layer their places, in order, until no room can be made.

        Returns:
            a load for each that got a place, whose copies are on their way from now on; and how many left for them.
        """
        partition = self._partition_of_layer[layer]
        policy = self._cache[partition]
        size = self.expert_bytes[layer]
        room = self.free_bytes[partition] // size
        count = len(experts)
        victims: list[Key] = []
        if room < count:
            if not self._evicts_ahead[partition]:
                return self._take_in_turn(layer, experts, reason, priority, leavers)
            victims = policy.evict(count - room, leavers)
            for gone, expert in victims:
                places = self.places[gone]
                places[expert] = ABSENT
            if room + len(victims) < count:
                count = room + len(victims)
                experts = experts[:count]
        self.free_bytes[partition] -= size * (count - len(victims))
        row, places, under_way = self.key_of[layer], self.places[layer], self.under_way[layer]
        loads: list[Load] = []
        evicts: tuple[Key, ...] = ()
        for expert in experts:
            if len(loads) >= room:
                evicts = (victims[len(loads) - room],)
            load = make_load(row[expert], size, reason, priority, evicts)
            places[expert] = COMING
            under_way.append(load)
            loads.append(load)
        if priority == BEHIND_PRIORITY:
            self.num_behind += count
        policy.all_admitted(row, experts)
        return loads, len(victims)

    def land(self, keys: Sequence[Key]) -> None:
        """The copies of `keys` have finished."""
        for key in keys:
            layer, expert = key
            places = self.places[layer]
            places[expert] = LANDED
            self._withdraw(layer, expert)

    def leave(self, key: Key) -> None:
        """`key` gives its place up, whether its copy has landed or was withdrawn."""
        layer, expert = key
        partition = self._partition_of_layer[layer]
        places = self.places[layer]
        if places[expert] == COMING:
            self._withdraw(layer, expert)
        places[expert] = ABSENT
        self.free_bytes[partition] += self.expert_bytes[layer]
        self._cache[partition].removed(key)

    def coming_load(self, key: Key) -> Load:
        """The load of a key that is under way."""
        layer, expert = key
        return self.under_way[layer][self._find_coming(layer, expert)]

    def _find_coming(self, layer: int, expert: int) -> int:
        """The place of an expert's load among those of its layer that are under way.

        Raises:
            KeyError: it has none.
        """
        under_way = self.under_way[layer]
        for place in range(len(under_way)):
            load = under_way[place]
            key = load.key
            if key[1] == expert:
                return place
        raise KeyError(f"no copy of expert {expert} of MoE layer {layer} is under way")

    def _withdraw(self, layer: int, expert: int) -> None:
        """A copy is no longer under way."""
        under_way, place = self.under_way[layer], self._find_coming(layer, expert)
        load = under_way[place]
        del under_way[place]
        if load.priority == BEHIND_PRIORITY:
            self.num_behind -= 1

    def coming(self) -> Iterator[Key]:
        """Copies under way, layer by layer in order of submission."""
        return (load.key for loads in self.under_way for load in loads)

    def not_asked(self, layer: int, awaited: Collection[int]) -> tuple[Key, ...]:
        """Copies under way for a layer, without those that it awaits."""
        keys: list[Key] = []
        for load in self.under_way[layer]:
            key = load.key
            if key[1] not in awaited:
                keys.append(key)
        return tuple(keys)

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
        row = self.key_of[layer]
        return [row[expert] for expert, place in enumerate(self.places[layer]) if place == LANDED]

    def held(self, layer: int) -> list[int]:
        """Experts of a layer with a place on the device, those on their way included."""
        return [expert for expert, place in enumerate(self.places[layer]) if place]

    def has_room(self, layer: int) -> bool:
        """Whether an expert of `layer` fits without anybody leaving."""
        return self.free_bytes[self._partition_of_layer[layer]] >= self.expert_bytes[layer]

    def num_bytes(self) -> int:
        """Bytes of device memory taken, those on their way included."""
        absent = [places.count(ABSENT) for places in self.places]
        pairs = zip(absent, self.places, self.expert_bytes, strict=True)
        return sum((len(places) - missing) * size for missing, places, size in pairs)

    def keys(self) -> list[Key]:
        """Keys with a place on the device, those on their way included."""
        return [(layer, expert) for layer in range(len(self.places)) for expert in self.held(layer)]

    def _take_in_turn(
        self, layer: int, experts: Sequence[int], reason: str, priority: int, leavers: Leavers
    ) -> tuple[list[Load], int]:
        """As `take`, each expert admitted before room is made for the next."""
        partition = self._partition_of_layer[layer]
        policy = self._cache[partition]
        size = self.expert_bytes[layer]
        row, places, under_way = self.key_of[layer], self.places[layer], self.under_way[layer]
        loads: list[Load] = []
        evicted = 0
        for expert in experts:
            victims = self._victims(layer, leavers)
            if victims is None:
                break
            for victim in victims:
                self.leave(victim)
            load = make_load(row[expert], size, reason, priority, victims)
            places[expert] = COMING
            under_way.append(load)
            self.num_behind += priority == BEHIND_PRIORITY
            self.free_bytes[partition] -= size
            policy.admitted(row[expert])
            loads.append(load)
            evicted += len(victims)
        return loads, evicted

    def _victims(self, layer: int, leavers: Leavers) -> tuple[Key, ...] | None:
        """Who leaves so that an expert of `layer` fits; None when not enough of them may."""
        partition = self._partition_of_layer[layer]
        size = self.expert_bytes[layer]
        policy = self._cache[partition]
        freed = self.free_bytes[partition]
        victims: list[Key] = []
        while freed < size:
            victim = policy.choose_victim(Except(victims, leavers) if victims else leavers)
            if victim is None:
                return None
            victims.append(victim)
            freed += self.expert_bytes[victim[0]]
        return tuple(victims)
