"""Which single upgrade of a machine gives the most: link, device memory, rate of the RAM, cores, or drafting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from simulator.scenario import GIB, Scenario, machine_of
from simulator.sweep import answer
from trace_capture.hardware import HardwareProfile, LinkProfile
from trace_capture.machine_parts import load_part, part_names
from trace_capture.trace import Trace

CARD_SIZES_GB = (6, 8, 10, 12, 16, 24, 32, 48, 80, 96, 141)
DRAFTS = 4


@dataclass(frozen=True)
class Upgrade:
    """One change of a scenario and what it gives.

    Attributes:
        what: which part: link, device memory, RAM rate, CPU cores or drafting.
        change: the settings, such as `link=pcie5x16`.
        saved_ms: time per output token saved; negative when it costs.
        answer: of the changed scenario.
    """

    what: str
    change: str
    saved_ms: float
    answer: dict[str, Any]

    @property
    def speed_up(self) -> float:
        """Time before over time after."""
        after = float(self.answer["tpot_ms"])
        return (after + self.saved_ms) / after


def upgrades(trace: Trace, scenario: Scenario, tpot_ms: float) -> list[Upgrade]:
    """One step of each kind of upgrade, simulated apart, the most useful first.

    A step is: the next faster link of those that ship; the next size of cards; RAM half as fast again; twice the
    cores; drafts of prompt look-up or the scenario's draft model, at its acceptance. Steps that change nothing in the
    scenario, such as cores of a machine without a CPU side, are left out; so is what is impossible.

    Args:
        trace: what is replayed.
        scenario: the machine and strategy now.
        tpot_ms: its time per output token.
    """
    machine = machine_of(scenario)
    found = []
    for what, values in _steps(scenario, machine):
        result = answer(trace, scenario.set_values(values), bounds=False)
        if "error" not in result:
            change = ", ".join(f"{name}={value}" for name, value in values.items())
            found.append(Upgrade(what, change, tpot_ms - result["tpot_ms"], result))
    return sorted(found, key=lambda upgrade: -upgrade.saved_ms)


def _steps(scenario: Scenario, machine: HardwareProfile) -> list[tuple[str, dict[str, str]]]:
    steps: list[tuple[str, dict[str, str]]] = []
    if (faster := _next_link(machine.link.h2d_bytes_per_s.value)) is not None:
        steps.append(("link", {"link": faster}))
    memory = machine.device.memory_bytes.value / GIB
    larger = next((size for size in CARD_SIZES_GB if size > 1.02 * memory), None)
    if larger is not None and scenario.budget_ratio is None and scenario.budget_mib is None:
        steps.append(("device memory", {"vram_gb": str(larger)}))
    uses_cpu = scenario.cpu_experts != "none" or scenario.cpu_layers
    if machine.host is not None and uses_cpu:
        steps.append(("RAM rate", {"host.ram_bytes_per_s": str(1.5 * machine.host.ram_bytes_per_s.value)}))
        steps.append(("CPU cores", {"host.cores": str(2 * machine.host.cores.value)}))
    if scenario.gamma is None:
        steps.append(("drafting", {"gamma": str(DRAFTS)}))
    return steps


@lru_cache(maxsize=8)
def _next_link(bytes_per_s: float) -> str | None:
    """The slowest link that ships and is at least a fifth faster."""
    rates: dict[str, float] = {}
    for name in part_names("link"):
        part = load_part("link", name)
        if isinstance(part, LinkProfile):
            rates[name] = part.h2d_bytes_per_s.value
    faster = {name: rate for name, rate in rates.items() if rate > 1.2 * bytes_per_s}
    return min(faster, key=lambda name: faster[name]) if faster else None
