"""The band around a predicted time per token, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

COVERAGE = 0.9
"""Share of further measurements that a band is made to contain."""
_STUDENT_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860)
"""Quantiles of Student's t at 95 %, for 1 to 8 degrees of freedom."""


class ErrorBand(BaseModel):
    """Where a measured time per token is expected, as shares of the predicted one."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    low_ratio: float = Field(gt=0)
    high_ratio: float = Field(gt=0, allow_inf_nan=False)
    count: int = Field(default=0, ge=0)
    """Pairs of predicted and measured times behind it; 0 where that was not recorded."""
    source: str = ""

    @model_validator(mode="after")
    def _ends_in_order(self) -> ErrorBand:
        if self.high_ratio < self.low_ratio:
            raise ValueError("high_ratio must not be below low_ratio")
        return self

    @property
    def half_width_ratio(self) -> float:
        """How far the farther end is from the prediction, for a plain +-."""
        return max(abs(self.high_ratio - 1), abs(1 - self.low_ratio))

    def text(self) -> str:
        """Such as `-4 % to +5 %, from 12 runs`."""
        low, high = 100 * (self.low_ratio - 1), 100 * (self.high_ratio - 1)
        digits = 1 if max(abs(high), abs(low)) < 10 else 0
        behind = f", from {self.count} measurements" if self.count else ""
        return f"{low:+.{digits}f} % to {high:+.{digits}f} %{behind}"

    def around_text(self, predicted_ms: float) -> str:
        """Such as `12.345 ms (11.851 to 12.962)`."""
        low, high = predicted_ms * self.low_ratio, predicted_ms * self.high_ratio
        return f"{predicted_ms:.3f} ms ({low:.3f} to {high:.3f})"

    def contains(self, predicted: float, measured: float) -> bool:
        """Whether a measured time lies in the band around its prediction."""
        return self.low_ratio * predicted <= measured <= self.high_ratio * predicted


def band_of(ratios: Sequence[float], source: str) -> ErrorBand:
    """The band that pairs justify: it is to contain `COVERAGE` of further measurements.

    From nine pairs on, the ceil(0.9 (n + 1))-th smallest |ln(measured / predicted)| (split conformal prediction), which
    holds for exchangeable pairs whatever their distribution. With fewer no order statistic reaches 90 %, so the root
    mean square times Student's t at 95 % with n degrees of freedom, exact for normal errors about zero; never less than
    the largest error.

    Args:
        ratios: measured over predicted time per token of each pair, above 0; at least one.
        source: what the pairs were.
    """
    errors = sorted(abs(math.log(ratio)) for ratio in ratios)
    count = len(errors)
    rank = math.ceil(COVERAGE * (count + 1))
    if rank <= count:
        width = errors[rank - 1]
    else:
        spread = math.sqrt(sum(error * error for error in errors) / count)
        width = max(errors[-1], _STUDENT_95[count - 1] * spread)
    return ErrorBand(low_ratio=math.exp(-width), high_ratio=math.exp(width), count=count, source=source)


def spread_of(ratios: Sequence[float], source: str) -> ErrorBand:
    """The band that pairs justify when predictions may be off to one side: from the floor(0.05 (n + 1))-th smallest to
    the ceil(0.95 (n + 1))-th smallest ratio (split conformal prediction at both ends), for fewer than 19 pairs the
    symmetric `band_of`.

    Args:
        ratios: measured over predicted time per token of each pair, above 0; at least one.
        source: what the pairs were.
    """
    count = len(ratios)
    tail = (1 - COVERAGE) / 2
    low, high = math.floor(tail * (count + 1) + 1e-9), math.ceil((1 - tail) * (count + 1) - 1e-9)
    if low < 1 or high > count:
        return band_of(ratios, source)
    ordered = sorted(ratios)
    return ErrorBand(low_ratio=ordered[low - 1], high_ratio=ordered[high - 1], count=count, source=source)


def from_old_fields(values: Any) -> Any:
    """Fields of a file that has `error_band_ratio` (a half width) in place of `error_band`."""
    if not isinstance(values, dict) or not {"error_band_ratio", "error_band_source"} & values.keys():
        return values
    values = dict(values)
    ratio, source = values.pop("error_band_ratio", None), values.pop("error_band_source", "")
    if ratio is not None:
        values["error_band"] = {"low_ratio": max(0.01, 1 - ratio), "high_ratio": 1 + ratio, "source": source}
    return values
