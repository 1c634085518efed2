"""Placements that a run does not change: all experts, or those that a profile found popular."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.policies.eviction import UNSPECIFIED, CachePolicy, Key, Leavers, Partition
from simulator.policies.recency import Lru
from trace_capture.errors import ConfigError


class Resident(CachePolicy):
    """Every expert has a place of its own, so nothing ever leaves: the speed that offloading is measured against.

    Raises:
        ConfigError: the experts do not all fit.
    """

    starts_full = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        if partition.capacity_bytes < partition.needed_bytes:
            raise ConfigError(
                f"cache.policy = 'resident' needs room for all experts: {partition.needed_bytes:,} bytes where "
                f"{partition.capacity_bytes:,} are given; set cache.budget_ratio = 1, or choose another policy"
            )

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """See `CachePolicy`."""

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        return None


class StaticPopularity(CachePolicy):
    """The experts that a profile found hot stay; the others pass through and leave when their layer has run.

    What engines with a fixed placement do (kt-kernel's `frequency`, hot lists of llama.cpp forks). Where the room
    beside the hot experts is too small for what a layer needs at once, the coldest hot one gives way and comes back
    when it is next asked for.

    Raises:
        ConfigError: the configuration has no `cache.hot_experts`.
    """

    needs_hot_experts = True
    starts_full = True
    evicts_ahead = True

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        super().__init__(partition)
        if partition.hot_experts is None:
            raise ConfigError(
                "cache.policy = 'static' needs cache.hot_experts, the experts of each layer to keep; "
                "'moe-studio simulate TRACE --strategy static --save-config FILE' makes a configuration with them"
            )
        self._rank = {key: rank for rank, key in enumerate(partition.hot_experts)}
        self._hot: list[bytearray] = []
        """The same by layer and expert, as far as there are any: found without hashing the key."""
        for layer, expert in partition.hot_experts:
            self._hot += [bytearray() for _ in range(layer + 1 - len(self._hot))]
            row = self._hot[layer]
            row += bytes(max(0, expert + 1 - len(row)))
            row[expert] = 1
        self._kept: set[Key] = set()
        self._passing = Lru()

    def admitted(self, key: Key) -> None:
        """See `CachePolicy`."""
        if self._is_hot(key):
            self._kept.add(key)
        else:
            self._passing.admitted(key)

    def used(self, key: Key) -> None:
        """See `CachePolicy`."""
        if not self._is_hot(key):
            self._passing.used(key)

    def removed(self, key: Key) -> None:
        """See `CachePolicy`."""
        if self._is_hot(key):
            self._kept.discard(key)
        else:
            self._passing.removed(key)

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """See `CachePolicy`."""
        victim = self._passing.choose_victim(leavers)
        if victim is not None:
            return victim
        coldest = -1
        for key in self._kept:
            rank = self._rank[key]
            if rank > coldest and leavers.allow(key):
                victim, coldest = key, rank
        return victim

    def expired(self, layer_keys: Sequence[Key]) -> Iterable[Key]:
        """See `CachePolicy`."""
        return [key for key in layer_keys if not self._is_hot(key)]

    def _is_hot(self, key: Key) -> bool:
        """Whether an expert is one of those that stay."""
        layer, expert = key
        if layer >= len(self._hot):
            return False
        row = self._hot[layer]
        return expert < len(row) and row[expert] == 1
