"""Predicted beside measured: a configuration replayed on a trace, and run live on the prompts that made the trace.

`calibrate`'s self-check, `validate --live` and the demonstration all compare by this code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.measure import measure
from runtime.models import LoadedModel, Sampling
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
MIN_COVERAGE, ENOUGH_COVERAGE = 0.25, 0.5
"""Share of passes with an undisturbed run below which all runs count, and from which no further run is needed."""
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
    """

    trace: Trace
    prompts: Sequence[str]
    max_new_tokens: int
    sampling: Sampling
    first_sequence: int = 0
    vectors_path: Path | None = None


@dataclass(frozen=True)
class Comparison:
    """One configuration, predicted once and measured some times with the same tokens.

    Attributes:
        predicted: by replay.
        measured: live runs.
        family: strategy family.
        steady: which decode passes ran on an undisturbed machine, bool [runs, decode passes].
    """

    predicted: Run
    measured: tuple[Run, ...]
    family: Family
    steady: npt.NDArray[np.bool_]

    @property
    def config(self) -> OffloadConfig:
        """What was predicted and run."""
        return OffloadConfig.model_validate(self.predicted.info.config)

    @property
    def is_disturbed(self) -> bool:
        """Whether so few passes ran undisturbed that all runs of all passes are compared."""
        return steady_coverage(self.steady) < MIN_COVERAGE

    @cached_property
    def compared(self) -> npt.NDArray[np.bool_]:
        """Which decode passes are compared: those that ran undisturbed in some run; all where those are too few."""
        covered: npt.NDArray[np.bool_] = np.any(self.steady, axis=0, keepdims=True)[0]
        return np.ones_like(covered) if self.is_disturbed else covered

    @property
    def predicted_tpot_ms(self) -> float:
        """Predicted time per output token over the compared passes."""
        return self._per_token_ms(self.predicted.token_ns)

    @cached_property
    def measured_tpot_ms(self) -> float:
        """Measured time per output token over the compared passes: of every pass the median over the runs in which it
        was undisturbed, then the mean over passes."""
        all_ns = np.array([run.token_ns for run in self.measured], dtype=np.float64)
        if self.is_disturbed:
            return self._per_token_ms(np.median(all_ns, axis=0))
        all_ns[~self.steady] = np.nan
        median_ns = np.zeros(all_ns.shape[1])
        median_ns[self.compared] = np.nanmedian(all_ns[:, self.compared], axis=0)
        return self._per_token_ms(median_ns)

    def _per_token_ms(self, pass_ns: npt.NDArray[Any]) -> float:
        tokens_per_pass = self.measured[0].metrics.decode_tokens / len(pass_ns)
        return float(pass_ns[self.compared].mean()) / tokens_per_pass / 1e6

    @property
    def measured_ttft_ms(self) -> float:
        """Time to first token: the median over repetitions."""
        return median(run.metrics.ttft_ms for run in self.measured)

    @property
    def error_ratio(self) -> float:
        """Predicted over measured TPOT, less one."""
        return self.predicted_tpot_ms / self.measured_tpot_ms - 1

    @property
    def run_error_ratio(self) -> float:
        """The same over all passes of the first run, disturbed or not."""
        return self.predicted.metrics.tpot_ms / self.measured[0].metrics.tpot_ms - 1

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
            predicted_ms=self.predicted_tpot_ms,
            measured_ms=self.measured_tpot_ms,
            details={
                "error_ratio": self.error_ratio,
                "is_disturbed": self.is_disturbed,
                "compared_ratio": float(self.compared.mean()),
                "undisturbed_ratio": float(self.steady.mean()),
                "predicted_all_passes_ms": predicted.tpot_ms,
                "measured_all_passes_ms": each_ms,
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


def steady_coverage(steady: npt.NDArray[np.bool_]) -> float:
    """Share of passes that ran undisturbed in at least one run; `steady` is [runs, passes]."""
    return float(np.logical_or.reduce(steady).mean())


def predict_and_measure(
    loaded: LoadedModel,
    workload: Workload,
    candidates: Sequence[tuple[OffloadConfig, HardwareProfile]],
    *,
    repeats: int = 1,
    more_repeats: int = 0,
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
        more_repeats: at most so many further rounds, of the candidates with too few undisturbed passes.
        record_spans: keep timelines of both.
        progress: called with (live runs done, in all).
        step: instead, announces every live run, which then reports its prompts.

    Raises:
        TraceError: the live run makes other tokens than the trace has.
    """
    predicted = [
        simulate(workload.trace, hardware, config, record_spans=record_spans) for config, hardware in candidates
    ]
    measured: list[list[Run]] = [[] for _ in candidates]
    steady: list[list[list[bool]]] = [[] for _ in candidates]
    done, total = 0, repeats * len(candidates)
    for repeat in range(repeats + more_repeats):
        order = [
            number
            for number in range(len(candidates))
            if repeat < repeats or steady_coverage(np.array(steady[number])) < ENOUGH_COVERAGE
        ]
        total += 0 if repeat < repeats else len(order)
        for number in order if repeat % 2 == 0 else reversed(order):
            run, flags = _run_live(loaded, workload, candidates[number], predicted[number], record_spans, step)
            measured[number].append(run)
            steady[number].append(flags)
            done += 1
            if progress is not None:
                progress(done, total)
    return [
        Comparison(before, tuple(after), strategy_family(config, workload.trace.shape), np.array(flags, dtype=np.bool_))
        for before, after, flags, (config, _) in zip(predicted, measured, steady, candidates, strict=True)
    ]


def _run_live(
    loaded: LoadedModel,
    workload: Workload,
    candidate: tuple[OffloadConfig, HardwareProfile],
    predicted: Run,
    record_spans: bool,
    step: Step | None,
) -> tuple[Run, list[bool]]:
    """One live run, and which of its decode passes ran on an undisturbed machine."""
    config, hardware = candidate
    probes: list[Probes] = []
    run = measure(
        loaded,
        workload.prompts,
        config,
        workload.max_new_tokens,
        sampling=workload.sampling,
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
    reference_ns = hardware.measured.probe_ns if hardware.measured else 0.0
    return run, [each.are_steady(reference_ns) for each in probes]
