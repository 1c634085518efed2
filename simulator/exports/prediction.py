"""How fast an exported configuration is expected to be. A number is only told with the band that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from simulator.exports.source import ExportSource
from simulator.policies.config import OffloadConfig
from simulator.replay import simulate
from simulator.validation.families import PUBLISHED_RECORD, published_band
from simulator.validation.record import MIN_COUNT, Family, ValidationRecord
from trace_capture.band import ErrorBand, spread_of
from trace_capture.errors import StudioError
from trace_capture.samples import sample_folder
from trace_capture.trace import Trace


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
        return with_band(provenance.predicted_tpot_ms, provenance.error_band)
    if source.parts is None or source.hardware is None:
        return no_prediction("the configuration does not say what was predicted; give a trace and a machine")
    try:
        training, held_out = source.parts
        run = simulate(held_out, source.hardware, source.config, bounds=False, profile=training)
    except StudioError as error:
        return no_prediction(str(error))
    return with_band(run.metrics.tpot_ms, run.info.error_band)


def predict_target(
    source: ExportSource, parts: tuple[Trace, Trace] | None, mapped: OffloadConfig, engine_family: str, family: Family
) -> Prediction:
    """What another engine is expected to do, by a replay of the mapped strategy.

    The band is that of published measurements of such engines with such strategies, predicted with the same cost
    terms from data sheets. So compute times that were measured with this project's engine are left out, and the band
    of a calibrated profile with them: they say nothing about another engine.

    Args:
        source: with a trace and a machine, else nothing is predicted.
        parts: of its trace, with passes as the target makes them: the second is replayed.
        mapped: what the target does.
        engine_family: as in the record of published measurements.
        family: the strategy, as in that record.
    """
    if parts is None or source.hardware is None:
        return no_prediction("that needs a trace and a machine (--trace, --hardware)")
    if source.hardware.emulated:
        return no_prediction(f"{source.hardware.name} is emulated, which says nothing about another engine")
    band = engine_band(engine_family, "speculative" if parts[1].info.draft is not None else family)
    if band is None:
        return Prediction(None, None, NOT_VALIDATED)
    try:
        hardware = source.hardware.model_copy(update={"measured": None})
        run = simulate(parts[1], hardware, mapped, bounds=False)
    except StudioError as error:
        return no_prediction(str(error))
    return with_band(run.metrics.tpot_ms, band)


@lru_cache
def engine_band(engine_family: str, family: Family) -> ErrorBand | None:
    """The band of published measurements: of one engine family and strategy, else of all engines with that strategy.

    Both are of predictions from data sheets. None where no record ships.
    """
    path = sample_folder() / PUBLISHED_RECORD
    if not path.is_file():
        return None
    ratios = [
        pair.measured_ms / pair.details["unscaled_ms"]
        for pair in ValidationRecord.load(path).pairs
        if pair.family == family and pair.details.get("engine_family") == engine_family
    ]
    if len(ratios) < MIN_COUNT:
        return published_band(path, family)
    return spread_of(ratios, f"90 % band, published {family.replace('_', ' ')} rates of {engine_family} engines")
