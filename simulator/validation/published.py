"""Predictions held against published measurements: `moe-studio validate --published`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.validation.published_predict import Prediction, predict_row
from simulator.validation.published_prefill import predict_prefill_per_s
from simulator.validation.published_rows import OrderedPair, PublishedRow, read_pairs, read_rows
from simulator.validation.published_score import (
    Efficiencies,
    Ranking,
    errors_of,
    measured_per_s,
    published_record,
    rank,
    source_label,
)
from simulator.validation.record import ValidationRecord, make_record
from trace_capture.samples import sample_folder
from trace_capture.versions import software_versions

MEDIAN_AIM = 0.20
RANKING_AIM = 0.85


@dataclass(frozen=True)
class ScoredRow:
    """A prediction with the efficiency of its family and the band of its strategy."""

    prediction: Prediction
    predicted_per_s: float
    unseen_per_s: float
    """The same with an efficiency that was fitted without the row's source group."""
    low_per_s: float
    high_per_s: float

    @property
    def measured_per_s(self) -> float:
        """Tokens per second that the source measured."""
        return measured_per_s(self.prediction)

    @property
    def counts(self) -> bool:
        """Whether the row takes part in error statistics."""
        return self.prediction.ranking_only is None

    @property
    def inside(self) -> bool:
        """Whether the measured rate lies in the band."""
        return self.low_per_s <= self.measured_per_s <= self.high_per_s

    def as_json(self) -> dict[str, Any]:
        """For the command line; rates in tokens per second, terms in ms per token before the efficiency."""
        entry = self.prediction
        return {
            "id": entry.row.id,
            "predicted": self.predicted_per_s,
            "measured": self.measured_per_s,
            "low": self.low_per_s,
            "high": self.high_per_s,
            "predicted_unseen": self.unseen_per_s,
            "strategy": entry.row.strategy,
            "engine_family": entry.family,
            "counts": self.counts,
            "ranking_only": entry.ranking_only,
            "assumed": list(entry.assumed),
            "terms_ms": {name: value / 1e6 for name, value in entry.terms_ns.items()},
        }


@dataclass(frozen=True)
class PublishedValidation:
    """All rows of one table against one record."""

    rows: tuple[ScoredRow, ...]
    skipped: tuple[tuple[PublishedRow, str], ...]
    ranking: Ranking | None
    efficiencies: Efficiencies
    unseen_coverage: float | None
    """Share of the rows that count whose measured rate lies in a band made without their source group."""

    def as_json(self) -> dict[str, Any]:
        """Everything for the command line. Errors are of |ln(predicted / measured)| as exp(.) - 1."""
        counted = [row for row in self.rows if row.counts]
        unseen = [math.log(row.unseen_per_s / row.measured_per_s) for row in counted]
        overall = _summary(counted)
        ranking = self.ranking
        return {
            "rows_predicted": len(self.rows),
            "rows_counted": len(counted),
            "rows_skipped": [{"id": row.id, "reason": reason} for row, reason in self.skipped],
            "skip_reasons": dict(Counter(reason for _, reason in self.skipped)),
            "ranking_only_reasons": dict(
                Counter(row.prediction.ranking_only for row in self.rows if row.prediction.ranking_only)
            ),
            **{name: value for name, value in overall.items() if name != "rows"},
            "leave_group_out": _as_dict(errors_of(unseen)) | {"band_coverage": self.unseen_coverage},
            "overall": overall,
            "all_predicted": _summary(self.rows),
            "ranking_accuracy": None if ranking is None else ranking.accuracy,
            "ranking_pairs": 0 if ranking is None else ranking.total,
            "ranking_pairs_left_out": 0 if ranking is None else ranking.left_out,
            "ranking_wrong": [] if ranking is None else [[pair.faster, pair.slower] for pair in ranking.wrong],
            "by_strategy": self._by_strategy(counted),
            "aims": {"median_abs_error": MEDIAN_AIM, "ranking_accuracy": RANKING_AIM, "met": self.aims_met},
            "efficiencies": self.efficiencies.table(),
            "rows": [row.as_json() for row in self.rows],
        }

    @property
    def aims_met(self) -> bool:
        """Whether the median error of the rows that count, and the ranking where there are pairs, are as aimed for."""
        found = errors_of([math.log(row.predicted_per_s / row.measured_per_s) for row in self.rows if row.counts])
        accuracy = self.ranking.accuracy if self.ranking is not None else None
        return (
            found is not None and found.median_abs_error <= MEDIAN_AIM and (accuracy is None or accuracy >= RANKING_AIM)
        )

    def _by_strategy(self, counted: Sequence[ScoredRow]) -> dict[str, Any]:
        """Errors of the rows that count; pairs by the strategy of their faster row."""
        strategies = {row.prediction.row.id: row.prediction.row.strategy for row in self.rows}
        result: dict[str, Any] = {}
        for strategy in sorted(set(strategies.values())):
            entry = _summary([row for row in counted if row.prediction.row.strategy == strategy])
            if self.ranking is not None:
                right = sum(strategies.get(pair.faster) == strategy for pair in self.ranking.right_pairs)
                wrong = sum(strategies.get(pair.faster) == strategy for pair in self.ranking.wrong)
                entry |= {"ranking_pairs": right + wrong}
                entry |= {"ranking_accuracy": right / (right + wrong) if right + wrong else None}
            result[strategy] = entry
        return result


