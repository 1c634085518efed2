"""How well a utility signal tells, before a pass, which experts that pass will make hot.

Hot is stated by MoE-SpAc (arXiv 2603.09983) without a definition; here an expert is hot in a pass when at least
`hot_frequency` of its tokens use it, and is called hot when its state has reached `hot_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.policies.utility import UtilitySignal, activation_frequency, make_utility_signal
from trace_capture.errors import TraceError
from trace_capture.statistics import GENERATING
from trace_capture.trace import NO_EXPERT, Trace

Counts = npt.NDArray[np.int64]


class Forecasts(NamedTuple):
    """What was foreseen and what came, for every layer and pass but the first of a sequence.

    Attributes:
        states: of each expert before the pass, int64 [L, N, E].
        frequencies: tokens of the pass that used it, int64 [L, N, E].
    """

    states: Counts
    frequencies: Counts


@dataclass(frozen=True)
class ForecastQuality:
    """How often 'hot in the next pass' was right.

    Attributes:
        accuracy_ratio: share of all (pass, layer, expert) that were called right, hot or cold.
        precision_ratio: share of those called hot that were; nan where none was called.
        recall_ratio: share of the hot that were called; nan where none was hot.
        hot_ratio: share of all that were hot; calling everything cold would be right on the rest.
    """

    accuracy_ratio: float
    precision_ratio: float
    recall_ratio: float
    hot_ratio: float

    @property
    def f1_ratio(self) -> float:
        """Harmonic mean of precision and recall; 0 where nothing was called or hot."""
        total = self.precision_ratio + self.recall_ratio
        return 2 * self.precision_ratio * self.recall_ratio / total if total > 0 else 0.0


def collect_forecasts(trace: Trace, make_signal: Callable[[], UtilitySignal]) -> Forecasts:
    """Run a signal over the decode and verify passes of a trace; each sequence starts with a fresh one.

    Raises:
        TraceError: no sequence has two such passes.
    """
    layers, num_experts = trace.shape.num_moe_layers, trace.shape.num_experts
    states: list[Counts] = []
    frequencies: list[Counts] = []
    sequence, signal = None, make_signal()
    for item in trace.passes:
        if item.phase not in GENERATING:
            continue
        ids = trace.experts[item.start : item.stop]
        if item.sequence != sequence:
            sequence, signal = item.sequence, make_signal()
        else:
            states.append(signal.states.astype(np.int64))
            frequencies.append(np.stack([activation_frequency(ids[:, layer], num_experts) for layer in range(layers)]))
        seen = ids if signal.sees_drafts else ids[trace.accepted[item.start : item.stop]]
        for layer in range(layers):
            if ids[0, layer, 0] != NO_EXPERT:
                signal.observe(layer, seen[:, layer])
    if not states:
        raise TraceError("the trace has no sequence with two decode or verify passes, so nothing can be foreseen in it")
    return Forecasts(np.stack(states, axis=1), np.stack(frequencies, axis=1))


def forecast_quality(forecasts: Forecasts, hot_frequency: int = 1, hot_state: int = 1) -> ForecastQuality:
    """Accuracy, precision and recall of 'hot in the next pass' over all layers.

    Args:
        forecasts: of `collect_forecasts`; slice its arrays for one layer.
        hot_frequency: an expert is hot when at least so many tokens of the pass use it.
        hot_state: it is called hot from this state on.
    """
    called, hot = forecasts.states >= hot_state, forecasts.frequencies >= hot_frequency
    right = int((called & hot).sum())
    return ForecastQuality(
        accuracy_ratio=float((called == hot).mean()),
        precision_ratio=_ratio(right, int(called.sum())),
        recall_ratio=_ratio(right, int(hot.sum())),
        hot_ratio=float(hot.mean()),
    )


def compare_signals(trace: Trace, gamma: int, capacity: int, hot_frequency: int = 1) -> dict[str, ForecastQuality]:
    """The quality of every signal and rule on one trace, by name; each is called hot from the state that suits it best.

    Args:
        trace: with verify passes of up to gamma drafts, captured or of `trace_capture.rewindow`.
        gamma: drafts per pass.
        capacity: experts that each layer has room for, which one of the rules looks at.
        hot_frequency: an expert is hot when at least so many tokens of a pass use it.
    """
    shape = trace.shape
    kinds = [("speculative", rule) for rule in ("fixed", "fluctuation", "capacity")]
    kinds += [("autoregressive", "fixed"), ("recency", "fixed")]
    result = {}
    for name, rule in kinds:

        def make(name: str = name, rule: str = rule) -> UtilitySignal:
            return make_utility_signal(name, rule, shape.num_experts, gamma, (capacity,) * shape.num_moe_layers)

        forecasts = collect_forecasts(trace, make)
        options = [forecast_quality(forecasts, hot_frequency, state) for state in range(1, make().top + 1)]
        label = f"{name} ({rule})" if name == "speculative" else name
        result[label] = max(options, key=lambda quality: quality.f1_ratio)
    return result


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
