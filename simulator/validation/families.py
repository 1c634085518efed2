"""Which strategy family a configuration belongs to, in the terms of published measurements, and the band it gets."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from simulator.policies.capacity import plan_capacity
from simulator.policies.config import OffloadConfig
from simulator.validation.record import Family, ValidationRecord
from trace_capture.band import ErrorBand, spread_of
from trace_capture.hardware import HardwareProfile
from trace_capture.model_shape import ModelShape
from trace_capture.samples import sample_folder

PUBLISHED_RECORD = "validation/published.json"
MIN_PUBLISHED = 19
"""Rows that a family needs for both ends of a band of its own; with fewer it takes that of all published rows."""


def strategy_family(config: OffloadConfig, shape: ModelShape) -> Family:
    """The family whose validation speaks for predictions of `config` for a model of this shape.

    Raises:
        ConfigError: the configuration does not fit the model.
    """
    cpu_layers = config.cpu.whole_layers(shape.num_moe_layers)
    if len(cpu_layers) == shape.num_moe_layers:
        return "cpu_experts"
    if config.cpu.policy != "none":
        return "hybrid"
    if cpu_layers:
        return "layer_split"
    if config.prefetch.source != "none":
        return "prefetch"
    if config.cache.policy == "none":
        return "on_demand"
    if plan_capacity(config.cache, shape).total_bytes >= shape.total_expert_bytes:
        return "all_resident"
    return "expert_cache"


def prediction_band(
    hardware: HardwareProfile, config: OffloadConfig, shape: ModelShape, *, is_measured: bool
) -> ErrorBand | None:
    """The error band of a prediction: of a calibrated profile its own, else what published measurements say.

    Args:
        hardware: the profile that predicts.
        config, shape: what is predicted.
        is_measured: whether `hardware` was calibrated with this model; its band is for that model alone.

    Returns:
        None where nothing comparable was validated: a calibrated profile without a check, or an emulated link with
        another model's compute.
    """
    if is_measured:
        return hardware.error_band
    if hardware.emulated:
        return None
    return published_band(sample_folder() / PUBLISHED_RECORD, strategy_family(config, shape))


@lru_cache(maxsize=64)
def published_band(path: Path, family: Family) -> ErrorBand | None:
    """Where published times per token lie beside those predicted from data sheets, for one strategy family.

    Engines reach a part of what a data sheet allows, so the band lies mostly above the prediction, which is of an
    engine that loses nothing but the terms it names. None where no record ships.

    Raises:
        TraceError: the record is damaged.
    """
    if not path.is_file():
        return None
    every = [
        (pair.family, pair.measured_ms / pair.details["unscaled_ms"])
        for pair in ValidationRecord.load(path).pairs
        if "unscaled_ms" in pair.details
    ]
    own = [ratio for of, ratio in every if of == family]
    ratios = own if len(own) >= MIN_PUBLISHED else [ratio for _, ratio in every]
    if not ratios:
        return None
    whose = family.replace("_", " ") if ratios is own else "all strategies"
    return spread_of(ratios, f"90 % band, published measurements of other engines, {whose}")
