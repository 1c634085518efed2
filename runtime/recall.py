"""How often predicted experts are the ones that the router then chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Recall:
    """Running counts for one layer.

    Attributes:
        tokens: tokens with a prediction.
        slots: routed experts that were predicted, K for a token at most.
        top_k: K.
        whole: tokens whose whole set was right.
        first: tokens whose first-ranked expert was predicted.
    """

    tokens: int = 0
    slots: int = 0
    top_k: int = 0
    whole: int = 0
    first: int = 0

    def add(self, predicted: Sequence[Sequence[int]], routed: Sequence[Sequence[int]]) -> None:
        """Count tokens with predicted ids [T, P] and routed ids [T, K], the latter in the router's order."""
        for guess, truth in zip(predicted, routed, strict=True):
            found = len(set(guess).intersection(truth))
            self.tokens += 1
            self.slots += found
            self.top_k = len(truth)
            self.whole += found == len(truth)
            self.first += truth[0] in guess

    @property
    def slot_ratio(self) -> float:
        """Share of routed experts that were predicted (recall@k); nan without predictions."""
        return self.slots / (self.tokens * self.top_k) if self.tokens else float("nan")

    @property
    def whole_ratio(self) -> float:
        """Share of tokens whose whole set was right; nan without predictions."""
        return self.whole / self.tokens if self.tokens else float("nan")

    @property
    def first_ratio(self) -> float:
        """Share of tokens whose first-ranked expert was predicted; nan without predictions."""
        return self.first / self.tokens if self.tokens else float("nan")
