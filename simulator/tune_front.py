"""The Pareto front of what tuning tried: speed, device memory and quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.policies.config import OffloadConfig
from simulator.tune_goal import Figures, Goal


@dataclass(frozen=True)
class Candidate:
    """One configuration and how it did on the training part.

    Attributes:
        config: what was simulated.
        split: `even`, `ILP` or `pool`.
        figures: on the training part.
        gamma: drafts per verify pass that the trace was made to have; None for passes as captured.
        kl_nats: estimated divergence of the output per token (`simulator.tune_quality`); 0 for what is lossless.
    """

    config: OffloadConfig
    split: str
    figures: Figures
    gamma: int | None = None
    kl_nats: float = 0.0

    @property
    def train_tpot_ms(self) -> float:
        """Time per output token."""
        return self.figures.tpot_ms

    @property
    def train_hit_rate(self) -> float:
        """Over decode passes."""
        return self.figures.decode_hit_rate


@dataclass(frozen=True)
class FrontPoint:
    """One candidate beside which no other is better in one of speed, memory and quality and as good in the others.

    Attributes:
        label: of the configuration.
        speed_ms: the time that the objective looks at, on the training part.
        device_bytes: device memory for experts.
        kl_nats: see `Candidate`.
        hit_rate: over decode passes.
        is_chosen: whether this is the configuration that tuning gives.
    """

    label: str
    speed_ms: float
    device_bytes: int
    kl_nats: float
    hit_rate: float
    is_chosen: bool


def pareto_front(candidates: Sequence[Candidate], goal: Goal, chosen: OffloadConfig) -> tuple[FrontPoint, ...]:
    """The candidates that nothing dominates, the fastest first; of equal ones the first. `chosen` is always there."""
    places = [(goal.speed_ms(one.figures), one.figures.device_bytes, one.kl_nats) for one in candidates]
    order = sorted(range(len(places)), key=lambda place: places[place])
    kept: list[int] = []
    for place in order:
        dominated = any(all(a <= b for a, b in zip(places[other], places[place], strict=True)) for other in kept)
        if not dominated or candidates[place].config == chosen:
            kept.append(place)
    return tuple(
        FrontPoint(
            label=candidates[place].config.title,
            speed_ms=places[place][0],
            device_bytes=places[place][1],
            kl_nats=places[place][2],
            hit_rate=candidates[place].train_hit_rate,
            is_chosen=candidates[place].config == chosen,
        )
        for place in kept
    )
