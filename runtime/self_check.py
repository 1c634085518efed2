"""The short check that `calibrate` ends with: how far predictions on the fresh profile are off, as its error band.

`moe-studio validate --live` is the long one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.capture import capture
from runtime.models import LoadedModel, Sampling
from runtime.pairing import Workload, predict_and_measure
from simulator.policies.config import DeviceConfig, parse_config
from simulator.validation.record import make_record
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
    """Predict and measure a few strategies on the same tokens; the profile with the band that follows.

    Args:
        loaded: the model that the profile was calibrated with.
        profile: of `calibrate`.
        prompts: a few; not those that predictions will be judged on.
        max_new_tokens: per prompt.
        progress: called with (runs done, runs in all).
    """
    sampling = Sampling(temperature=0.8, seed=1, ignore_eos=True)
    device = DeviceConfig.for_machine(profile).model_dump()
    with tempfile.TemporaryDirectory() as folder:
        trace = capture(loaded, prompts, Path(folder) / "check.parquet", max_new_tokens, sampling=sampling)
    candidates = [
        (parse_config({"cache": {"policy": policy, "budget_ratio": ratio}, "device": device}), profile)
        for policy, ratio in CHECKS
    ]
    workload = Workload(trace, prompts, max_new_tokens, sampling)
    compared = predict_and_measure(loaded, workload, candidates, progress=progress)
    record = make_record(
        "live",
        [each.pair() for each in compared],
        "moe-studio calibrate",
        model=trace.shape.name,
        hardware=profile.name,
    )
    return profile.model_copy(update={"error_band": record.band("any")})
