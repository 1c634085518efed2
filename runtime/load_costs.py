"""What loads and stalls cost beside the link's own time: layers that loaded, held against layers that did not.

Both kinds of layer are in every pass of a cached run, so a machine whose speed drifts between two runs, or within one,
does not look like a cost of stalling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from runtime.link import CopySpan
from runtime.measure import generate_offloaded
from runtime.models import LoadedModel, Sampling
from runtime.offloading import offloaded
from runtime.records import LayerTimes, PassRecord
from runtime.steadiness import around_passes, probed, steady_only
from simulator.policies.config import parse_config
from trace_capture.errors import ModelError

SPEEDS = (0.3, 1.0, 3.0, 8.0, 24.0)
"""Rates of the link at which stalls are measured, as multiples of the profile's, the slowest first."""
_TOKENS = 24


class LoadCosts(NamedTuple):
    """Costs of loads, stalls and predictions."""

    first_load_ns: float
    """Bookkeeping of a layer that loads anything, whatever the number: the link's thread is woken."""
    per_load_ns: float
    predict_ns: float
    stall_ns: tuple[float, ...]
    """Lengths of stalls at which `wakeup_ns` was measured, rising."""
    wakeup_ns: tuple[float, ...]
    """Time lost after a stall: the waiting thread goes on late, and what runs next finds cold caches."""
    bytes_per_s: float
    """What copies achieved: the median of their rates."""


class _Measured(NamedTuple):
    """One run: steady decode passes, and all copies."""

    passes: list[PassRecord]
    slowdown: float
    copies: list[CopySpan]


def measure_load_costs(
    loaded: LoadedModel,
    ids: Tensor,
    rate: float,
    latency_ns: int,
    *,
    reference_ns: float,
    vectors_path: Path | None,
) -> LoadCosts:
    """Decode with half of the experts cached at several rates, without a cache, and with predictions.

    Args:
        loaded: an untouched model.
        ids: [1, T] to continue.
        rate, latency_ns: of the link.
        reference_ns: of the fixed work in calibration (`runtime.steadiness`).
        vectors_path: default vectors.

    Raises:
        ModelError: `vectors_path` was given and is not there or does not fit.
    """
    prompt = ids[:, :4]
    cached = [
        _run(
            loaded, prompt, {"budget_ratio": 0.5}, rate * speed, latency_ns, reference_ns, repeats=1 if speed < 1 else 2
        )
        for speed in SPEEDS
    ]
    uncached = _run(loaded, prompt, {"policy": "none", "budget_ratio": 1.0}, rate, latency_ns, reference_ns)
    first_ns, per_load_ns = _deciding([*cached, uncached])
    points = sorted(point for run in cached if (point := _waking(run)) is not None)
    rates = [copy.num_bytes / max(1, copy.end_ns - copy.start_ns - latency_ns) for copy in uncached.copies]
    return LoadCosts(
        first_ns,
        per_load_ns,
        _measure_prediction(loaded, prompt, rate, latency_ns, reference_ns, vectors_path),
        tuple(stall for stall, _ in points),
        tuple(wakeup for _, wakeup in points),
        median(rates) * 1e9,
    )


def _run(
    loaded: LoadedModel,
    prompt: Tensor,
    cache: dict[str, Any],
    rate: float,
    latency_ns: int,
    reference_ns: float,
    *,
    repeats: int = 1,
    vectors_path: Path | None = None,
    source: str = "none",
) -> _Measured:
    device = {"h2d_bytes_per_s": rate, "latency_ns": latency_ns}
    config = parse_config({"cache": cache, "prefetch": {"source": source}, "device": device})
    with offloaded(loaded.model, config, default_vectors=vectors_path) as engine, probed(loaded.model) as seen:
        engine.link.spans, engine.link.times_parts = [], True
        for _ in range(repeats):
            generate_offloaded(engine, loaded, prompt, _TOKENS, Sampling(ignore_eos=True))
        pairs = zip(engine.passes, around_passes(seen), strict=True)
        decode = [(record, probes) for record, probes in pairs if not record.is_prefill]
        return _Measured(*steady_only(decode, reference_ns), engine.link.spans)


def _deciding(runs: Sequence[_Measured]) -> tuple[float, float]:
    """Bookkeeping once per layer that loads, and per load, from the medians by number of loads; beside the layers
    without loads of the same runs."""
    by_loads: dict[int, list[float]] = {}
    for run in runs:
        for record in run.passes:
            for times in record.layers:
                by_loads.setdefault(times.num_loads, []).append((times.decided_ns - times.entered_ns) / run.slowdown)
    idle_ns = median(by_loads.pop(0, [0]))
    counts = np.array(sorted(by_loads), dtype=np.float64)
    if not len(counts):
        return 0.0, 0.0
    extra_ns = np.array([median(by_loads[int(count)]) - idle_ns for count in counts])
    weights = np.sqrt([len(by_loads[int(count)]) for count in counts])
    if len(counts) == 1:
        return 0.0, max(0.0, float(extra_ns[0] / counts[0]))
    slope, base = np.polyfit(counts, extra_ns, 1, w=weights)
    return max(0.0, float(base)), max(0.0, float(slope))


def _waking(run: _Measured) -> tuple[float, float] | None:
    """Length of a stall and time lost after it: the mean over stalled layers beside the mean over the others of the
    same pass, and of that the median over passes. None where no pass has both."""
    ends: dict[int, list[int]] = {}
    for copy in run.copies:
        ends.setdefault(copy.key[0], []).append(copy.end_ns)
    stalls, lost = [], []
    for record in run.passes:
        stalled: list[tuple[int, int]] = []
        free: list[int] = []
        for layer, times, compute_ns in _compute(record):
            if not times.num_loads:
                free.append(compute_ns)
                continue
            last_end_ns = max(end for end in ends[layer] if end <= times.landed_ns)
            stalled.append((last_end_ns - times.submitted_ns, compute_ns + times.landed_ns - last_end_ns))
        if free and stalled:
            stalls.append(fmean(stall for stall, _ in stalled))
            lost.append(fmean(after for _, after in stalled) - fmean(free))
    if not stalls or median(stalls) <= 0:
        return None
    return median(stalls), max(0.0, median(lost)) / run.slowdown


def _compute(record: PassRecord) -> Iterator[tuple[int, LayerTimes, int]]:
    """Layer, its times, and the time of its experts and of the dense part after them; the last has none after it."""
    for layer, (times, following) in enumerate(zip(record.layers, record.layers[1:], strict=False)):
        yield layer, times, times.done_ns - times.landed_ns + following.entered_ns - times.done_ns


def _measure_prediction(
    loaded: LoadedModel, prompt: Tensor, rate: float, latency_ns: int, reference_ns: float, vectors_path: Path | None
) -> float:
    """One prediction of the next layer's experts; 0 for a model without default vectors."""
    cache = {"budget_ratio": 1.0}
    try:
        run = _run(
            loaded, prompt, cache, rate, latency_ns, reference_ns, vectors_path=vectors_path, source="quasi-hidden"
        )
    except ModelError:
        if vectors_path is not None:
            raise
        return 0.0
    spans_ns = [t.predicted_ns - t.decided_ns for record in run.passes[1:] for t in record.layers[:-1]]
    return fmean(spans_ns) / run.slowdown
