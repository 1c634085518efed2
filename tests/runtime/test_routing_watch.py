"""A live run sums up the very routing that a capture of the same tokens records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.capture import capture
from runtime.measure import measure
from runtime.models import LoadedModel
from simulator.policies.config import parse_config
from simulator.routing_drift import RoutingWatch, routing_reference
from trace_capture.statistics import consecutive_overlap
from trace_capture.trace import Phase

PROMPTS = ["the night was dark", "the road was long and the river"]


def test_watch_and_capture_agree(loaded: LoadedModel, tmp_path: Path) -> None:
    trace = capture(loaded, PROMPTS, tmp_path / "t.parquet", 10)
    reference = routing_reference(trace)
    assert reference is not None
    watch = RoutingWatch(reference)
    config = parse_config({"cache": {"budget_ratio": 0.5}, "device": {"h2d_bytes_per_s": 1e10, "latency_ns": 0}})
    measure(loaded, PROMPTS, config, 10, watch=watch)
    drift = watch.drift()
    assert drift is not None and drift.prompts == 2
    decode = trace.rows(trace.phase == Phase.DECODE)
    assert drift.prompt_tokens == decode.num_tokens / 2
    shares = np.array(reference.shares())
    layers = np.arange(trace.shape.num_moe_layers)[None, :, None]
    assert drift.popularity == pytest.approx(shares[layers, decode.experts].mean())
    assert drift.overlap == pytest.approx(consecutive_overlap(decode).mean())
