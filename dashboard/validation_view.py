"""Predictions held against measurements as numbers and sentences. Pure, but for the records that ship."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from dashboard.data import Snapshot
from dashboard.texts import EMULATED, format_percent, plural
from dashboard.views import compare
from simulator.validation.families import PUBLISHED_RECORD
from simulator.validation.record import Pair, ValidationRecord, make_record
from trace_capture.samples import sample_folder

RUNS, PUBLISHED = "@runs", "@published"
"""Names of the records that are no files of the folder."""
NO_RECORD = (
    "Nothing here was both predicted and measured. 'moe-studio validate --live --out FOLDER/record.json' does both on "
    "this machine."
)
PAPERS = "validation/papers.md"


@dataclass(frozen=True)
class NamedValidation:
    """A record that can be chosen, and how it is called."""

    name: str
    title: str
    record: ValidationRecord


@dataclass(frozen=True)
class PairRow:
    """One strategy: `error_ratio` is predicted over measured less one; whether it lies in its family's band."""

    id: str
    family: str
    predicted_ms: float
    measured_ms: float
    error_ratio: float
    is_inside_band: bool


@dataclass(frozen=True)
class FamilyRow:
    """A strategy family: errors of its pairs, and the band that predictions get, which is that of all pairs where the
    family has few; measured is expected within low..high times predicted."""

    family: str
    num_pairs: int
    median_abs_error: float
    p90_abs_error: float
    low_ratio: float
    high_ratio: float


@dataclass(frozen=True)
class ValidationView:
    """A record to draw. With `is_relative` times are in units of the measured one, so that only errors can be shown.

    `families` has the pairs' families in order and, last, `any` for all together.
    """

    title: str = ""
    pairs: tuple[PairRow, ...] = ()
    families: tuple[FamilyRow, ...] = ()
    is_relative: bool = False
    emulated: bool = False
    sentence: str = ""
    empty: str = ""

    @property
    def overall(self) -> FamilyRow:
        """The row of all pairs together."""
        return self.families[-1]


def validations(snapshot: Snapshot) -> list[NamedValidation]:
    """What can be looked at: records in the folder, its runs, and the published record that ships."""
    found = [
        NamedValidation(item.name, f"{item.name} ({item.record.source})", item.record) for item in snapshot.records
    ]
    runs = _record_of_runs(snapshot)
    if runs is not None:
        found.append(NamedValidation(RUNS, "runs of this folder", runs))
    shipped = _shipped_record()
    if shipped is not None:
        found.append(NamedValidation(PUBLISHED, "published measurements by others", shipped))
    return found


def validation_view(chosen: NamedValidation | None) -> ValidationView:
    """One record as rows."""
    if chosen is None:
        return ValidationView(empty=NO_RECORD)
    record = chosen.record
    rows = []
    for pair in record.pairs:
        band = record.band(pair.family)
        inside = band.contains(pair.predicted_ms, pair.measured_ms)
        rows.append(PairRow(pair.id, pair.family, pair.predicted_ms, pair.measured_ms, pair.error_ratio, inside))
    families = [
        FamilyRow(
            band.family,
            band.n,
            band.median_abs_error,
            band.p90_abs_error,
            record.band(band.family).low_ratio,
            record.band(band.family).high_ratio,
        )
        for band in sorted(record.bands, key=lambda band: band.family == "any")
    ]
    return ValidationView(
        title=chosen.title,
        pairs=tuple(rows),
        families=tuple(families),
        is_relative=record.source == "published",
        emulated=record.emulated,
        sentence=_sentence(record, rows),
    )


def papers_table() -> str:
    """The shipped comparison with figures of papers, as Markdown without its heading; empty where it does not ship."""
    path = sample_folder() / PAPERS
    if not path.is_file():
        return ""
    return path.read_text(encoding="utf-8").partition("\n")[2].strip()


def _record_of_runs(snapshot: Snapshot) -> ValidationRecord | None:
    """The folder's runs that were predicted and measured."""
    rows = [row for row in compare(snapshot.runs).rows if row.predicted_tpot_ms and row.measured_tpot_ms]
    if not rows:
        return None
    pairs = [
        Pair(
            id=row.label,
            family="any",
            predicted_ms=row.predicted_tpot_ms or 0.0,
            measured_ms=row.measured_tpot_ms or 0.0,
        )
        for row in rows
    ]
    return make_record("live", pairs, "moe-studio dashboard", emulated=any(row.emulated for row in rows))


def _shipped_record() -> ValidationRecord | None:
    path = sample_folder() / PUBLISHED_RECORD
    return _load_shipped() if path.is_file() else None


@lru_cache(maxsize=1)
def _load_shipped() -> ValidationRecord:
    return ValidationRecord.load(sample_folder() / PUBLISHED_RECORD)


def _sentence(record: ValidationRecord, rows: Sequence[PairRow]) -> str:
    errors = [math.expm1(abs(math.log1p(row.error_ratio))) for row in rows]
    inside = sum(row.is_inside_band for row in rows)
    text = (
        f"{plural(len(rows), 'pair')} of predicted and measured time per token: predicted is off by "
        f"{format_percent(median(errors))} in the median and {format_percent(max(errors))} at most; "
        f"{inside} of {len(rows)} lie inside the band."
    )
    if record.source == "published":
        text += " Each was predicted without its own source. The record keeps errors, not the figures of others."
    if record.model:
        text += f" {record.model} on {record.hardware}."
    return text + (f" Measured over an {EMULATED}." if record.emulated else "")
