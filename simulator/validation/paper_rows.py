"""A figure of a paper beside the simulator's, and the routing statistics that such predictions are made with."""

from __future__ import annotations

from dataclasses import dataclass

REUSE_RATIO = 4.125 / 8
"""Experts that consecutive tokens share, Qwen3-30B-A3B-Base on WikiText-2: 4.07 to 4.18 of 8."""
SKEW = 0.65
"""Zipf exponent with which the hottest 32 of 128 experts take 65 % of a layer's look-ups, as recorded for
Qwen3-30B-A3B (doramirdor/mbolt, layer 10)."""


@dataclass(frozen=True)
class PaperRow:
    """One figure of a paper beside the simulator's.

    Attributes:
        id: as in the project's list of outcomes to reproduce.
        scenario: what was run.
        unit: of the three numbers.
        predicted, measured: the figures; of a published range, `measured` is its middle.
        tolerance: largest difference that passes.
        soft: whether what the paper measured is partly inferred, so that a miss says little.
        details: further figures behind the row.
    """

    id: str
    scenario: str
    unit: str
    predicted: float
    measured: float
    tolerance: float
    soft: bool = False
    details: str = ""

    @property
    def ok(self) -> bool:
        """Whether the difference is within the tolerance."""
        return abs(self.predicted - self.measured) <= self.tolerance
