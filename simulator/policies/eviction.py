"""What an eviction policy is, and what it may know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.policies.utility import UtilitySignal

Key = tuple[int, int]
"""(MoE layer index, expert id)."""

FutureUses = Mapping[Key, Sequence[int]]
"""For each key the places in the stream of look-ups where it will be asked for, in order."""


@dataclass(frozen=True)
class Partition:
    """What a policy may know of the piece of device memory whose order it keeps.

    Attributes:
        capacity_bytes: its size.
        needed_bytes: bytes of all experts of all layers that share it.
        expert_bytes: mean bytes of one of these experts.
        hot_experts: keys that a profile found popular, hottest first; None where there is no profile.
        seed: for policies that draw.
        future: all look-ups to come, in a replay; None where the future is not known.
        utility: how useful each expert will be to the next pass; None where the policy does not need it.
    """

    capacity_bytes: int = 0
    needed_bytes: int = 0
    expert_bytes: int = 1
    hot_experts: tuple[Key, ...] | None = None
    seed: int = 0
    future: FutureUses | None = None
    utility: UtilitySignal | None = None


UNSPECIFIED = Partition()
"""A partition of which nothing is known; most policies need no more."""


class Leavers:
    """Tells which keys may leave now."""

    def allow(self, key: Key) -> bool:
        """Whether `key` may leave."""
        raise NotImplementedError

    def kept_back(self) -> list[Key] | None:
        """Of the keys that have a place, all that may not leave, some perhaps twice or without a place; None where that
        is not known, and `allow` must be asked for each."""
        return None


class CachePolicy:
    """Order of eviction within one partition of device memory.

    The core calls, in this order: `routed` when a layer's router has spoken, `admitted` when a load of an absent
    expert is planned, `used` for each expert that a layer runs on the device (in the router's order, after its load
    was planned), `choose_victim` while room is needed, and `removed` for every key that leaves. `expired` is asked
    once after each layer. A policy sees keys only; which of them may leave now is told by the `Leavers` it is given.
    `all_admitted`, `all_used` and `evict` are the same for several of them; a policy may have a faster way.

    Args:
        partition: what there is to know of the memory.
    """

    needs_future = False
    """Decides by look-ups to come, so that only a replay can use it."""
    needs_hot_experts = False
    """Decides by a profile, which must be in the configuration."""
    needs_token_counts = False
    """Wants to know how many tokens of a pass go to each expert."""
    needs_utility = False
    """Decides by utilities, which its partition then has."""
    starts_full = False
    """Loads its experts before the first pass, unless the configuration says otherwise."""
    evicts_ahead = False
    """Who leaves next does not depend on what is admitted meanwhile, so several may be evicted before the keys that
    they make room for are admitted."""

    def __init__(self, partition: Partition = UNSPECIFIED) -> None:
        self.partition = partition

    def routed(self, layer: int, experts: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """`layer`, one of this partition's, is about to run `experts`; by default ignored.

        Args:
            layer: MoE layer index.
            experts: distinct, in order.
            tokens: how many tokens of the pass go to each, if the policy `needs_token_counts`.
        """

    def admitted(self, key: Key) -> None:
        """A load of `key` into this partition was planned."""
        raise NotImplementedError

    def used(self, key: Key) -> None:
        """A layer runs `key`, which is resident or being loaded."""
        raise NotImplementedError

    def removed(self, key: Key) -> None:
        """`key` left the partition."""
        raise NotImplementedError

    def choose_victim(self, leavers: Leavers) -> Key | None:
        """The key to evict next among those that may leave, or None when there is none."""
        raise NotImplementedError

    def all_admitted(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """`admitted` for each of a layer's `experts`, in order; `row` holds the keys of that layer by expert."""
        for expert in experts:
            self.admitted(row[expert])

    def all_used(self, row: Sequence[Key], experts: Sequence[int]) -> None:
        """`used` for each of a layer's `experts`, in order."""
        for expert in experts:
            self.used(row[expert])

    def evict(self, count: int, leavers: Leavers) -> list[Key]:
        """`choose_victim` and `removed` so many times, or until nobody can leave; gives those who left, in order."""
        victims: list[Key] = []
        while len(victims) < count and (victim := self.choose_victim(leavers)) is not None:
            self.removed(victim)
            victims.append(victim)
        return victims

    def expired(self, layer_keys: Sequence[Key]) -> Iterable[Key]:
        """Keys to drop now that their layer has run; by default none."""
        return ()
