"""The validation record: pairs of predicted and measured times, and the error band per strategy family they justify.

One JSON file. `moe-studio validate` writes it; every prediction takes its band from such a record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trace_capture.band import COVERAGE, ErrorBand, band_of
from trace_capture.errors import TraceError
from trace_capture.files import write_text_atomic

RECORD_SCHEMA_VERSION: Literal[1] = 1
Source = Literal["live", "published", "papers"]
Family = Literal[
    "all_resident",
    "on_demand",
    "expert_cache",
    "prefetch",
    "cpu_experts",
    "layer_split",
    "hybrid",
    "speculative",
    "cpu_only",
    "any",
]
"""Strategy families, as in published measurements; `any` is all of them together."""
MIN_COUNT = 5
"""Pairs that a family needs for a band of its own; with fewer it takes that of all families together."""


class Pair(BaseModel):
    """One strategy on one workload: what was predicted and what was measured."""

    model_config = ConfigDict(extra="forbid")
    id: str
    """Label of the strategy, or the row of a table of published measurements."""
    family: Family
    predicted_ms: float = Field(gt=0, allow_inf_nan=False)
    """Time per output token."""
    measured_ms: float = Field(gt=0, allow_inf_nan=False)
    details: dict[str, Any] = Field(default_factory=dict)
    """Whatever else is known of the pair: configuration, counts, spread, digests."""

    @property
    def error_ratio(self) -> float:
        """Predicted over measured time, less one: positive when the prediction is too slow."""
        return self.predicted_ms / self.measured_ms - 1


class FamilyBand(BaseModel):
    """What the pairs of one strategy family say about further predictions for it.

    Errors are of |ln(predicted / measured)|, given as exp(.) - 1, so that twice too fast and twice too slow count
    alike. A measured time per token is expected between `band_low_ratio` and `band_high_ratio` times the predicted one
    in nine of ten cases (see `trace_capture.band.band_of`); for tokens/s, divide instead of multiplying.
    """

    model_config = ConfigDict(extra="forbid")
    source: Source
    family: Family
    n: int = Field(gt=0)
    median_abs_error: float
    p90_abs_error: float
    """By order statistic, without correction for few pairs, which the band has."""
    band_low_ratio: float
    band_high_ratio: float
    command: str
    versions: dict[str, str] = Field(default_factory=dict)


class ValidationRecord(BaseModel):
    """All pairs of one validation and the bands they give. Make one with `make_record`."""

    model_config = ConfigDict(extra="forbid")
    schema_version: Literal[1] = RECORD_SCHEMA_VERSION
    source: Source
    command: str
    """What made the record, to make it again."""
    versions: dict[str, str] = Field(default_factory=dict)
    model: str = ""
    """Of a live record: the model that ran."""
    hardware: str = ""
    hardware_digest: str = ""
    """Of a live record: the profile that predicted."""
    emulated: bool = False
    bands: list[FamilyBand]
    """One per family among the pairs, and `any`."""
    pairs: list[Pair]

    def band(self, family: Family) -> ErrorBand:
        """The band for a prediction of `family`: its own, or with fewer than `MIN_COUNT` pairs that of all pairs."""
        found = {band.family: band for band in self.bands}
        chosen = found.get(family)
        if chosen is None or chosen.n < MIN_COUNT:
            chosen = found["any"]
        whose = "all strategies" if chosen.family == "any" else chosen.family.replace("_", " ")
        on = f" with {self.model} on {self.hardware}" if self.source == "live" else ""
        return ErrorBand(
            low_ratio=chosen.band_low_ratio,
            high_ratio=chosen.band_high_ratio,
            count=chosen.n,
            source=f"{100 * COVERAGE:.0f} % band, {self.source} validation of {whose}{on}",
        )

    def with_pairs(self, pairs: Iterable[Pair]) -> ValidationRecord:
        """The record with further pairs and the bands that follow."""
        every = [*self.pairs, *pairs]
        bands = bands_of(self.source, every, self.command, self.versions)
        return self.model_copy(update={"pairs": every, "bands": bands})

    def save(self, path: Path) -> None:
        """Write the record as JSON, atomically."""
        write_text_atomic(path, json.dumps(self.model_dump(), indent=1, sort_keys=False) + "\n")

    @staticmethod
    def load(path: Path) -> ValidationRecord:
        """Read a record.

        Raises:
            TraceError: missing, damaged, of another schema version, or its bands do not follow from its pairs.
        """
        path = Path(path)
        mend = "make it again with 'moe-studio validate'"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            version = raw["schema_version"]
        except OSError as error:
            raise TraceError(f"cannot read validation record {path}: {error.strerror}; {mend}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path} is not a validation record; {mend}") from error
        if version != RECORD_SCHEMA_VERSION:
            raise TraceError(f"validation record {path} has schema_version {version}, wanted {RECORD_SCHEMA_VERSION}")
        try:
            record = ValidationRecord.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise TraceError(f"validation record {path}: {place}: {first['msg']}; {mend}") from error
        if not _same_bands(record.bands, bands_of(record.source, record.pairs, record.command, record.versions)):
            raise TraceError(f"validation record {path}: its bands do not follow from its pairs; {mend}")
        return record


def make_record(source: Source, pairs: Sequence[Pair], command: str, **about: Any) -> ValidationRecord:
    """A record of pairs with the bands they justify.

    Args:
        source: where the measured times come from.
        pairs: at least one.
        command: what makes the record again.
        about: further fields of `ValidationRecord`: versions, model, hardware, hardware_digest, emulated.

    Raises:
        TraceError: there are no pairs.
    """
    if not pairs:
        raise TraceError("nothing was both predicted and measured, so there is no validation to record")
    bands = bands_of(source, pairs, command, about.get("versions", {}))
    return ValidationRecord(source=source, command=command, pairs=list(pairs), bands=bands, **about)


def bands_of(source: Source, pairs: Sequence[Pair], command: str, versions: dict[str, str]) -> list[FamilyBand]:
    """One band per family among the pairs, in order of appearance, and `any` for all together."""
    families: dict[Family, list[Pair]] = {}
    for pair in pairs:
        families.setdefault(pair.family, []).append(pair)
    families["any"] = list(pairs)
    result = []
    for family, members in families.items():
        errors = [math.expm1(abs(math.log(pair.predicted_ms / pair.measured_ms))) for pair in members]
        band = band_of([pair.measured_ms / pair.predicted_ms for pair in members], "")
        result.append(
            FamilyBand(
                source=source,
                family=family,
                n=len(members),
                median_abs_error=median(errors),
                p90_abs_error=sorted(errors)[math.ceil(COVERAGE * len(errors)) - 1],
                band_low_ratio=band.low_ratio,
                band_high_ratio=band.high_ratio,
                command=command,
                versions=versions,
            )
        )
    return result


def _same_bands(left: Sequence[FamilyBand], right: Sequence[FamilyBand]) -> bool:
    def numbers(band: FamilyBand) -> tuple[float, ...]:
        return band.median_abs_error, band.p90_abs_error, band.band_low_ratio, band.band_high_ratio

    return len(left) == len(right) and all(
        (a.family, a.n) == (b.family, b.n)
        and all(math.isclose(x, y, rel_tol=1e-9) for x, y in zip(numbers(a), numbers(b), strict=True))
        for a, b in zip(left, right, strict=True)
    )
