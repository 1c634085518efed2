"""Means over tokens with 95 % confidence intervals from whole windows of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

NUM_RESAMPLES = 2000


class Estimate(BaseModel):
    """A mean and its 95 % confidence interval; no interval where there is a single window."""

    model_config = ConfigDict(frozen=True)
    value: float
    low: float | None = None
    high: float | None = None


class WindowBootstrap:
    """Percentile bootstrap over windows: each resample draws as many windows as there are, with replacement.

    Windows are drawn, not tokens, because tokens of one window depend on each other. All figures share the same
    resamples, so that the interval of a ratio of two of them is a paired one.

    Args:
        num_windows: W.
        seed: equal seeds give equal intervals.
    """

    def __init__(self, num_windows: int, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        even = np.full(num_windows, 1 / num_windows)
        self._counts = generator.multinomial(num_windows, even, size=NUM_RESAMPLES).astype(np.float64)  # [R, W]
        self._num_windows = num_windows

    def estimate(
        self,
        totals: Sequence[float],
        tokens: Sequence[float],
        transform: Callable[[np.ndarray], np.ndarray] = np.asarray,
    ) -> Estimate:
        """The mean per token of something, from its total [W] and the number of tokens [W] of each window.

        Args:
            totals, tokens: per window.
            transform: applied to the mean and to that of every resample, such as `numpy.exp`; must be monotone.
        """
        top, bottom = np.asarray(totals, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
        value = float(transform(top.sum() / bottom.sum()))
        if self._num_windows < 2:
            return Estimate(value=value)
        drawn = self._counts @ bottom
        means = transform((self._counts @ top)[drawn > 0] / drawn[drawn > 0])
        low, high = np.percentile(means, [2.5, 97.5])
        return Estimate(value=value, low=min(float(low), value), high=max(float(high), value))
