"""`validate --live`: many combinations of policy, prefetch, link speed and budget, predicted and measured here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from runtime.calibrate import calibrate
from runtime.capture import capture, vectors_beside
from runtime.models import LoadedModel, Sampling
from runtime.pairing import Comparison, Workload, predict_and_measure
from simulator.policies.config import OffloadConfig, parse_config
from simulator.validation.record import ValidationRecord, make_record
from trace_capture.errors import ProfileError
from trace_capture.hardware import HardwareProfile
from trace_capture.trace import Trace
from trace_capture.versions import software_versions

Step = Callable[[str], Callable[[int, int], None]]
MEDIAN_AIM, WORST_AIM = 0.05, 0.12
"""What the absolute errors of TPOT should stay below."""
SLOW_RATIO, SPEEDS = 8.0, {"slow": 1.0, "medium": 3.0, "fast": 8.0}
"""Copy time over compute time per token of on-demand loading at the slowest link, and the rates as multiples of it."""


class Combination(NamedTuple):
    """One row of the grid."""

    speed: str
    policy: str
    scope: str
    budget_ratio: float
    source: str = "none"
    mode: str = "hint"
    serial: bool = False
    cpu: str = ""
    """What the CPU runs: `misses`, or the number of layers that are its own."""

    def candidate(self, profile: HardwareProfile) -> tuple[OffloadConfig, HardwareProfile]:
        """The configuration, and the profile with its link at the row's speed."""
        link = profile.link
        rate = link.h2d_bytes_per_s.value * SPEEDS[self.speed]
        quantity = link.h2d_bytes_per_s.model_copy(update={"value": rate})
        raw: dict[str, Any] = {
            "label": self.label,
            "cache": {"policy": self.policy, "scope": self.scope, "budget_ratio": self.budget_ratio},
            "prefetch": {"source": self.source, "mode": self.mode},
            "cpu": {"policy": self.cpu} if self.cpu == "misses" else {"layers": int(self.cpu or 0)},
            "device": {"h2d_bytes_per_s": rate, "latency_ns": round(link.latency_ns.value), "serial": self.serial},
        }
        faster = link.model_copy(update={"h2d_bytes_per_s": quantity})
        return parse_config(raw), profile.model_copy(update={"link": faster})

    @property
    def label(self) -> str:
        """What tables call the row."""
        if self.policy == "none":
            cache = "on-demand"
        elif self.budget_ratio == 1:
            cache = "resident"
        else:
            cache = f"{self.policy} {100 * self.budget_ratio:.0f} %" + (", one pool" if self.scope == "global" else "")
        ahead = "" if self.source == "none" else f" + {self.source} {self.mode}"
        beside = {"": "", "misses": ", misses on CPU"}.get(self.cpu, f", {self.cpu} layers on CPU")
        return f"{cache}{ahead}{beside}{', serial' if self.serial else ''}, {self.speed} link"


COMBINATIONS = (
    Combination("slow", "none", "layer", 1.0),
    Combination("fast", "none", "layer", 1.0),
    Combination("medium", "none", "layer", 1.0, "quasi-hidden", "verify"),
    Combination("fast", "lru", "layer", 1.0),
    Combination("slow", "lru", "layer", 0.5),
    Combination("fast", "lru", "layer", 0.25),
    Combination("medium", "lru", "global", 0.4),
    Combination("medium", "lfu", "layer", 0.3),
    Combination("slow", "lfu-ageing", "layer", 0.5),
    Combination("fast", "random", "layer", 0.5),
    Combination("slow", "lru", "layer", 0.4, "quasi-hidden", "hint"),
    Combination("fast", "lru", "layer", 0.4, "quasi-hidden", "hint"),
    Combination("medium", "lfu-ageing", "layer", 0.4, "quasi-hidden", "verify"),
    Combination("medium", "lru", "layer", 0.4, "quasi-hidden", "commit"),
    Combination("medium", "lru", "global", 0.5, "previous-token", "hint"),
    Combination("medium", "lru", "layer", 0.4, "quasi-hidden", "hint", serial=True),
    Combination("slow", "lru", "layer", 0.4, cpu="misses"),
    Combination("medium", "lru", "layer", 0.5, cpu="4"),
)


