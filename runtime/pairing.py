"""Predicted beside measured: a configuration replayed on a trace, and run live on the prompts that made the trace.

`calibrate`'s self-check, `validate --live` and the demonstration all compare by this code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from runtime.measure import measure
from runtime.models import LoadedModel, Sampling
from simulator.policies.config import OffloadConfig
from simulator.replay import simulate
from simulator.validation.families import strategy_family
from simulator.validation.record import Family, Pair
from trace_capture.errors import TraceError
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Run
from trace_capture.trace import Trace

Progress = Callable[[int, int], None]
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
    """One configuration, predicted once and measured some times with the same tokens."""

    predicted: Run
    measured: tuple[Run, ...]
    family: Family

    @property
    def config(self) -> OffloadConfig:
        """What was predicted and run."""
        return OffloadConfig.model_validate(self.predicted.info.config)

    @property
    def measured_tpot_ms(self) -> float:
        """Time per output token: the median over repetitions of every decode pass, then the mean over passes.

        Whatever else the machine did in one repetition falls out pass by pass; passes that are slow each time stay.
        """
        passes_ns = np.median([run.token_ns for run in self.measured], axis=0)
        return float(passes_ns.sum()) / self.measured[0].metrics.decode_tokens / 1e6

    @property
    def measured_ttft_ms(self) -> float:
        """Time to first token: the median over repetitions."""
        return median(run.metrics.ttft_ms for run in self.measured)

    @property
    def error_ratio(self) -> float:
        """Predicted over measured TPOT, less one."""
        return self.predicted.metrics.tpot_ms / self.measured_tpot_ms - 1

    @property
    def ttft_error_ratio(self) -> float:
        """Predicted over measured TTFT, less one."""
        return self.predicted.metrics.ttft_ms / self.measured_ttft_ms - 1

    @property
    def is_free_of_races(self) -> bool:
        """Whether no decision can depend on when a copy lands, so that counts must be equal: nothing is loaded that is
        not waited for, or everything is; and every layer runs what its router chose."""
        config = self.config
        prefetch = config.prefetch
        modes = {prefetch.mode} if isinstance(prefetch.mode, str) else set(prefetch.mode)
        is_ahead = prefetch.source != "none" or (config.cpu.policy != "none" and config.cpu.admissions > 0)
        return not is_ahead or (config.device.serial and "commit" not in modes)

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
            measured_ms=self.measured_tpot_ms,
            details={
                "error_ratio": self.error_ratio,
                "measured_each_ms": each_ms,
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
    candidates: Sequence[tuple[OffloadConfig, HardwareProfile]],
    *,
    repeats: int = 1,
    record_spans: bool = False,
    progress: Progress | None = None,
    steps: Sequence[Progress | None] = (),
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
        steps: instead, one reporter per candidate, called with (prompts done, prompts in all); for one repetition.

    Raises:
        TraceError: the live run makes other tokens than the trace has.
    """
    trace = workload.trace
    predicted = [simulate(trace, hardware, config, record_spans=record_spans) for config, hardware in candidates]
    measured: list[list[Run]] = [[] for _ in candidates]
    done = 0
    for repeat in range(repeats):
        order = range(len(candidates))
        for number in order if repeat % 2 == 0 else reversed(order):
            config, hardware = candidates[number]
            run = measure(
                loaded,
                workload.prompts,
                config,
                workload.max_new_tokens,
                sampling=workload.sampling,
                first_sequence=workload.first_sequence,
                hardware=hardware,
                trace_digest=trace.digest,
                vectors_path=workload.vectors_path,
                record_spans=record_spans,
                progress=steps[number] if steps else None,
            )
            if len(run.token_ns) != len(predicted[number].token_ns):
                raise TraceError(
                    f"the live run of '{config.title}' made {len(run.token_ns)} decode passes and its trace has "
                    f"{len(predicted[number].token_ns)}; capture the very prompts, seed and length that are run"
                )
            measured[number].append(run)
            done += 1
            if progress is not None:
                progress(done, repeats * len(candidates))
    return [
        Comparison(before, tuple(after), strategy_family(config, trace.shape))
        for before, after, (config, _) in zip(predicted, measured, candidates, strict=True)
    ]
