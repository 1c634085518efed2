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
"""One count per process: HiGHS returns "not solved" when a later solve asks for another."""


@dataclass(frozen=True)
class SlotSplit:
    """Slots per layer and how good they are known to be.

    Attributes:
        slots: expert slots per MoE layer [L].
        saved_ms: copying time that the predicted hits save over the whole trace.
        bound_ms: no split can save more (the relaxation's optimum, worked out here and not by the solver).
        solver: `HiGHS` or `CBC`.
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
    picks, name = _solve(choices, budget_bytes, min(copy_ns) / 2e6, time_limit_s, solver)
    seconds = time.perf_counter() - began_s
    chosen = [options[pick] for options, pick in zip(choices, picks, strict=True)]
    if sum(choice.num_bytes for choice in chosen) > budget_bytes:
        raise RuntimeError(f"{name} gave a split beyond the budget of {budget_bytes} bytes")
    return SlotSplit(
        slots=tuple(choice.slots for choice in chosen),
        saved_ms=math.fsum(choice.saved_ms for choice in chosen),
        bound_ms=relaxed_bound_ms(choices, budget_bytes),
        solver=name,
        is_proven=seconds < time_limit_s,
        seconds=seconds,
    )


def relaxed_bound_ms(choices: Sequence[Sequence[Choice]], budget_bytes: int) -> float:
    """The optimum when slots may be fractions: steps along each layer's upper hull, the most saving per byte first."""
    total_ms = 0.0
    left_bytes = budget_bytes
    steps: list[tuple[float, int]] = []
    for options in choices:
        hull = _upper_hull(options)
        total_ms += hull[0].saved_ms
        left_bytes -= hull[0].num_bytes
        for before, after in zip(hull, hull[1:]):  # noqa: B905
            num_bytes = after.num_bytes - before.num_bytes
            steps.append(((after.saved_ms - before.saved_ms) / num_bytes, num_bytes))
    for ms_per_byte, num_bytes in sorted(steps, reverse=True):
        taken = min(num_bytes, left_bytes)
        total_ms += ms_per_byte * taken
        left_bytes -= taken
    return total_ms


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
) -> tuple[list[int], str]:
    """Which choice each layer gets, and the solver that said so."""
    if solver is not None and solver not in SOLVERS:
        raise unknown_name("solver", solver, SOLVERS)
    import pulp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PuLP 3 announces PuLP 4 at every call
        problem, picked = _model(pulp, choices, budget_bytes)
        for name in [solver] if solver else SOLVERS:
            engine = SOLVERS[name](pulp, gap_ms, time_limit_s)
            if not engine.available():
                continue
            try:
                status = pulp.LpStatus[problem.solve(engine)]
            except pulp.PulpSolverError:
                continue
            values = [[variable.value() or 0.0 for variable in row] for row in picked]
            if status == "Optimal" and all(abs(sum(row) - 1) < 1e-6 and max(row) > 0.99 for row in values):
                return [int(np.argmax(row)) for row in values], name
    raise ConfigError("no solver could split the slots; install one with 'pip install highspy'")


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
    return pulp.PULP_CBC_CMD(msg=False, gapAbs=gap_ms, threads=NUM_THREADS, timeLimit=time_limit_s)


SOLVERS: dict[str, Callable[[Any, float, float], Any]] = {"HiGHS": _highs, "CBC": _cbc}
