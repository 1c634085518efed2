"""`PassReader` gives what `Trace.pass_experts` gives, whatever the order and the rows."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from simulator.pass_reader import PassReader
from tests.simulator.builders import make_shape, mixed_trace
from trace_capture.errors import TraceError
from trace_capture.trace import NO_EXPERT, Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    """More decode passes than a block holds, with prefills and verify passes between; the predictor gives the same
    expert twice in some layers and nothing in some rows, which only a trace made by hand does."""
    plain = mixed_trace(make_shape(layers=3), seed=5, sequences=2, decode=160)
    predicted = plain.predicted["quasi-hidden"].copy()
    predicted[100:103, 1, 2] = predicted[100:103, 1, 0]
    predicted[40, 2] = NO_EXPERT
    experts = plain.experts.copy()
    experts[::7, 2, 0] = experts[::7, 2, 1]
    return replace(plain, experts=experts, predicted={"quasi-hidden": predicted})


@pytest.mark.parametrize("source", [None, "quasi-hidden"])
def test_passes_are_those_of_the_trace_in_order_and_out_of_order(trace: Trace, source: str | None) -> None:
    expected = [trace.pass_experts(item, source) for item in trace.passes]
    assert any(len(set(map(len, layers))) > 1 for layers in expected), "some layers have fewer distinct experts"
    reader = PassReader(trace, source)
    assert [reader(item) for item in trace.passes] == expected
    shuffled = random.Random(1).sample(range(len(expected)), len(expected))
    assert [reader(trace.passes[place]) for place in shuffled] == [expected[place] for place in shuffled]


def test_ids_stay_as_they_are(trace: Trace) -> None:
    before = np.array(trace.experts)
    for item in trace.passes:
        PassReader(trace)(item)
    assert (trace.experts == before).all()


def test_unknown_predictor_is_refused(trace: Trace) -> None:
    with pytest.raises(TraceError, match="no predictions of 'oracle'"):
        PassReader(trace, "oracle")
