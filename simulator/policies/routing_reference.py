"""What the routing of a tuning trace was like, small enough to travel with the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

PARTS = 10_000
"""Shares of load are kept in parts of this."""


class RoutingReference(BaseModel):
    """Of the tokens that a trace generated; see `simulator.routing_drift` for the statistics and their use."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    load: tuple[str, ...]
    """Per MoE layer [L] the share of its load that each expert got, in parts of 10,000, blanks between them [E]. Text,
    because a TOML reader takes seconds for as many numbers."""
    parts: int = Field(ge=2)
    """Sequences, or pieces of them, behind the deviations."""
    part_tokens: float = Field(gt=0)
    """Generated tokens in each, mean."""
    popularity: float
    """Mean share of load of the experts that a token uses, over that of an even load; each part held against the load
    of all others."""
    popularity_deviation: float = Field(ge=0)
    """Standard deviation between parts."""
    overlap: float
    """Share of a token's experts that the token before it used, too."""
    overlap_deviation: float = Field(ge=0)

    def shares(self) -> list[list[float]]:
        """The share of each expert over an even one [L][E]."""
        rows = [[int(value) for value in row.split()] for row in self.load]
        return [[value * len(row) / PARTS for value in row] for row in rows]