def record_path() -> Path:
    """The record that ships with the project, which efficiencies and bands come from."""
    return sample_folder() / "validation" / "published.json"


def validate_published(
    published: Path,
    pairs: Path | None = None,
    *,
    record: ValidationRecord | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PublishedValidation:
    """Predict every row of a table and compare.

    Args:
        published: table of operating points.
        pairs: table of ordering facts between its rows.
        record: where efficiencies and bands come from; by default the one that ships.
        progress: called with rows done and rows in all.

    Raises:
        TraceError: a table or the record cannot be read.
    """
    record = record or ValidationRecord.load(record_path())
    table = read_rows(published)
    predictions, skipped = predict_all(table, progress)
    efficiencies = Efficiencies.of_record(record)
    rows = tuple(_scored(entry, efficiencies, record) for entry in predictions)
    facts: list[OrderedPair] | None = None if pairs is None else read_pairs(pairs)
    rates = {(row.prediction.row.id, "decode"): row.predicted_per_s for row in rows}
    rates |= {(row.id, "prefill"): rate for row in table if (rate := predict_prefill_per_s(row)) is not None}
    ranking = None if facts is None else rank(facts, rates)
    return PublishedValidation(rows, tuple(skipped), ranking, efficiencies, _unseen_coverage(rows, record))


def fit_published(published: Path, command: str) -> ValidationRecord:
    """The record of a table: efficiencies follow from its pairs, bands from predictions without their own source.

    Raises:
        TraceError: the table cannot be read, or no row of it counts.
    """
    predictions, _ = predict_all(read_rows(published))
    return published_record(predictions, command, software_versions("numpy"))


def predict_all(
    rows: Sequence[PublishedRow], progress: Callable[[int, int], None] | None = None
) -> tuple[list[Prediction], list[tuple[PublishedRow, str]]]:
    """Predictions, and the rows without one and why."""
    predictions: list[Prediction] = []
    skipped: list[tuple[PublishedRow, str]] = []
    for done, row in enumerate(rows, 1):
        result = predict_row(row)
        if isinstance(result, str):
            skipped.append((row, result))
        else:
            predictions.append(result)
        if progress is not None:
            progress(done, len(rows))
    return predictions, skipped


def _scored(entry: Prediction, efficiencies: Efficiencies, record: ValidationRecord) -> ScoredRow:
    """Bands are of times, so their ends change places for rates."""
    predicted = entry.per_s * efficiencies.of(entry.family)
    band = record.band(entry.row.strategy)
    return ScoredRow(
        prediction=entry,
        predicted_per_s=predicted,
        unseen_per_s=entry.per_s * efficiencies.of(entry.family, source_label(entry.row.source_group)),
        low_per_s=predicted / band.high_ratio,
        high_per_s=predicted / band.low_ratio,
    )


def _unseen_coverage(rows: Sequence[ScoredRow], record: ValidationRecord) -> float | None:
    inside, total = 0, 0
    for group in sorted({row.prediction.row.source_group for row in rows if row.counts}):
        others = [pair for pair in record.pairs if pair.details["source_group"] != source_label(group)]
        if not others:
            continue
        unseen = make_record("published", others, record.command)
        for row in rows:
            if row.counts and row.prediction.row.source_group == group:
                band = unseen.band(row.prediction.row.strategy)
                total += 1
                inside += band.contains(1 / row.unseen_per_s, 1 / row.measured_per_s)
    return inside / total if total else None


def _summary(rows: Sequence[ScoredRow]) -> dict[str, Any]:
    found = errors_of([math.log(row.predicted_per_s / row.measured_per_s) for row in rows])
    coverage = sum(row.inside for row in rows) / len(rows) if rows else None
    return _as_dict(found) | {"band_coverage": coverage}


def _as_dict(errors: Any) -> dict[str, Any]:
    if errors is None:
        return {"rows": 0, "median_abs_error": None, "p90_abs_error": None}
    return dict(errors._asdict())
