"""Whether the machine ran at its usual speed: a short fixed piece of work, timed before every pass.

On a shared machine a core may run half as fast again or slower for seconds, by what others do on the same silicon,
which no statistic over a few runs takes out. The fixed work knows nothing of strategies, so what it says may decide
which passes are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeVar

from torch import nn

Item = TypeVar("Item")

TOLERANCE_RATIO = 0.12
"""How far the fixed work may be off its reference on either side of a pass that counts as undisturbed."""
_ADDITIONS = 4_000


class Probe(NamedTuple):
    """The fixed work once: when it began, and how long one round of it took."""

    began_ns: int
    value_ns: int


class Probes(NamedTuple):
    """Durations of the fixed work right before a pass and before the next one."""

    before_ns: int
    after_ns: int

    def are_steady(self, reference_ns: float) -> bool:
        """Whether both are as usual; always so where no reference is known (0)."""
        if reference_ns <= 0:
            return True
        return all(abs(value / reference_ns - 1) <= TOLERANCE_RATIO for value in self)


def probe_ns() -> int:
    """Time of the fixed work, about 0.2 ms: the shortest of three, since a thread that copies may step in between."""
    durations = []
    for _ in range(3):
        start_ns = perf_counter_ns()
        total = 0
        for number in range(_ADDITIONS):
            total += number
        durations.append(perf_counter_ns() - start_ns)
    return min(durations)


@contextmanager
def probed(model: nn.Module, wanted: bool = True) -> Iterator[list[Probe]]:
    """Do the fixed work before every forward pass of a model, ahead of all other hooks; gives the list that grows.

    Args:
        model: whose passes.
        wanted: False to do nothing and leave the list empty.
    """
    probes: list[Probe] = []
    if not wanted:
        yield probes
        return

    def probe(*_: Any) -> None:
        probes.append(Probe(perf_counter_ns(), probe_ns()))

    handle = model.register_forward_pre_hook(probe, prepend=True)
    try:
        yield probes
    finally:
        handle.remove()


def around_passes(probes: Sequence[Probe]) -> list[Probes]:
    """The probes before and after each pass; the last pass has only the one before it."""
    after = [*probes[1:], *probes[-1:]]
    return [Probes(before.value_ns, later.value_ns) for before, later in zip(probes, after, strict=True)]


def reference_ns(probes: Sequence[Probes]) -> float:
    """The usual duration of the fixed work: the median over passes."""
    return float(median(each.before_ns for each in probes)) if probes else 0.0


def steady_only(items: Sequence[tuple[Item, Probes]], reference_ns: float) -> list[Item]:
    """Items whose probes are steady; all of them where fewer than a quarter are, since few are worse than disturbed."""
    steady = [item for item, probes in items if probes.are_steady(reference_ns)]
    return steady if 4 * len(steady) >= len(items) else [item for item, _ in items]
