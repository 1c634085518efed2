"""What a prefetch policy is told in a replay: the ids of a predictor in the trace, or those of an oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from simulator.pass_reader import PassReader
from simulator.policies.prefetch import Oracle, PrefetchPolicy
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Pass, Phase, Trace

Predict = Callable[[Pass], list[list[int]]]
"""Predicted experts of every layer of a pass [L]; empty where nothing is predicted, as in a prefill."""


def predictions_of(trace: Trace, policy: PrefetchPolicy) -> Predict:
    """Where the predictions of a replay come from.

    Raises:
        TraceError: the trace lacks the predictions that the policy needs.
    """
    source = policy.prediction
    if source is None:
        return lambda _: []
    if isinstance(policy, Oracle):
        oracle, routed = policy, PassReader(trace)
        return lambda item: [] if item.phase == Phase.PREFILL else _foreseen(trace, item, routed(item), oracle)
    predicted = PassReader(trace, source)
    return lambda item: [] if item.phase == Phase.PREFILL else predicted.read(item)


def _foreseen(trace: Trace, item: Pass, routed: list[list[int]], oracle: Oracle) -> list[list[int]]:
    """The truth with mistakes, a pure function of seed and pass; nobody foresees the first layer."""
    if oracle.recall >= 1:
        return [[], *routed[1:]]
    source = random.Random(f"{oracle.seed}/{item.pass_id}")
    return [[], *(_with_mistakes(experts, oracle.recall, trace.shape, source) for experts in routed[1:])]


def _with_mistakes(experts: Sequence[int], recall: float, shape: ModelShape, source: random.Random) -> list[int]:
    """Each expert with probability `recall`, else one that the layer does not ask for, where there is one left.

    Draws the same numbers whatever the recall is, so what a lower recall foresees is part of what a higher one does.
    """
    others = shape.num_experts - len(experts)
    wrong = source.sample(range(others), min(len(experts), others))
    rising = sorted(experts)
    result: list[int] = []
    for place, expert in enumerate(experts):
        if source.random() < recall:
            result.append(expert)
        elif place < len(wrong):
            result.append(_absent(wrong[place], rising))
    return result


def _absent(place: int, experts: Sequence[int]) -> int:
    """The expert at a place of those that are not in `experts`, which rise."""
    for expert in experts:
        if place >= expert:
            place += 1
    return place
