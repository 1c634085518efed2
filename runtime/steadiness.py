"""How fast the machine ran: a short fixed piece of work, timed before every pass.

On a shared machine a core runs at one speed now and half as fast again a second later, by what others do on the same
silicon, which no statistic over a few runs takes out. The fixed work knows nothing of strategies, so what it says may
be used to bring times that were measured at different moments to one speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional

Item = TypeVar("Item")

TOLERANCE_RATIO = 0.2
"""How far the fixed work before and after a pass may differ; beyond it the machine changed its speed meanwhile."""
_ADDITIONS, _PRODUCTS = 750, 6
_ROW = torch.full((1, 128), 0.5, dtype=torch.bfloat16)
_WEIGHTS = tuple(torch.full((192, 128), 0.01 * number, dtype=torch.bfloat16) for number in range(_PRODUCTS))


class Probe(NamedTuple):
    """The fixed work once: when it began, how long one round of it took, and when all of it ended."""

    began_ns: int
    value_ns: int
    ended_ns: int = 0


class Probes(NamedTuple):
    """Durations of the fixed work right before a pass and before the next one."""

    before_ns: int
    after_ns: int

    @property
    def is_steady(self) -> bool:
        """Whether the machine ran at one speed from before the pass to after it."""
        return abs(self.before_ns - self.after_ns) <= TOLERANCE_RATIO * min(self)

    def slowdown(self, reference_ns: float) -> float:
        """How many times longer work took than when the reference was measured; 1 where there is none (0)."""
        return (self.before_ns + self.after_ns) / 2 / reference_ns if reference_ns > 0 else 1.0


def probe_ns() -> int:
    """Time of the fixed work, about 0.2 ms of what decoding is made of, interpreter and small products: the shortest of
    three, since a thread that copies may step in between."""
    durations = []
    for _ in range(3):
        start_ns = perf_counter_ns()
        total = 0
        for number in range(_ADDITIONS):
            total += number
        with torch.no_grad():
            for weights in _WEIGHTS:
                functional.silu(functional.linear(_ROW, weights))
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
        began_ns = perf_counter_ns()
        probes.append(Probe(began_ns, probe_ns(), perf_counter_ns()))

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


class AtSpeed(NamedTuple, Generic[Item]):
    """Items measured while the machine held its speed, and how slow it was for them on average."""

    items: list[Item]
    slowdown: float


def steady_only(items: Sequence[tuple[Item, Probes]], reference_ns: float) -> AtSpeed[Item]:
    """Items during which the machine held its speed; all of them where fewer than a quarter are, since few are worse
    than disturbed. Times of theirs over `slowdown` are at the reference's speed."""
    steady = [item for item in items if item[1].is_steady]
    chosen = steady if 4 * len(steady) >= len(items) else list(items)
    slowdown = fmean(probes.slowdown(reference_ns) for _, probes in chosen) if chosen else 1.0
    return AtSpeed([item for item, _ in chosen], slowdown)
