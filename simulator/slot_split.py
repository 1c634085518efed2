"""How many expert slots each layer should get: a multiple-choice knapsack, stated in PuLP.

For layer l and slot count c there is a binary z[l, c]; exactly one per layer is 1. Maximise the copying time that hits
save, sum z[l, c] * hits[l, c] * copy time of l, which is to minimise predicted misses times copy time, so that the
slots' bytes stay within the budget. HiGHS solves it, CBC where HiGHS is absent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.solvers import Solved, chosen, quiet_pulp, solve
from trace_capture.errors import ConfigError
from trace_capture.model_shape import ModelShape


@dataclass(frozen=True)
class SlotSplit:
    """Slots per layer and how good they are known to be.

    Attributes:
        slots: expert slots per MoE layer [L].
        saved_ms: copying time that the predicted hits save over the whole trace.
        bound_ms: no split can save more (the relaxation's optimum, worked out here and not by the solver).
        solver: `HiGHS`, `CBC`, or `greedy` where the time limit left nothing better.
        is_proven: the solver ended by itself; False when its time limit stopped it, whatever it calls that.
        seconds: wall time of the solver.
    """

    slots: tuple[int, ...]
    saved_ms: float
    bound_ms: float
    solver: str
    is_proven: bool
    seconds: float

    @property
    def gap_ms(self) -> float:
        """At most so much better could a split be."""
        return self.bound_ms - self.saved_ms


class Choice(NamedTuple):
    """One slot count of one layer: what it takes and what it saves."""

    slots: int
    num_bytes: int
    saved_ms: float


def split_slots(
    hits: npt.NDArray[np.int64],
    copy_ns: Sequence[int],
    shape: ModelShape,
    budget_bytes: int,
    *,
    time_limit_s: float = 10.0,
    solver: str | None = None,
) -> SlotSplit:
    """Split a byte budget over layers so that predicted misses cost the least copying time.

    Args:
        hits: hits of each layer at each slot count, [L, E + 1], of `trace_capture.statistics.lru_hit_curve`.
        copy_ns: time of one expert's copy per layer [L].
        shape: expert bytes, top-k (the fewest slots a layer may have) and E (the most).
        budget_bytes: for all layers together.
        time_limit_s: the solver stops then with what it has.
        solver: `HiGHS` or `CBC`; None for the first that is installed.

    Raises:
        ConfigError: the budget does not hold every layer's top-k, or no solver is installed.
    """
    need_bytes = shape.top_k * sum(shape.expert_bytes)
    if budget_bytes < need_bytes:
        raise ConfigError(
            f"a budget of {budget_bytes:,} bytes cannot hold the top-{shape.top_k} experts of every layer of "
            f"{shape.name}; give at least {need_bytes:,} bytes"
        )
    choices = [_choices(hits[layer], copy_ns[layer], layer, shape) for layer in range(shape.num_moe_layers)]
    split, solved = _solve(choices, budget_bytes, min(copy_ns) / 2e6, time_limit_s, solver)
    name = solved.solver
    if not solved.is_proven:
        greedy = _greedy(choices, budget_bytes)
        if not split or _saved_ms(greedy) > _saved_ms(split):
            split, name = greedy, "greedy"
    if sum(choice.num_bytes for choice in split) > budget_bytes:
        raise RuntimeError(f"{name} gave a split beyond the budget of {budget_bytes} bytes")
    return SlotSplit(
        slots=tuple(choice.slots for choice in split),
        saved_ms=_saved_ms(split),
        bound_ms=relaxed_bound_ms(choices, budget_bytes),
        solver=name,
        is_proven=solved.is_proven,
        seconds=solved.seconds,
    )


def relaxed_bound_ms(choices: Sequence[Sequence[Choice]], budget_bytes: int) -> float:
    """The optimum when slots may be fractions: steps along each layer's upper hull, the most saving per byte first."""
    total_ms = _saved_ms([options[0] for options in choices])
    left_bytes = budget_bytes - sum(options[0].num_bytes for options in choices)
    for ms_per_byte, _, before, after in _hull_steps(choices):
        taken = min(after.num_bytes - before.num_bytes, left_bytes)
        total_ms += ms_per_byte * taken
        left_bytes -= taken
    return total_ms


def _greedy(choices: Sequence[Sequence[Choice]], budget_bytes: int) -> list[Choice]:
    """The same steps, those alone that fit whole: a split for when a solver had no time to find one."""
    chosen = [options[0] for options in choices]
    left_bytes = budget_bytes - sum(choice.num_bytes for choice in chosen)
    for _, layer, before, after in _hull_steps(choices):
        if chosen[layer] == before and after.num_bytes - before.num_bytes <= left_bytes:
            chosen[layer] = after
            left_bytes -= after.num_bytes - before.num_bytes
    return chosen


def _hull_steps(choices: Sequence[Sequence[Choice]]) -> list[tuple[float, int, Choice, Choice]]:
    """(ms per byte, layer, from, to) of every step along the layers' upper hulls, the best first."""
    steps = []
    for layer, options in enumerate(choices):
        hull = _upper_hull(options)
        for before, after in zip(hull, hull[1:]):  # noqa: B905
            ms_per_byte = (after.saved_ms - before.saved_ms) / (after.num_bytes - before.num_bytes)
            steps.append((ms_per_byte, layer, before, after))
    return sorted(steps, key=lambda step: -step[0])


def _saved_ms(split: Sequence[Choice]) -> float:
    return math.fsum(choice.saved_ms for choice in split)


def _choices(hits: npt.NDArray[np.int64], copy_ns: int, layer: int, shape: ModelShape) -> list[Choice]:
    """Slot counts worth considering: more slots than another count with the same hits are not."""
    result: list[Choice] = []
    last = -1
    for slots in range(shape.top_k, shape.num_experts + 1):
        count = int(hits[slots])
        if count > last:
            result.append(Choice(slots, slots * shape.expert_bytes[layer], count * copy_ns / 1e6))
            last = count
    return result


def _upper_hull(options: Sequence[Choice]) -> list[Choice]:
    hull: list[Choice] = []
    for option in options:
        while len(hull) > 1 and _is_below(hull[-1], hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _is_below(middle: Choice, left: Choice, right: Choice) -> bool:
    rise = (middle.saved_ms - left.saved_ms) * (right.num_bytes - left.num_bytes)
    return rise <= (right.saved_ms - left.saved_ms) * (middle.num_bytes - left.num_bytes)


def _solve(
    choices: Sequence[Sequence[Choice]], budget_bytes: int, gap_ms: float, time_limit_s: float, solver: str | None
) -> tuple[list[Choice], Solved]:
    """The choice of each layer, and how it was found; empty when the time limit left none."""
    with quiet_pulp() as pulp:
        problem, picked = _model(pulp, choices, budget_bytes)
        solved = solve(problem, lambda: all(chosen(row) is not None for row in picked), gap_ms, time_limit_s, solver)
        places = [chosen(row) for row in picked]
    if not solved.solver:
        return [], solved
    return [options[place or 0] for options, place in zip(choices, places, strict=True)], solved


def _model(pulp: Any, choices: Sequence[Sequence[Choice]], budget_bytes: int) -> tuple[Any, list[list[Any]]]:
    """The problem in PuLP and its binaries z[l][place in choices]. Bytes are in units of their common divisor."""
    unit = math.gcd(*(choice.num_bytes for options in choices for choice in options))
    problem = pulp.LpProblem("slots", pulp.LpMaximize)
    picked = [
        [pulp.LpVariable(f"z_{layer}_{choice.slots}", cat="Binary") for choice in options]
        for layer, options in enumerate(choices)
    ]
    pairs = [pair for row, options in zip(picked, choices, strict=True) for pair in zip(row, options, strict=True)]
    problem += pulp.lpSum(choice.saved_ms * variable for variable, choice in pairs)
    problem += pulp.lpSum(choice.num_bytes // unit * variable for variable, choice in pairs) <= budget_bytes // unit
    for row in picked:
        problem += pulp.lpSum(row) == 1
    return problem, picked
