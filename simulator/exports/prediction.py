"""How fast an exported configuration is expected to be. A number is only told with the band that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from simulator.exports.source import ExportSource
from simulator.policies.config import OffloadConfig
from simulator.replay import simulate
from simulator.validation.record import MIN_COUNT, Family, ValidationRecord
from trace_capture.band import ErrorBand, band_of
from trace_capture.errors import StudioError
from trace_capture.samples import sample_folder


@dataclass(frozen=True)
class Prediction:
    """Time per output token with its band, or why there is none.

    Attributes:
        tpot_ms: None where there is no number, or none that may be told without a band.
        band: where a measured time is expected; None exactly when `tpot_ms` is.
        text: a sentence for a person.
    """

    tpot_ms: float | None
    band: ErrorBand | None
    text: str

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        if self.tpot_ms is None or self.band is None:
            return {"text": self.text}
        return {
            "text": self.text,
            "tpot_ms": self.tpot_ms,
            "low_ms": self.tpot_ms * self.band.low_ratio,
            "high_ms": self.tpot_ms * self.band.high_ratio,
            "band": self.band.model_dump(),
        }


NOT_VALIDATED = "no band: not validated, so no number is given"


def no_prediction(why: str) -> Prediction:
    """No number, and why."""
    return Prediction(None, None, f"not predicted: {why}")


def with_band(tpot_ms: float, band: ErrorBand | None) -> Prediction:
    """A predicted time with its band; without one the number is not told."""
    if band is None:
        return Prediction(None, None, NOT_VALIDATED)
    low_ms, high_ms = tpot_ms * band.low_ratio, tpot_ms * band.high_ratio
    source = f"; {band.source}" if band.source else ""
    text = (
        f"predicted {tpot_ms:.3g} ms per output token ({1e3 / tpot_ms:.3g} tokens/s), expected between {low_ms:.3g} "
        f"and {high_ms:.3g} ms (band {band.text()}{source})"
    )
    return Prediction(tpot_ms, band, text)


def predict_configured(source: ExportSource) -> Prediction:
    """What was predicted for the configuration itself, in this project's engine."""
    provenance = source.config.provenance
    if provenance is not None:
        return with_band(provenance.predicted_tpot_ms, _symmetric(provenance.error_band_ratio))
    if source.parts is None or source.hardware is None:
        return no_prediction("the configuration does not say what was predicted; give a trace and a machine")
    try:
        training, held_out = source.parts
        run = simulate(held_out, source.hardware, source.config, bounds=False, profile=training)
    except StudioError as error:
        return no_prediction(str(error))
    return with_band(run.metrics.tpot_ms, _symmetric(run.info.error_band_ratio))


def predict_target(source: ExportSource, mapped: OffloadConfig, engine_family: str, family: Family) -> Prediction:
    """What another engine is expected to do, by a replay of the mapped strategy.

    The band is that of published measurements of such engines with such strategies, predicted with the same cost
    terms; that of a calibrated profile is this project's engine's and says nothing about another.

    Args:
        source: with a trace and a machine, else nothing is predicted.
        mapped: what the target does.
        engine_family: as in the record of published measurements.
        family: the strategy, as in that record.
    """
    if source.parts is None or source.hardware is None:
        return no_prediction("that needs a trace and a machine (--trace, --hardware)")
    if source.hardware.emulated:
        return no_prediction(f"{source.hardware.name} is emulated, which says nothing about another engine")
    band = published_band(engine_family, "speculative" if source.draft is not None else family)
    if band is None:
        return Prediction(None, None, NOT_VALIDATED)
    try:
        run = simulate(source.parts[1], source.hardware, mapped, bounds=False)
    except StudioError as error:
        return no_prediction(str(error))
    return with_band(run.metrics.tpot_ms, band)


@lru_cache
def published_band(engine_family: str, family: Family) -> ErrorBand | None:
    """The band of published measurements of one engine family and strategy; None with fewer than `MIN_COUNT`."""
    record = ValidationRecord.load(sample_folder() / "validation" / "published.json")
    ratios = [
        pair.measured_ms / pair.details["unscaled_ms"]
        for pair in record.pairs
        if pair.family == family and pair.details.get("engine_family") == engine_family
    ]
    if len(ratios) < MIN_COUNT:
        return None
    return band_of(ratios, f"published {family.replace('_', ' ')} rates of {engine_family} engines")


def _symmetric(ratio: float | None) -> ErrorBand | None:
    return None if ratio is None else ErrorBand(low_ratio=max(1 - ratio, 1e-9), high_ratio=1 + ratio)
