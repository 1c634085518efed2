"""The balancer of MoE-SpAc as an integer program: the reference that the engine's table scan is held to.

Two forms. With thresholds, one binary per value of tau: min d with sum z = 1, d >= the time of either side (or their
difference, both ways), loads within the window, memory within what is free. Free, one binary per expert, which no
utility binds: how much a threshold gives away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.policies.balancer import ExpertTimes, Objective, ThresholdTable
from simulator.solvers import Solved, chosen, quiet_pulp, solve

TIME_LIMIT_S = 10.0


class Limits(NamedTuple):
    """What loads must stay within: free device memory, and the time of drafting."""

    free_bytes: int
    window_ns: int


class ThresholdAnswer(NamedTuple):
    """Thresholds that a solver chose.

    Attributes:
        thresholds: one per problem, 1..top+1; top+1, nothing on the device, where no solver had an answer in time.
        cost_ns: what they come to by the tables, summed.
        solved: how; `is_proven` is False where a time limit stopped the solver.
    """

    thresholds: tuple[int, ...]
    cost_ns: int
    solved: Solved


class PlacementAnswer(NamedTuple):
    """Experts that a solver put on the device.

    Attributes:
        on_device: bool [E].
        cost_ns: the larger (or the difference) of the two sides' times.
        solved: how.
    """

    on_device: npt.NDArray[np.bool_]
    cost_ns: int
    solved: Solved


def threshold_program(
    tables: Sequence[ThresholdTable],
    limits: Sequence[Limits],
    objective: Objective = "longest",
    *,
    time_limit_s: float = TIME_LIMIT_S,
    solver: str | None = None,
) -> ThresholdAnswer:
    """The best tau of each table, and the largest among equals.

    Args:
        tables: one problem each; a table of several layers asks for one tau for all of them. Layers that choose by
            themselves are tables of one layer each.
        limits: of each problem.
        objective: as `balancer.ThresholdTable.cost_ns`.
        time_limit_s: the solver stops then with what it has; it is called twice.
        solver: `HiGHS` or `CBC`; None for the first that is installed.

    Raises:
        ConfigError: no solver is installed, or its name is unknown.
    """
    first, places = _solve_thresholds(tables, limits, objective, None, time_limit_s, solver)
    if not first.solver:
        return _answer(tables, [table.cpu_ns.shape[1] - 1 for table in tables], objective, first)
    least_ns = [_cost_ns(table, place, objective) for table, place in zip(tables, places, strict=True)]
    second, larger = _solve_thresholds(tables, limits, objective, least_ns, time_limit_s, first.solver)
    places = larger if second.solver else places
    both = Solved(first.solver, first.is_proven and second.is_proven, first.seconds + second.seconds)
    return _answer(tables, places, objective, both)


def _answer(
    tables: Sequence[ThresholdTable], places: Sequence[int], objective: Objective, solved: Solved
) -> ThresholdAnswer:
    costs = [_cost_ns(table, place, objective) for table, place in zip(tables, places, strict=True)]
    return ThresholdAnswer(tuple(place + 1 for place in places), sum(costs), solved)


def _cost_ns(table: ThresholdTable, place: int, objective: Objective) -> int:
    return int(table.cost_ns(objective)[:, place].sum())


def _solve_thresholds(
    tables: Sequence[ThresholdTable],
    limits: Sequence[Limits],
    objective: Objective,
    least_ns: Sequence[int] | None,
    time_limit_s: float,
    solver: str | None,
) -> tuple[Solved, list[int]]:
    """The places in the tables of the cheapest thresholds; given what these cost, those of the largest as cheap."""
    with quiet_pulp() as pulp:
        problem = pulp.LpProblem("thresholds", pulp.LpMinimize if least_ns is None else pulp.LpMaximize)
        picked, times = _threshold_model(pulp, problem, tables, limits, objective)
        if least_ns is None:
            problem += pulp.lpSum(wait for waits in times for wait in waits)
        else:
            problem += pulp.lpSum(place * variable for row in picked for place, variable in enumerate(row))
            for waits, cost_ns in zip(times, least_ns, strict=True):
                problem += pulp.lpSum(waits) <= cost_ns + 0.5
        solved = solve(problem, lambda: all(chosen(row) is not None for row in picked), 0.5, time_limit_s, solver)
        return solved, [chosen(row) or 0 for row in picked]


def _threshold_model(
    pulp: Any, problem: Any, tables: Sequence[ThresholdTable], limits: Sequence[Limits], objective: Objective
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Puts the constraints into `problem`; its binaries z[table][place], and the times d[table][layer]."""
    picked, times = [], []
    for number, (table, limit) in enumerate(zip(tables, limits, strict=True)):
        layers, places = table.cpu_ns.shape
        binaries = [pulp.LpVariable(f"z_{number}_{place}", cat="Binary") for place in range(places)]
        waits = [pulp.LpVariable(f"d_{number}_{layer}", lowBound=0) for layer in range(layers)]
        problem += pulp.lpSum(binaries) == 1
        for layer, wait in enumerate(waits):
            for side in _sides(table.device_ns[layer], table.cpu_ns[layer], objective):
                problem += wait >= _weighted(pulp, side, binaries)
        problem += _weighted(pulp, table.grow_bytes.sum(axis=0), binaries) <= limit.free_bytes
        problem += _weighted(pulp, table.load_ns.sum(axis=0), binaries) <= limit.window_ns
        picked.append(binaries)
        times.append(waits)
    return picked, times


