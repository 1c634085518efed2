"""Which expert leaves when another needs its place: the registry of cache policies.

A new policy is one class and one line in `CACHE_POLICIES`; replay, tuner, live engine and dashboard then know it by
that name.
"""

from __future__ import annotations

from simulator.policies.belady import Belady
from simulator.policies.errors import unknown_name
from simulator.policies.eviction import UNSPECIFIED, Partition
from simulator.policies.eviction import CachePolicy as CachePolicy
from simulator.policies.eviction import Key as Key
from simulator.policies.fixed import Resident, StaticPopularity
from simulator.policies.frequency import Lfu, LfuAgeing
from simulator.policies.recency import Lru, NoCache, Random
from simulator.policies.s3_fifo import S3Fifo
from simulator.policies.utility_cache import UtilityCache

CACHE_POLICIES: dict[str, type[CachePolicy]] = {
    "none": NoCache,
    "resident": Resident,
    "static": StaticPopularity,
    "lru": Lru,
    "lfu": Lfu,
    "lfu-ageing": LfuAgeing,
    "s3-fifo": S3Fifo,
    "utility": UtilityCache,
    "random": Random,
    "belady": Belady,
}


def make_cache_policy(name: str, partition: Partition = UNSPECIFIED) -> CachePolicy:
    """A fresh cache policy by its registered name.

    Raises:
        ConfigError: the name is not registered, or the policy needs what the partition does not offer.
    """
    if name not in CACHE_POLICIES:
        raise unknown_name("cache policy", name, CACHE_POLICIES)
    return CACHE_POLICIES[name](partition)
