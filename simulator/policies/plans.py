"""What the offload core says to its drivers, and what it counts.

Plans and counters are made and read in every layer, so these are plain classes with typed slots: as C structures
where they are compiled, and found faster than a dictionary's entries where they are not.
"""

from __future__ import annotations

from simulator.policies.eviction import Key

ABSENT, COMING, LANDED = 0, 1, 2
"""What an expert's place is: none (which is false), its copy is queued or in flight, or its copy has finished."""
DEMAND_PRIORITY = 0
PREFETCH_PRIORITY = 1
BEHIND_PRIORITY = 2
"""Of what is loaded for later passes, behind all that this pass needs."""
ADMISSION = "admission"
UTILITY = "utility"
"""Reasons for loads with `BEHIND_PRIORITY`; the others are preload, demand and prefetch."""


class Load:
    """Copy one expert to the device.

    Attributes:
        key: the expert.
        num_bytes: its size.
        reason: why it is loaded.
        priority: the lowest is copied first.
        evicts: keys that have left by the time the copy may start.
    """

    __slots__ = ("evicts", "key", "num_bytes", "priority", "reason")

    def __init__(self, key: Key, num_bytes: int, reason: str, priority: int, evicts: tuple[Key, ...]) -> None:
        self.key = key
        self.num_bytes = num_bytes
        self.reason = reason
        self.priority = priority
        self.evicts = evicts

    def _fields(self) -> tuple[object, ...]:
        return self.key, self.num_bytes, self.reason, self.priority, self.evicts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Load) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return "Load(key={!r}, num_bytes={!r}, reason={!r}, priority={!r}, evicts={!r})".format(*self._fields())


class Wave:
    """Experts of a layer that are computed together once everything in `wait` has landed.

    Attributes:
        experts: empty when the layer must first wait for stray copies to land before it can make room, and when all
            of it runs on the CPU.
        loads: to submit.
        wait: keys.
        cpu_experts: run on the CPU from the moment the wave is planned, beside everything that the device and the
            link do for the layer; only a layer's first wave has any.
    """

    __slots__ = ("cpu_experts", "experts", "loads", "wait")

    def __init__(
        self,
        experts: tuple[int, ...],
        loads: tuple[Load, ...],
        wait: tuple[Key, ...],
        cpu_experts: tuple[int, ...] = (),
    ) -> None:
        self.experts = experts
        self.loads = loads
        self.wait = wait
        self.cpu_experts = cpu_experts

    def _fields(self) -> tuple[object, ...]:
        return self.experts, self.loads, self.wait, self.cpu_experts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wave) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return "Wave(experts={!r}, loads={!r}, wait={!r}, cpu_experts={!r})".format(*self._fields())


def make_load(key: Key, num_bytes: int, reason: str, priority: int, evicts: tuple[Key, ...]) -> Load:
    """As `Load(...)`, in less time."""
    load = Load.__new__(Load)
    load.key = key
    load.num_bytes = num_bytes
    load.reason = reason
    load.priority = priority
    load.evicts = evicts
    return load


def make_wave(
    experts: tuple[int, ...], loads: tuple[Load, ...], wait: tuple[Key, ...], cpu_experts: tuple[int, ...]
) -> Wave:
    """As `Wave(...)`, in less time."""
    wave = Wave.__new__(Wave)
    wave.experts = experts
    wave.loads = loads
    wave.wait = wait
    wave.cpu_experts = cpu_experts
    return wave


_COUNTS = (
    "lookups",
    "hits",
    "late",
    "demand_loads",
    "prefetch_loads",
    "prefetch_used",
    "evictions",
    "bytes_loaded",
    "cpu_runs",
    "admission_loads",
)


class Counters:
    """What the decisions came to.

    Every expert that a layer asks for is one look-up, wherever it then runs. `hits` were on the device when asked
    for; `late` were on their way, and were waited for or run on the CPU; of the rest each was a demand load or a run
    on the CPU. `cpu_runs` counts experts run on the CPU, once per layer and pass. `admission_loads` are loads of
    experts that had run on the CPU, for the passes to come.
    """

    __slots__ = _COUNTS

    def __init__(self) -> None:
        self.lookups = 0
        self.hits = 0
        self.late = 0
        self.demand_loads = 0
        self.prefetch_loads = 0
        self.prefetch_used = 0
        self.evictions = 0
        self.bytes_loaded = 0
        self.cpu_runs = 0
        self.admission_loads = 0

    @property
    def loads(self) -> int:
        """Copies of every kind."""
        return self.demand_loads + self.prefetch_loads + self.admission_loads

    def as_dict(self) -> dict[str, int]:
        """All counts by name."""
        return {name: getattr(self, name) for name in _COUNTS}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counters) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Counters({self.as_dict()})"
