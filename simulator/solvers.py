"""Integer programs in PuLP: HiGHS, CBC where HiGHS is absent, and what their answers are worth.

Both solvers say `Optimal` of whatever they hold when their time is over, so the clock decides whether an answer is
proven. Gaps are absolute: a relative one means nothing for an objective that can be 0.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from simulator.policies.errors import unknown_name
from trace_capture.errors import ConfigError

NUM_THREADS = 1
"""HiGHS: one count per process; it returns "not solved" when a later solve asks for another."""


class Solved(NamedTuple):
    """How an answer was found.

    Attributes:
        solver: `HiGHS` or `CBC`; empty where no solver gave an answer.
        is_proven: the solver ended by itself; False when its time limit stopped it, whatever it calls that.
        seconds: wall time of the solvers.
    """

    solver: str
    is_proven: bool
    seconds: float


@contextmanager
def quiet_pulp() -> Iterator[Any]:
    """PuLP, without the warnings in which version 3 announces version 4 at every call."""
    import pulp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pulp


def solve(
    problem: Any, is_answer: Callable[[], bool], gap: float, time_limit_s: float, solver: str | None = None
) -> Solved:
    """Solve a PuLP problem; its variables then hold the answer.

    Args:
        problem: a `pulp.LpProblem`, made within `quiet_pulp`.
        is_answer: whether the variables' values are an answer to the problem; asked after each solver.
        gap: how far from the optimum an answer may be, in the objective's unit.
        time_limit_s: of each solver.
        solver: `HiGHS` or `CBC`; None for the first that is installed and finds an answer.

    Raises:
        ConfigError: the solver's name is unknown, or none is installed.
    """
    if solver is not None and solver not in SOLVERS:
        raise unknown_name("solver", solver, SOLVERS)
    with quiet_pulp() as pulp:
        engines = {name: make(pulp, gap, time_limit_s) for name, make in SOLVERS.items() if solver in (None, name)}
        engines = {name: engine for name, engine in engines.items() if engine.available()}
        if not engines:
            raise ConfigError("there is no solver for integer programs; install one with 'pip install highspy'")
        began_s = time.perf_counter()
        for name, engine in engines.items():
            with suppress(pulp.PulpSolverError):
                problem.solve(engine)
            if is_answer():
                seconds = time.perf_counter() - began_s
                return Solved(name, seconds < time_limit_s, seconds)
    return Solved("", False, time.perf_counter() - began_s)


def chosen(variables: list[Any]) -> int | None:
    """The place of the one binary that is 1; None where the values are no such choice."""
    values = [variable.value() or 0.0 for variable in variables]
    is_choice = abs(sum(values) - 1) < 1e-6 and max(values) > 0.99
    return values.index(max(values)) if is_choice else None


def _highs(pulp: Any, gap: float, time_limit_s: float) -> Any:
    """HiGHS with an absolute gap alone: its own relative gap of 1e-4 is switched off."""
    with _silent_stdout(), suppress(ImportError):
        import highspy

        highspy.Highs()  # type: ignore[no-untyped-call]
    return pulp.HiGHS(msg=False, gapAbs=gap, gapRel=0.0, threads=NUM_THREADS, timeLimit=time_limit_s)


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


def _cbc(pulp: Any, gap: float, time_limit_s: float) -> Any:
    """CBC without `-threads`: even `-threads 1` starts a worker, and when its wake-up is lost the main thread sleeps
    for ten seconds, whatever the time limit, before it gives a solved problem back as stopped."""
    return pulp.PULP_CBC_CMD(msg=False, gapAbs=gap, timeLimit=time_limit_s)


SOLVERS: dict[str, Callable[[Any, float, float], Any]] = {"HiGHS": _highs, "CBC": _cbc}