@dataclass(frozen=True)
class LiveValidation:
    """What `validate_live` found.

    Attributes:
        hardware: the profile that predicted, with the error band of this validation.
        comparisons: one per combination.
        record: the same as a validation record.
    """

    hardware: HardwareProfile
    comparisons: tuple[Comparison, ...]
    record: ValidationRecord

    @property
    def errors(self) -> list[float]:
        """Absolute relative errors of TPOT at the machine's speed at the time."""
        return [abs(comparison.error_ratio) for comparison in self.comparisons]

    @property
    def run_errors(self) -> list[float]:
        """Absolute relative errors of TPOT as users see them, changes of the machine's speed included."""
        return [abs(comparison.run_error_ratio) for comparison in self.comparisons]

    @property
    def aims_met(self) -> bool:
        """Whether median and worst error are within what the project promises."""
        return median(self.errors) <= MEDIAN_AIM and max(self.errors) <= WORST_AIM

    @property
    def counts_wrong(self) -> list[Comparison]:
        """Comparisons whose counts differ although no race can decide them: a fault of ours."""
        return [c for c in self.comparisons if c.is_free_of_races and c.count_differences()]


def validate_live(
    loaded: LoadedModel,
    prompts: Sequence[str],
    *,
    command: str,
    step: Step,
    hardware: HardwareProfile | None = None,
    combinations: Sequence[Combination] = COMBINATIONS,
    max_new_tokens: int = 24,
    repeats: int = 3,
    seed: int = 0,
) -> LiveValidation:
    """Calibrate once, predict every combination, run each on the live engine, compare.

    Args:
        loaded: an untouched model.
        prompts: to calibrate on, and the first two to run.
        command: what to write into the record.
        step: announces steps, for progress.
        hardware: a profile calibrated with this model, instead of calibrating.
        combinations: rows of the grid.
        max_new_tokens: per prompt.
        repeats: live runs of each combination.
        seed: of sampling.

    Raises:
        ProfileError: `hardware` was not calibrated with this model.
    """
    if hardware is None:
        hardware = calibrate(
            loaded, " ".join(prompts), copy_to_compute_ratio=SLOW_RATIO, progress=step("calibrate this machine")
        )
    sampling = Sampling(temperature=0.8, seed=seed, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "validation.parquet"
        trace = capture(
            loaded,
            prompts[:2],
            out,
            max_new_tokens,
            sampling=sampling,
            predict="quasi-hidden",
            progress=step("capture routing"),
        )
        _check_profile(hardware, trace)
        vectors = vectors_beside(out)
        workload = Workload(
            trace, prompts[:2], max_new_tokens, sampling, vectors_path=vectors if vectors.is_file() else None
        )
        comparisons = predict_and_measure(
            loaded,
            workload,
            [combination.candidate(hardware) for combination in combinations],
            repeats=repeats,
            progress=step(f"run {len(combinations)} combinations {repeats} times"),
        )
    record = make_record(
        "live",
        [comparison.pair() for comparison in comparisons],
        command,
        versions=software_versions("torch", "transformers", "simpy", "numpy"),
        model=trace.shape.name,
        hardware=hardware.name,
        hardware_digest=hardware.digest,
        emulated=hardware.emulated,
    )
    with_band = hardware.model_copy(update={"error_band": record.band("any")})
    return LiveValidation(with_band, tuple(comparisons), record)


def _check_profile(hardware: HardwareProfile, trace: Trace) -> None:
    if hardware.measured is None or hardware.measured.model != trace.shape.name:
        raise ProfileError(
            f"hardware profile '{hardware.name}' was not calibrated with {trace.shape.name}, so there are no measured "
            "costs to validate; leave --hardware out, or calibrate with this model first"
        )
