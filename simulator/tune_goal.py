"""What tuning looks for: the figures of one replay, and which of two is better."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from simulator.policies.capacity import plan_capacity
from simulator.policies.config import OffloadConfig
from simulator.policies.errors import unknown_name
from trace_capture.model_shape import ModelShape
from trace_capture.run import Run
from trace_capture.trace import Phase

Objective = Literal["tpot", "ttft", "throughput", "memory"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


@dataclass(frozen=True)
class Figures:
    """Of one replay.

    Attributes:
        tpot_ms: time per output token.
        ttft_ms: time to the first token.
        token_ms: time of everything, the reading of prompts included, per output token.
        decode_hit_rate: over decode passes.
        device_bytes: device memory for experts.
    """

    tpot_ms: float
    ttft_ms: float
    token_ms: float
    decode_hit_rate: float
    device_bytes: int

    def as_json(self) -> dict[str, Any]:
        """For a store of results."""
        return asdict(self)


def figures_of(run: Run, shape: ModelShape) -> Figures:
    """The figures of a run, whose first token of each prompt counts as output."""
    metrics = run.metrics
    prompts = len({item.sequence for item in run.passes if item.phase == Phase.PREFILL})
    total_ms = prompts * metrics.ttft_ms + metrics.decode_tokens * metrics.tpot_ms
    return Figures(
        tpot_ms=metrics.tpot_ms,
        ttft_ms=metrics.ttft_ms,
        token_ms=total_ms / max(1, prompts + metrics.decode_tokens),
        decode_hit_rate=metrics.decode_hit_rate,
        device_bytes=device_bytes(OffloadConfig.model_validate(run.info.config), shape),
    )


def device_bytes(config: OffloadConfig, shape: ModelShape) -> int:
    """Device memory for experts that a configuration takes."""
    return plan_capacity(config.cache, shape, config.cpu.whole_layers(shape.num_moe_layers)).total_bytes


@dataclass(frozen=True)
class Goal:
    """An objective with what it needs to score figures.

    Attributes:
        objective: tpot, ttft: that time. throughput: all time per output token. memory: the least device memory with
            which the time per token stays below `limit_ms`.
        budget_bytes: the most device memory there is.
        limit_ms: for `memory`.
    """

    objective: str = "tpot"
    budget_bytes: int = 1
    limit_ms: float = math.inf

    def __post_init__(self) -> None:
        """Check the objective's name.

        Raises:
            ConfigError: it is unknown.
        """
        if self.objective not in OBJECTIVES:
            raise unknown_name("objective", self.objective, OBJECTIVES)

    def speed_ms(self, figures: Figures) -> float:
        """The time that the objective looks at."""
        times = {"ttft": figures.ttft_ms, "throughput": figures.token_ms}
        return times.get(self.objective, figures.tpot_ms)

    def score(self, figures: Figures | None) -> float:
        """Lower is better; infinite for a configuration that is impossible. With `memory` a share of the budget, and
        above 1 where the time limit is missed."""
        if figures is None:
            return math.inf
        if self.objective != "memory" or math.isinf(self.limit_ms):
            return self.speed_ms(figures)
        if figures.tpot_ms <= self.limit_ms:
            return figures.device_bytes / self.budget_bytes
        return 1 + figures.tpot_ms / self.limit_ms
