"""Predicted beside measured: a configuration replayed on a trace, and run live on the prompts that made the trace.

`calibrate`'s self-check, `validate --live` and the demonstration all compare by this code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from runtime.measure import measure
from runtime.models import LoadedModel, Sampling
from runtime.speculative import Drafting
from runtime.steadiness import Probes
from simulator.policies.config import OffloadConfig
from simulator.replay import simulate
from simulator.validation.families import strategy_family
from simulator.validation.record import Family, Pair
from trace_capture.errors import TraceError
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Run
from trace_capture.trace import Trace

Progress = Callable[[int, int], None]
Step = Callable[[str], Progress]
Candidate = tuple[OffloadConfig, HardwareProfile]
_SPEED_STEPS = 4
"""Speeds between the fastest and the slowest seen at which a candidate is replayed, to interpolate between."""
EXACT_COUNTS = ("prefill_tokens", "decode_tokens", "lookups", "hits", "loads", "evictions", "bytes_loaded")
"""Figures of a run that the simulator gets exactly wherever no race decides."""


@dataclass(frozen=True)
class Workload:
    """Prompts, the trace that a capture made of them, and what makes the same tokens again.

    Attributes:
        trace: of exactly these prompts.
        prompts, max_new_tokens, sampling: as they were captured.
        first_sequence: number of the first prompt in the capture, which shifts its seed.
        vectors_path: default vectors that the capture used, where they are not beside the model.
        drafting: how the capture drafted, if it did.
    """

    trace: Trace
    prompts: Sequence[str]
    max_new_tokens: int
    sampling: Sampling
    first_sequence: int = 0
    vectors_path: Path | None = None
    drafting: Drafting | None = None


@dataclass(frozen=True)
class Comparison:
    """One configuration, predicted once and measured some times with the same tokens.

    Attributes:
        predicted: by replay on the profile as it is.
        measured: live runs.
        family: strategy family.
        at_speed_ns: every decode pass of every run as predicted for the speed that the machine had around that pass
            (`runtime.steadiness`), float [runs, decode passes].
        slowdown: how many times longer work took around the pass than in calibration, [runs, decode passes].
        steady: whether the machine held its speed during the pass, bool [runs, decode passes].
    """

    predicted: Run
    measured: tuple[Run, ...]
    family: Family
    at_speed_ns: npt.NDArray[np.float64]
    slowdown: npt.NDArray[np.float64]
    steady: npt.NDArray[np.bool_]

    @property
    def config(self) -> OffloadConfig:
        """What was predicted and run."""
        return OffloadConfig.model_validate(self.predicted.info.config)

    @property
    def predicted_tpot_ms(self) -> float:
        """Time per output token as predicted for the machine's speed at the time of the runs."""
        return self._compared_ms[0]

    @property
    def measured_tpot_ms(self) -> float:
        """Measured time per output token: of every pass the run in which measured over predicted is the median, among
        those during which the machine held its speed; then the mean over passes."""
        return self._compared_ms[1]

    @property
    def run_tpot_ms(self) -> float:
        """Time per output token of the runs as they were: the median of their means."""
        return median(run.metrics.tpot_ms for run in self.measured)

    @cached_property
    def _compared_ms(self) -> tuple[float, float]:
        """Predicted and measured over the same passes of the same runs."""
        measured_ns = np.array([run.token_ns for run in self.measured], dtype=np.float64)
        predicted_sum = measured_sum = 0.0
        passes = 0
        for number in range(measured_ns.shape[1]):
            runs = np.flatnonzero(self.steady[:, number])
            if not len(runs):
                continue
            ratios = measured_ns[runs, number] / self.at_speed_ns[runs, number]
            chosen = runs[np.argsort(ratios, kind="stable")[(len(runs) - 1) // 2]]
            predicted_sum += self.at_speed_ns[chosen, number]
            measured_sum += measured_ns[chosen, number]
            passes += 1
        if not passes:
            return float(self.at_speed_ns.mean()) / 1e6, float(measured_ns.mean()) / 1e6
        scale = measured_ns.shape[1] / passes / self.measured[0].metrics.decode_tokens / 1e6
        return predicted_sum * scale, measured_sum * scale

    @property
    def measured_ttft_ms(self) -> float:
        """Time to first token: the median over repetitions."""
        return median(run.metrics.ttft_ms for run in self.measured)

    @property
    def error_ratio(self) -> float:
        """Predicted over measured TPOT, less one, both at the speed of the machine at the time."""
        return self.predicted_tpot_ms / self.measured_tpot_ms - 1

    @property
    def run_error_ratio(self) -> float:
        """The same as a user sees it: the prediction of the profile as it is over the runs as they were."""
        return self.predicted.metrics.tpot_ms / self.run_tpot_ms - 1

    @property
    def ttft_error_ratio(self) -> float:
        """Predicted over measured TTFT, less one."""
        return self.predicted.metrics.ttft_ms / self.measured_ttft_ms - 1

    @property
    def is_free_of_races(self) -> bool:
        """Whether no decision can depend on when a copy lands, so that counts must be equal: nothing is loaded that is
        not waited for, or everything is; and every layer runs what its router chose."""
        config = self.config
        prefetch, cpu = config.prefetch, config.cpu
        modes = {prefetch.mode} if isinstance(prefetch.mode, str) else set(prefetch.mode)
        loads_ahead = prefetch.source != "none" or (cpu.policy != "none" and cpu.admissions > 0)
        return not loads_ahead or (config.device.serial and "commit" not in modes)

    def count_differences(self) -> dict[str, tuple[int, list[int]]]:
        """Counts that differ in some repetition: name -> (predicted, measured)."""
        result = {}
        for name in EXACT_COUNTS:
            expected = getattr(self.predicted.metrics, name)
            found = [getattr(run.metrics, name) for run in self.measured]
            if any(value != expected for value in found):
                result[name] = (expected, found)
        return result

    def pair(self) -> Pair:
        """The comparison as a row of a validation record."""
        predicted, first = self.predicted.metrics, self.measured[0].metrics
        each_ms = [run.metrics.tpot_ms for run in self.measured]
        return Pair(
            id=self.predicted.info.label,
            family=self.family,
            predicted_ms=predicted.tpot_ms,
            measured_ms=self.run_tpot_ms,
            details={
                "error_ratio": self.run_error_ratio,
                "measured_each_ms": each_ms,
                "at_speed_predicted_ms": self.predicted_tpot_ms,
                "at_speed_measured_ms": self.measured_tpot_ms,
                "at_speed_error_ratio": self.error_ratio,
                "slowdown": float(self.slowdown.mean()),
                "steady_ratio": float(self.steady.mean()),
                "predicted_ttft_ms": predicted.ttft_ms,
                "measured_ttft_ms": self.measured_ttft_ms,
                "predicted_terms_ms": predicted.tpot_terms_ms,
                "measured_terms_ms": self.measured_terms_ms(),
                "counts_predicted": {name: getattr(predicted, name) for name in EXACT_COUNTS},
                "counts_measured": {name: getattr(first, name) for name in EXACT_COUNTS},
                "is_free_of_races": self.is_free_of_races,
                "count_differences": self.count_differences(),
                "trace_digest": self.predicted.info.trace_digest,
                "config": self.predicted.info.config,
            },
        )

    def measured_terms_ms(self) -> dict[str, float]:
        """Parts of the measured TPOT: the median over repetitions of each, so their sum is near the TPOT."""
        names = self.measured[0].metrics.tpot_terms_ms
        return {name: median(run.metrics.tpot_terms_ms[name] for run in self.measured) for name in names}


def predict_and_measure(
    loaded: LoadedModel,
    workload: Workload,
    candidates: Sequence[Candidate],
    *,
    repeats: int = 1,
    record_spans: bool = False,
    progress: Progress | None = None,
    step: Step | None = None,
) -> list[Comparison]:
    """Replay every candidate on the workload's trace, then run it live.

    Repetitions are interleaved, all candidates once per round and every other round backwards, so that a machine that
    drifts does so for all of them.

    Args:
        loaded: an untouched model.
        workload: what to predict and run.
        candidates: each with the profile that predicts it; the emulated link takes the configuration's rate.
        repeats: live runs of each.
        record_spans: keep timelines of both.
        progress: called with (live runs done, in all).
        step: instead, announces every live run, which then reports its prompts.

    Raises:
        TraceError: the live run makes other tokens than the trace has.
    """
    trace = workload.trace
    predicted = [simulate(trace, hardware, config, record_spans=record_spans) for config, hardware in candidates]
    measured: list[list[tuple[Run, list[Probes]]]] = [[] for _ in candidates]
    done = 0
    for repeat in range(repeats):
        order = range(len(candidates))
        for number in order if repeat % 2 == 0 else reversed(order):
            measured[number].append(
                _run_live(loaded, workload, candidates[number], predicted[number], record_spans, step)
            )
            done += 1
            if progress is not None:
                progress(done, repeats * len(candidates))
    return [
        _compare(trace, candidate, before, after)
        for candidate, before, after in zip(candidates, predicted, measured, strict=True)
    ]


def _compare(
    trace: Trace, candidate: Candidate, predicted: Run, measured: Sequence[tuple[Run, list[Probes]]]
) -> Comparison:
    config, hardware = candidate
    reference_ns = hardware.measured.probe_ns if hardware.measured else 0.0
    slowdown = np.array([[each.slowdown(reference_ns) for each in probes] for _, probes in measured])
    at_speed_ns = np.repeat(predicted.token_ns[None].astype(np.float64), len(measured), axis=0)
    if hardware.measured is not None and reference_ns > 0:
        speeds = np.linspace(slowdown.min(), slowdown.max(), _SPEED_STEPS)
        costs = [hardware.model_copy(update={"measured": hardware.measured.slowed(speed)}) for speed in speeds]
        passes_ns = np.array([simulate(trace, slowed, config, bounds=False).token_ns for slowed in costs])
        for number in range(passes_ns.shape[1]):
            at_speed_ns[:, number] = np.interp(slowdown[:, number], speeds, passes_ns[:, number])
    steady = np.array([[each.is_steady for each in probes] for _, probes in measured])
    family = strategy_family(config, trace.shape)
    return Comparison(predicted, tuple(run for run, _ in measured), family, at_speed_ns, slowdown, steady)


def _run_live(
    loaded: LoadedModel,
    workload: Workload,
    candidate: Candidate,
    predicted: Run,
    record_spans: bool,
    step: Step | None,
) -> tuple[Run, list[Probes]]:
    """One live run, and the machine's speed around its decode passes."""
    config, hardware = candidate
    probes: list[Probes] = []
    run = measure(
        loaded,
        workload.prompts,
        config,
        workload.max_new_tokens,
        sampling=workload.sampling,
        drafting=workload.drafting,
        first_sequence=workload.first_sequence,
        hardware=hardware,
        trace_digest=workload.trace.digest,
        vectors_path=workload.vectors_path,
        record_spans=record_spans,
        probes=probes,
        progress=step(f"run: {config.title}") if step else None,
    )
    if len(run.token_ns) != len(predicted.token_ns):
        raise TraceError(
            f"the live run of '{config.title}' made {len(run.token_ns)} decode passes and its trace has "
            f"{len(predicted.token_ns)}; capture the very prompts, seed and length that are run"
        )
    return run, probes