def _sides(device_ns: Any, cpu_ns: Any, objective: Objective) -> tuple[Any, Any]:
    """The two expressions that the time to minimise is at least as large as."""
    return (device_ns, cpu_ns) if objective == "longest" else (device_ns - cpu_ns, cpu_ns - device_ns)


def _weighted(pulp: Any, values: npt.NDArray[np.int64], variables: Sequence[Any]) -> Any:
    return pulp.lpSum(value * variable for value, variable in zip(values.tolist(), variables, strict=True))


def placement_program(
    frequencies: npt.NDArray[np.int64],
    resident: npt.NDArray[np.bool_],
    times: ExpertTimes,
    limits: Limits,
    objective: Objective = "longest",
    *,
    gap_ns: float = 0.5,
    time_limit_s: float = TIME_LIMIT_S,
    solver: str | None = None,
) -> PlacementAnswer:
    """The free form for one layer: any set of experts may be on the device.

    Balance is a sum of subsets, so a gap below what matters costs solvers seconds: with 128 experts allow half a
    percent of the layer's time.

    Args:
        frequencies: tokens that each expert will serve [E].
        resident: whether it is on the device now [E]; all that are not chosen leave.
        times: of this one layer.
        limits, objective, time_limit_s, solver: as in `threshold_program`.
        gap_ns: how far from the optimum the answer may be.

    Raises:
        ConfigError: no solver is installed, or its name is unknown.
    """
    with quiet_pulp() as pulp:
        problem = pulp.LpProblem("placement", pulp.LpMinimize)
        on_device = [pulp.LpVariable(f"x_{expert}", cat="Binary") for expert in range(len(frequencies))]
        any_device, any_cpu = (pulp.LpVariable(f"any_{side}", cat="Binary") for side in ("device", "cpu"))
        wait = pulp.LpVariable("d", lowBound=0)
        device_ns, cpu_ns = times.device_ns[0][frequencies], times.cpu_ns[0][frequencies]
        device = _weighted(pulp, device_ns, on_device) + int(times.device_base_ns[0]) * any_device
        cpu = _weighted(pulp, -cpu_ns, on_device) + int(cpu_ns.sum()) + int(times.cpu_base_ns[0]) * any_cpu
        problem += wait
        for side in _sides(device, cpu, objective):
            problem += wait >= side
        used = [variable for variable, count in zip(on_device, frequencies.tolist(), strict=True) if count]
        _bind_any(pulp, problem, used, any_device, any_cpu)
        new = pulp.lpSum(variable for variable, here in zip(on_device, resident.tolist(), strict=True) if not here)
        kept = pulp.lpSum(variable for variable, here in zip(on_device, resident.tolist(), strict=True) if here)
        grow = new - (int(resident.sum()) - kept)
        problem += grow <= limits.free_bytes // int(times.expert_bytes[0])
        problem += int(times.copy_ns[0]) * new <= limits.window_ns
        is_answer = lambda: all(_is_binary(variable) for variable in on_device)  # noqa: E731
        solved = solve(problem, is_answer, gap_ns, time_limit_s, solver)
        values = [bool(solved.solver) and variable.value() > 0.5 for variable in on_device]
    answer = np.asarray(values, dtype=np.bool_)
    return PlacementAnswer(answer, placement_cost_ns(answer, frequencies, times, objective), solved)


def _bind_any(pulp: Any, problem: Any, used: Sequence[Any], any_device: Any, any_cpu: Any) -> None:
    """The two binaries say exactly whether a side runs an expert that any token uses."""
    for variable in used:
        problem += any_device >= variable
        problem += any_cpu >= 1 - variable
    problem += any_device <= pulp.lpSum(used)
    problem += any_cpu <= len(used) - pulp.lpSum(used)


def placement_cost_ns(
    on_device: npt.NDArray[np.bool_], frequencies: npt.NDArray[np.int64], times: ExpertTimes, objective: Objective
) -> int:
    """What a placement of one layer's experts comes to, exactly."""
    used = frequencies > 0
    device_ns = int(times.device_ns[0][frequencies][on_device].sum())
    cpu_ns = int(times.cpu_ns[0][frequencies][~on_device].sum())
    device_ns += int(times.device_base_ns[0]) * bool((used & on_device).any())
    cpu_ns += int(times.cpu_base_ns[0]) * bool((used & ~on_device).any())
    return max(device_ns, cpu_ns) if objective == "longest" else abs(device_ns - cpu_ns)


def _is_binary(variable: Any) -> bool:
    value = variable.value()
    return value is not None and min(abs(value), abs(value - 1)) < 1e-6
