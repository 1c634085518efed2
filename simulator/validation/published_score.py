"""Efficiency of engine families, errors, bands and ranking of predictions against published measurements.

One efficiency per engine family scales every predicted rate of that family. It is the median over source groups of
each group's median of measured over predicted, with the median of all families taking part as one more group, so that
a family of few sources stays near it; a family without rows takes that of all. Sources count, not rows: a long ladder
of one author says no more of other machines than a single row. What it is worth on sources it has not seen is told by
leaving each source group out (`leave_out`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from simulator.validation.published_predict import Prediction
from simulator.validation.published_rows import OrderedPair
from simulator.validation.record import Pair, ValidationRecord, make_record


class Ratio(NamedTuple):
    """Measured over predicted rate of one row."""

    family: str
    source_group: str
    log_ratio: float


@dataclass(frozen=True)
class Efficiencies:
    """Fitted on the rows of a record; the same rows always give the same numbers."""

    ratios: tuple[Ratio, ...]

    @staticmethod
    def of_record(record: ValidationRecord) -> Efficiencies:
        """From the pairs of a record of published measurements."""
        return Efficiencies(
            tuple(
                Ratio(
                    pair.details["engine_family"],
                    pair.details["source_group"],
                    math.log(pair.details["unscaled_ms"] / pair.measured_ms),
                )
                for pair in record.pairs
            )
        )

    @staticmethod
    def of_predictions(predictions: Iterable[Prediction]) -> Efficiencies:
        """From the predictions that count."""
        return Efficiencies(
            tuple(
                Ratio(entry.family, source_label(entry.row.source_group), math.log(measured_per_s(entry) / entry.per_s))
                for entry in predictions
                if entry.ranking_only is None
            )
        )

    def of(self, family: str, leave_out: str | None = None) -> float:
        """The efficiency of a family, without the rows of the source labelled `leave_out`; 1 if nothing is left."""
        ratios = [ratio for ratio in self.ratios if ratio.source_group != leave_out]
        pooled = _group_medians(ratios)
        if not pooled:
            return 1.0
        own = _group_medians(ratio for ratio in ratios if ratio.family == family)
        return math.exp(median([*own, median(pooled)]))

    def table(self) -> dict[str, dict[str, float]]:
        """Per family: the efficiency, and how many rows and source groups it rests on."""
        result: dict[str, dict[str, float]] = {}
        for family in sorted({ratio.family for ratio in self.ratios}):
            own = [ratio for ratio in self.ratios if ratio.family == family]
            groups = len({ratio.source_group for ratio in own})
            result[family] = {"efficiency": self.of(family), "rows": len(own), "source_groups": groups}
        return result


class Errors(NamedTuple):
    """Of |ln(predicted / measured)|, given as exp(.) - 1."""

    rows: int
    median_abs_error: float
    p90_abs_error: float


def errors_of(log_errors: Sequence[float]) -> Errors | None:
    """Median and 90th percentile (by order statistic); None for no rows."""
    if not log_errors:
        return None
    ordered = sorted(abs(value) for value in log_errors)
    ninth = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return Errors(len(ordered), math.expm1(median(ordered)), math.expm1(ninth))


def measured_per_s(prediction: Prediction) -> float:
    """Tokens per second that the source measured."""
    assert prediction.row.decode_per_s is not None  # noqa: S101 - predict_row refuses rows without
    return prediction.row.decode_per_s


def published_record(predictions: Sequence[Prediction], command: str, versions: dict[str, str]) -> ValidationRecord:
    """The record of the rows that count. Predicted times are those without the row's own source group, so that the
    bands hold for sources that nobody has seen.

    It keeps errors and no figures of others: times are in units of the measured one, sources go by a digest.

    Raises:
        TraceError: no row counts.
    """
    fitted = Efficiencies.of_predictions(predictions)
    counted = [entry for entry in predictions if entry.ranking_only is None]
    pairs = []
    for number, entry in enumerate(counted, 1):
        measured = measured_per_s(entry)
        details = {
            "engine_family": entry.family,
            "source_group": source_label(entry.row.source_group),
            "unscaled_ms": round(measured / entry.per_s, 6),
        }
        scaled = entry.per_s * fitted.of(entry.family, source_label(entry.row.source_group))
        predicted_ms = round(measured / scaled, 6)
        pairs.append(
            Pair(id=str(number), family=entry.row.strategy, predicted_ms=predicted_ms, measured_ms=1, details=details)
        )
    return make_record("published", pairs, command, versions=versions)


def source_label(source_group: str) -> str:
    """A short name of a source that tells it from others and nothing else."""
    return hashlib.sha256(source_group.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Ranking:
    """Strong pairs that were predicted in the right order."""

    right_pairs: tuple[OrderedPair, ...]
    wrong: tuple[OrderedPair, ...]
    left_out: int
    """Strong pairs of which a row has no prediction."""

    @property
    def right(self) -> int:
        """Pairs in the right order."""
        return len(self.right_pairs)

    @property
    def total(self) -> int:
        """Pairs with both rates."""
        return self.right + len(self.wrong)

    @property
    def accuracy(self) -> float | None:
        """Share of right pairs; None without pairs."""
        return self.right / self.total if self.total else None


def rank(pairs: Iterable[OrderedPair], rates: dict[tuple[str, str], float]) -> Ranking:
    """Order of the strong pairs by predicted rates.

    Args:
        pairs: facts.
        rates: predicted tokens per second by row and metric; equal rates rank wrong.
    """
    right: list[OrderedPair] = []
    wrong: list[OrderedPair] = []
    left_out = 0
    for pair in pairs:
        if not pair.strong:
            continue
        keys = (pair.faster, pair.metric), (pair.slower, pair.metric)
        if any(key not in rates for key in keys):
            left_out += 1
        elif rates[keys[0]] > rates[keys[1]]:
            right.append(pair)
        else:
            wrong.append(pair)
    return Ranking(tuple(right), tuple(wrong), left_out)


def _group_medians(ratios: Iterable[Ratio]) -> list[float]:
    groups: dict[str, list[float]] = {}
    for ratio in ratios:
        groups.setdefault(ratio.source_group, []).append(ratio.log_ratio)
    return [median(values) for values in groups.values()]
