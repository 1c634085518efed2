"""What a user chooses about the utility of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from simulator.policies.balancer import Objective
from simulator.policies.errors import unknown_name
from simulator.policies.utility import (
    BOUNDARY_RULES,
    UTILITY_SIGNALS,
    Boundaries,
    UtilitySignal,
    make_utility_signal,
)
from trace_capture.model_shape import ModelShape


class UtilityConfig(BaseModel):
    """How the utility of experts is kept, and what is loaded by it; used where `cache.policy` is `utility`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    signal: str = "speculative"
    """speculative: by how many tokens of a pass an expert is used; autoregressive and recency: the ablations."""
    boundaries: str = "fluctuation"
    """fixed; or following the usual fluctuation, or the capacity that layers have."""
    up: int | None = Field(default=None, gt=0)
    """Fluctuation that moves a state up by one, at first; None: more than half of a pass's tokens."""
    down: int | None = Field(default=None, gt=0)
    """Likewise down; None: 1."""
    gamma: int = Field(default=8, ge=0)
    """Drafts per verify pass at most."""
    loads: Literal["none", "drafting", "always"] = "none"
    """What is loaded ahead by utility: nothing; what the balancer plans while drafts are made; and beside it what
    becomes hot while a pass runs."""
    tau: int | None = Field(default=None, gt=0)
    """Utility from which on an expert belongs on the device; None: the balancer chooses for every pass."""
    scope: Literal["pass", "layer"] = "pass"
    """One tau for all layers of a pass, or one for each."""
    objective: Objective = "longest"
    """What the balancer minimises: the longer of device and CPU, or their difference as the paper says."""
    window: Literal["drafting", "round"] = "drafting"
    """Time in which planned loads must hide: that of drafting as the paper says, or of drafting and the pass."""
    window_ns: int | None = Field(default=None, ge=0)
    """That time, instead of the running mean of what was measured."""
    in_flight: int = Field(default=4, gt=0)
    """With `always`: while a pass runs, at most so many of these loads are under way."""

    @field_validator("signal")
    @classmethod
    def _known_signal(cls, name: str) -> str:
        if name not in UTILITY_SIGNALS:
            raise unknown_name("utility signal", name, UTILITY_SIGNALS)
        return name

    @field_validator("boundaries")
    @classmethod
    def _known_rule(cls, name: str) -> str:
        if name not in BOUNDARY_RULES:
            raise unknown_name("boundary rule", name, BOUNDARY_RULES)
        return name

    def make(self, shape: ModelShape, capacity: Sequence[int]) -> UtilitySignal:
        """A fresh signal for a model whose layers have room for `capacity` experts each [L]."""
        up = (self.gamma + 2) // 2 if self.up is None else self.up
        start = Boundaries(up, 1 if self.down is None else self.down)
        return make_utility_signal(
            self.signal, self.boundaries, shape.num_experts, self.gamma, capacity, start, top_k=shape.top_k
        )
