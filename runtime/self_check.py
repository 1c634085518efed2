"""How far predictions on a freshly calibrated profile are off: the band that every prediction on it then carries."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from runtime.capture import capture
from runtime.measure import measure
from runtime.models import LoadedModel, Sampling
from simulator.policies.config import DeviceConfig, parse_config
from simulator.replay import simulate
from trace_capture.hardware import HardwareProfile

Progress = Callable[[int, int], None]
CHECKS = (("none", 0.5), ("lru", 0.25), ("lru", 0.4), ("lfu", 0.5))
"""Cache policy and share of experts with a slot: from stalling at every layer to seldom."""


def with_error_band(
    loaded: LoadedModel,
    profile: HardwareProfile,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 24,
    progress: Progress | None = None,
) -> HardwareProfile:
    """Predict and measure a few strategies on the same tokens; the profile with a band of twice the root
    mean square error, but no less than the largest.

    Args:
        loaded: the model that the profile was calibrated with.
        profile: of `calibrate`.
        prompts: a few; not those that predictions will be judged on.
        max_new_tokens: per prompt.
        progress: called with (runs done, runs in all).
    """
    sampling = Sampling(temperature=0.8, seed=1, ignore_eos=True)
    device = DeviceConfig.for_link(profile.link)
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        trace = capture(loaded, prompts, Path(folder) / "check.parquet", max_new_tokens, sampling=sampling)
    for done, (policy, ratio) in enumerate(CHECKS, start=1):
        config = parse_config({"cache": {"policy": policy, "budget_ratio": ratio}, "device": device.model_dump()})
        predicted = simulate(trace, profile, config, bounds=False)
        measured = measure(loaded, prompts, config, max_new_tokens, sampling=sampling, record_spans=False)
        errors.append(measured.metrics.tpot_ms / predicted.metrics.tpot_ms - 1)
        if progress is not None:
            progress(done, len(CHECKS))
    source = (
        f"measured / predicted - 1 of TPOT over {len(errors)} runs of {trace.shape.name}: twice the root mean square"
    )
    return profile.model_copy(update={"error_band_ratio": round(error_band(errors), 4), "error_band_source": source})


def error_band(errors: Sequence[float]) -> float:
    """Half width of the band that signed relative errors justify: twice their root mean square, and no less than the
    largest of them."""
    return max(max(map(abs, errors)), 2 * math.sqrt(fmean(error * error for error in errors)))
