"""What the offload core says: loads and waves; and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from simulator.policies.eviction import Key

DEMAND_PRIORITY = 0
PREFETCH_PRIORITY = 1


class Load(NamedTuple):
    """Copy one expert to the device. `evicts` have left by the time the copy may start."""

    key: Key
    num_bytes: int
    reason: str
    priority: int
    evicts: tuple[Key, ...]


class Wave(NamedTuple):
    """Experts of a layer that are computed together once everything in `wait` has landed.

    `experts` is empty when the layer must first wait for stray copies to land before it can make room.
    """

    experts: tuple[int, ...]
    loads: tuple[Load, ...]
    wait: tuple[Key, ...]


@dataclass
class Counters:
    """What the decisions came to. `hits` were resident when asked for, `late` were on their way."""

    lookups: int = 0
    hits: int = 0
    late: int = 0
    demand_loads: int = 0
    prefetch_loads: int = 0
    prefetch_used: int = 0
    evictions: int = 0
    bytes_loaded: int = 0
