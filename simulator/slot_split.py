"""How many expert slots each layer should get: a multiple-choice knapsack, stated in PuLP.

For layer l and slot count c there is a binary z[l, c]; exactly one per layer is 1. Maximise the copying time that hits
save, sum z[l, c] * hits[l, c] * copy time of l, which is to minimise predicted misses times copy time, so that the
slots' bytes stay within the budget. HiGHS solves it, CBC where HiGHS is absent.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.policies.errors import unknown_name
from trace_capture.errors import ConfigError
from trace_capture.model_shape import ModelShape

NUM_THREADS = 1
"""HiGHS: one count per process; it returns "not solved" when a later solve asks for another."""


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
    began_s = time.perf_counter()
    chosen, name = _solve(choices, budget_bytes, min(copy_ns) / 2e6, time_limit_s, solver)
    seconds = time.perf_counter() - began_s
    is_proven = name in SOLVERS and seconds < time_limit_s
    if not is_proven:
        greedy = _greedy(choices, budget_bytes)
        if not chosen or _saved_ms(greedy) > _saved_ms(chosen):
            chosen, name = greedy, "greedy"
    if sum(choice.num_bytes for choice in chosen) > budget_bytes:
        raise RuntimeError(f"{name} gave a split beyond the budget of {budget_bytes} bytes")
    return SlotSplit(
        slots=tuple(choice.slots for choice in chosen),
        saved_ms=_saved_ms(chosen),
        bound_ms=relaxed_bound_ms(choices, budget_bytes),
        solver=name,
        is_proven=is_proven,
        seconds=seconds,
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


def _saved_ms(chosen: Sequence[Choice]) -> float:
    return math.fsum(choice.saved_ms for choice in chosen)


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
) -> tuple[list[Choice], str]:
    """The choice of each layer, and the solver that made it; empty when the time limit left none.

    The solvers' statuses are not believed: both say `Optimal` of whatever they hold when their time is over.
    """
    import pulp

    if solver is not None and solver not in SOLVERS:
        raise unknown_name("solver", solver, SOLVERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PuLP 3 announces PuLP 4 at every call
        engines = {name: make(pulp, gap_ms, time_limit_s) for name, make in SOLVERS.items() if solver in (None, name)}
        engines = {name: engine for name, engine in engines.items() if engine.available()}
        if not engines:
            raise ConfigError("there is no solver for the slot split; install one with 'pip install highspy'")
        problem, picked = _model(pulp, choices, budget_bytes)
        for name, engine in engines.items():
            with suppress(pulp.PulpSolverError):
                problem.solve(engine)
            values = [[variable.value() or 0.0 for variable in row] for row in picked]
            if all(abs(sum(row) - 1) < 1e-6 and max(row) > 0.99 for row in values):
                return [options[row.index(max(row))] for options, row in zip(choices, values, strict=True)], name
    return [], ""


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


def _highs(pulp: Any, gap_ms: float, time_limit_s: float) -> Any:
    """HiGHS with an absolute gap alone: its own relative gap of 1e-4 is switched off."""
    with _silent_stdout(), suppress(ImportError):
        import highspy

        highspy.Highs()  # type: ignore[no-untyped-call]
    return pulp.HiGHS(msg=False, gapAbs=gap_ms, gapRel=0.0, threads=NUM_THREADS, timeLimit=time_limit_s)


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Drop what native code prints: HiGHS prints a banner when it is first made, whatever it is told, and would
    spoil the JSON on standard output."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 1)
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _cbc(pulp: Any, gap_ms: float, time_limit_s: float) -> Any:
    """CBC without `-threads`: even `-threads 1` starts a worker, and when its wake-up is lost the main thread sleeps
    for ten seconds, whatever the time limit, before it gives a solved problem back as stopped."""
    return pulp.PULP_CBC_CMD(msg=False, gapAbs=gap_ms, timeLimit=time_limit_s)


SOLVERS: dict[str, Callable[[Any, float, float], Any]] = {"HiGHS": _highs, "CBC": _cbc}
