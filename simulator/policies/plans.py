"""What the offload core says to its drivers, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from simulator.policies.eviction import Key

DEMAND_PRIORITY = 0
PREFETCH_PRIORITY = 1
ADMISSION_PRIORITY = 2
ADMISSION = "admission"
UTILITY_PRIORITY = 2
UTILITY = "utility"
REASONS = ("preload", "demand", "prefetch", ADMISSION, UTILITY)
"""Why experts are loaded."""


class Load(NamedTuple):
    """Copy one expert to the device. `evicts` have left by the time the copy may start."""

    key: Key
    num_bytes: int
    reason: str
    priority: int
    evicts: tuple[Key, ...]


class Wave(NamedTuple):
    """Experts of a layer that are computed together once everything in `wait` has landed.

    `experts` is empty when the layer must first wait for stray copies to land before it can make room, and when all
    of it runs on the CPU. `cpu_experts` run on the CPU from the moment the wave is planned, beside everything that
    the device and the link do for the layer; only a layer's first wave has any.
    """

    experts: tuple[int, ...]
    loads: tuple[Load, ...]
    wait: tuple[Key, ...]
    cpu_experts: tuple[int, ...] = ()


make_load = cast("Callable[[tuple[object, ...]], Load]", partial(tuple.__new__, Load))
make_wave = cast("Callable[[tuple[object, ...]], Wave]", partial(tuple.__new__, Wave))
"""Of a tuple of all fields. Named tuples are else made by a function of the interpreter's, which takes longer."""


@dataclass
class Counters:
    """What the decisions came to.

    Every expert that a layer asks for is one look-up, wherever it then runs. `hits` were on the device when asked
    for; `late` were on their way, and were waited for or run on the CPU; of the rest each was a demand load or a run
    on the CPU. `cpu_runs` counts experts run on the CPU, once per layer and pass.
    """

    lookups: int = 0
    hits: int = 0
    late: int = 0
    demand_loads: int = 0
    prefetch_loads: int = 0
    prefetch_used: int = 0
    evictions: int = 0
    bytes_loaded: int = 0
    cpu_runs: int = 0
    admission_loads: int = 0
    """Loads of experts that had run on the CPU, for the passes to come."""

    @property
    def loads(self) -> int:
        """Copies of every kind."""
        return self.demand_loads + self.prefetch_loads + self.admission_loads
