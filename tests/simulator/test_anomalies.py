"""Where more of something is slower: with prefetch a greedy schedule has anomalies (Graham 1969), which no bug hides.

Each example was found by search or by hand and is pinned with its times. On-demand loading has none of them over the
link's rate (`test_invariants.py`), so whoever compares two machines should look at on-demand loading first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator import simulate
from simulator.policies.config import parse_config
from tests.simulator.builders import decode_trace, make_hardware, make_measured, make_shape
from trace_capture.run import Run
from trace_capture.trace import NO_EXPERT, Trace

FREE = {"decide_ns": 0.0, "decide_per_load_ns": 0.0, "predict_ns": 0.0, "pass_overhead_ns": (0.0,)}
WINDOW_NS = 1000
"""From the start of a layer's experts to the routing of the next layer: 700 for experts and 300 dense."""


def predicted(rows: list[list[list[int]]], guesses: list[list[int]], top_k: int) -> Trace:
    """Decode passes over two layers of four experts of 1000 bytes, with a guess for the second layer of each."""
    ids = np.asarray(rows, dtype=np.uint16)
    ids[:, 0] = NO_EXPERT
    ids[:, 1] = guesses
    return decode_trace(make_shape(layers=2, experts=4, top_k=top_k), rows, predicted=ids)


def run(trace: Trace, copy_ns: float, slots: int, **prefetch: Any) -> Run:
    table = {"cache": {"slots_per_layer": [slots] * 2}, "prefetch": {"source": "quasi-hidden"} | prefetch}
    hardware = make_hardware(1000 / copy_ns * 1e9, measured=make_measured(**FREE))
    return simulate(trace, hardware, parse_config(table), record_spans=True)


def test_faster_link_may_be_slower_by_beginning_a_copy_that_a_slower_one_withdraws() -> None:
    """Both guesses are wrong. At 1010 ns a copy the second is still queued when the router speaks, and is withdrawn;
    at 990 ns it has just begun, and all that is needed waits behind it."""
    trace = predicted([[[0, 1], [0, 1]]], [[2, 3]], top_k=2)
    slow, fast = run(trace, 1010, slots=4), run(trace, 990, slots=4)
    assert slow.token_ns.tolist() == [300 + 2 * 1010 + WINDOW_NS + 10 + 2 * 1010 + 700]
    assert fast.token_ns.tolist() == [300 + 2 * 990 + WINDOW_NS + 980 + 2 * 990 + 700]
    assert fast.token_ns.sum() > slow.token_ns.sum()
    assert (slow.metrics.prefetch_loads, fast.metrics.prefetch_loads) == (1, 2)


def test_more_room_may_be_slower_by_running_a_layer_in_two_waves() -> None:
    """Both guesses are wrong and go to their end. With two slots the layer waits for them, loads both of its experts
    into their places and runs once; with three it loads one at once and runs it, and only then finds room for the
    other, whose copy has lost the time of that run."""
    trace = predicted([[[3, 1], [0, 1]]], [[2, 3]], top_k=2)
    small, large = (run(trace, 1666, slots, mode="verify") for slots in (2, 3))
    assert small.token_ns.tolist() == [300 + 2 * 1666 + 4 * 1666 + 700]
    assert large.token_ns.tolist() == [300 + 2 * 1666 + 3 * 1666 + 700 + 1666 + 700]
    assert [sum(span.kind == "experts" for span in one.spans) for one in (small, large)] == [2, 3]


def test_better_predictor_may_be_slower_where_a_wrong_guess_is_asked_for_later() -> None:
    """Layer 1 asks for 0 and then for 1. Whoever guesses 1 first is wrong, and has it there when it is needed."""
    rows = [[[0], [0]], [[0], [1]]]
    worse = run(predicted(rows, [[1], [2]], top_k=1), 1500, slots=3)
    better = run(predicted(rows, [[0], [2]], top_k=1), 1500, slots=3)
    first = 300 + 1500 + WINDOW_NS  # the first token is at the router of layer 1, and the guess's copy has 500 to go
    assert worse.token_ns.tolist() == [first + 500 + 1500 + 700, 300 + WINDOW_NS + 700]
    assert better.token_ns.tolist() == [first + 500 + 700, 300 + WINDOW_NS + 500 + 1500 + 700]
    assert better.token_ns.sum() == worse.token_ns.sum() + 500
