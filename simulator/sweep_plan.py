"""Which scenarios of a sweep come to the same simulation, found out before anything is simulated."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from simulator.policies.capacity import plan_capacity
from simulator.scenario import MACHINE_SETTINGS, TRACE_SETTINGS, Question, Scenario, machine_of, strategy_of, trace_of
from trace_capture.files import text_digest
from trace_capture.hardware import HardwareProfile
from trace_capture.trace import Trace
from trace_capture.versions import software_versions

_REMEMBERED = 16


class SweepPlan:
    """Puts scenarios together as `simulator.scenario.put_together` does, what many share of trace and machine once.

    Args:
        trace: what all of them replay.
        bounds: whether bounds are asked for.
    """

    def __init__(self, trace: Trace, bounds: bool) -> None:
        self._asked = {"bounds": bounds, "versions": software_versions("simpy")}
        self._trace_of = lru_cache(_REMEMBERED)(lambda settings: trace_of(trace, _scenario(settings)))
        self._machine_of = lru_cache(_REMEMBERED)(lambda settings: _with_content(machine_of(_scenario(settings))))

    def key(self, scenario: Scenario) -> str:
        """Digest of everything that would be simulated. It is the same for scenarios that differ in nothing that
        matters, such as in memory beyond that of all experts, or in bytes that make no further slot.

        Raises:
            StudioError: as `put_together`, and where the experts do not fit.
        """
        trace = self._trace_of(_chosen(scenario, TRACE_SETTINGS))
        machine, hardware = self._machine_of(_chosen(scenario, MACHINE_SETTINGS))
        question = Question(trace, machine, strategy_of(scenario, trace, machine))
        config = question.config.model_dump(mode="json")
        for name in ("budget_bytes", "budget_ratio", "slots_per_layer"):
            del config["cache"][name]
        capacity = plan_capacity(question.config.cache, trace.shape, question.cpu_layers)
        partitions = [capacity.partition_of_layer, capacity.partition_bytes]
        content = {"trace": trace.digest, "hardware": hardware, "config": config, "partitions": partitions}
        return text_digest(json.dumps(content | self._asked, sort_keys=True))


def _with_content(machine: HardwareProfile) -> tuple[HardwareProfile, dict[str, Any]]:
    """A machine and what of it a simulation depends on: memory decides the budget, and nothing else."""
    content = machine.model_dump(mode="json")
    del content["device"]["memory_bytes"]
    return machine, content


def _chosen(scenario: Scenario, names: tuple[str, ...]) -> str:
    return json.dumps({name: getattr(scenario, name) for name in names})


def _scenario(settings: str) -> Scenario:
    return Scenario(**json.loads(settings))
