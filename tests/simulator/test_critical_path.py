"""Parts of TPOT, parts of stalls, and the sentence that follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator import simulate
from simulator.cost_model import CostModel
from simulator.critical_path import critical_path, what_limits
from simulator.machine import Machine
from simulator.policies.config import OffloadConfig, parse_config
from simulator.policies.core import OffloadCore
from tests.simulator.builders import decode_trace, make_config, make_hardware, make_measured, make_shape, mixed_trace
from trace_capture.hardware import HardwareProfile
from trace_capture.known_shapes import known_shape
from trace_capture.run import Metrics, Run
from trace_capture.synthetic import synthetic_trace
from trace_capture.trace import NO_EXPERT, Trace

HARDWARE = make_hardware(latency_ns=137, issue_ns=53, wakeup_ns=71, launch_ns=211)


def configs() -> list[OffloadConfig]:
    plain = [make_config(policy, source, budget_bytes=20_000, serial=serial)
             for policy in ("none", "lru") for source in ("none", "previous-token", "quasi-hidden")
             for serial in (False, True)]  # fmt: skip
    modes = [{"source": "quasi-hidden", "mode": mode} for mode in ("verify", "commit")]
    return plain + [parse_config({"cache": {"budget_bytes": 20_000}, "prefetch": mode}) for mode in modes]


@pytest.mark.parametrize("config", configs(), ids=lambda config: f"{config.title} {config.device.serial}")
def test_parts_of_every_stall_add_up_to_the_nanosecond(config: OffloadConfig) -> None:
    trace = mixed_trace(make_shape(layers=5), seed=5)
    core = OffloadCore.from_config(config, trace.shape)
    costs = CostModel(HARDWARE, trace.shape)
    machine = Machine(trace, costs, core, serial=config.device.serial, explain=True)
    machine.run()
    assert sum(times.terms_ns["stall"] for times in machine.passes) > 0
    for times in machine.passes:
        assert sum(times.stall_ns.values()) == times.terms_ns["stall"]
    run = simulate(trace, HARDWARE, config)
    shares = critical_path(run.metrics)
    assert sum(share.ms for share in shares) == pytest.approx(run.metrics.tpot_ms, rel=1e-12)
    assert sum(share.ratio for share in shares) == pytest.approx(1, rel=1e-12)
    assert all(share.ms > 0 for share in shares)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_dense_layers_are_told_apart_and_add_up_to_the_nanosecond(name: str) -> None:
    shape = known_shape(name)
    trace = synthetic_trace(shape, 1, 3, 4, reuse_ratio=0.5, skew=0.5, predictor_recall=1.0, seed=0)
    config = make_config("lru", budget_bytes=shape.total_expert_bytes // 2)
    costs = CostModel(HardwareProfile.load(Path("a6000-pcie4x16")), shape)
    machine = Machine(trace, costs, OffloadCore.from_config(config, shape), explain=True)
    machine.run()
    for times in machine.passes:
        assert sum(times.dense_ns.values()) == times.terms_ns["dense"]
        assert set(times.dense_ns) == {"attention", "router", "shared", "launch"}
    run = simulate(trace, HardwareProfile.load(Path("a6000-pcie4x16")), config)
    shares = {share.name: share for share in critical_path(run.metrics)}
    assert shares["dense.attention"].ms > shares["dense.router"].ms > 0 and "dense" not in shares
    assert sum(share.ms for share in shares.values()) == pytest.approx(run.metrics.tpot_ms, rel=1e-12)


def two_layers(predicted: list[list[int]], hardware: HardwareProfile) -> Run:
    """One token, two layers of one expert each out of four: expert 1 in both; `predicted` for the second layer."""
    shape = make_shape(layers=2, experts=4, top_k=1, expert_bytes=1000, dense_bytes=(0, 0))
    column = [[[NO_EXPERT] * len(predicted[0]), predicted[0]]]
    trace: Trace = decode_trace(shape, [[[1], [1]]], predicted=_as_ids(column))
    return simulate(trace, hardware, make_config("lru", "quasi-hidden", budget_bytes=8000))


def _as_ids(column: list[list[list[int]]]) -> object:
    import numpy as np

    return np.asarray(column, dtype=np.uint16)


@pytest.mark.parametrize(
    ("predicted", "second_layer"),
    [
        ([1], {"late_prefetch": 900}),
        ([2], {"other_copies": 900, "demand": 1000}),
        ([2, 1], {"other_copies": 900, "late_prefetch": 1000}),
    ],
    ids=["right prefetch, late", "wrong prefetch that has begun", "right one queued behind a wrong one"],
)
def test_stalls_by_what_the_link_carried(predicted: list[int], second_layer: dict[str, int]) -> None:
    """Copies take 1,000 ns and experts 100. The first layer waits 1,000 ns on demand; the prefetch begins then, has
    run for 100 ns when the second layer is routed, and cannot be cut short."""
    measured = make_measured(dense_ns=(0.0,), experts_ns=(100.0,), pass_overhead_ns=(0.0,), decide_ns=0.0,
                             decide_per_load_ns=0.0, predict_ns=0.0)  # fmt: skip
    run = two_layers([predicted], make_hardware(measured=measured, wakeup_ns=0))
    expected = {"demand": 1000, "late_prefetch": 0, "other_copies": 0, "wakeup": 0}
    expected |= {name: value + (expected[name] if name == "demand" else 0) for name, value in second_layer.items()}
    assert {name: round(ms * 1e6) for name, ms in run.metrics.stall_parts_ms.items()} == expected
    waking = two_layers([predicted], make_hardware(measured=measured, wakeup_ns=7))
    assert round(waking.metrics.stall_parts_ms["wakeup"] * 1e6) == 14, "once per layer"


def test_sentence_for_a_slow_link_and_what_a_faster_one_really_saves() -> None:
    trace = mixed_trace(make_shape(), seed=1)
    for policy in ("none", "lru"):
        slow, fast = (
            simulate(
                trace,
                make_hardware(bytes_per_s=rate, issue_ns=20, launch_ns=50),
                make_config(policy, budget_bytes=20_000),
            )
            for rate in (1e8, 2e8)
        )
        metrics = slow.metrics
        stall_ms = metrics.tpot_terms_ms["stall"]
        sentence = what_limits(slow)
        assert sentence.startswith(
            f"The link is the limit: {100 * stall_ms / metrics.tpot_ms:.0f} % of {metrics.tpot_ms:.3g} ms"
        )
        assert (
            f"of {metrics.bytes_per_token / 1e3:.3g} kB ({metrics.bytes_per_token / 1e5:.3g} ms at 100.0 MB/s)"
            in sentence
        )
        assert f"a link twice as fast would save at most {metrics.link_busy_ms / 2:.3g} ms" in sentence
        saved_ms = metrics.tpot_ms - fast.metrics.tpot_ms
        assert 0 < saved_ms <= metrics.link_busy_ms / 2 * (1 + 1e-12)


def test_sentences_for_device_and_host() -> None:
    trace = mixed_trace(make_shape(), seed=1)
    config = make_config(budget_bytes=64_000)
    busy = simulate(trace, make_hardware(bytes_per_s=1e10, memory_bytes_per_s=1e7), config)
    device_ms = sum(share.ms for share in critical_path(busy.metrics) if share.resource == "device")
    assert what_limits(busy).startswith("The device is the limit: 100 % of ")
    assert f"a device twice as fast would save at most {device_ms / 2:.3g} ms" in what_limits(busy)
    host = make_hardware(measured=make_measured(decide_ns=90_000.0), bytes_per_s=1e12)
    text = what_limits(simulate(trace, host, config))
    assert text.startswith("The host is the limit: ") and "bookkeeping" in text


def test_records_without_terms_or_tokens_are_told() -> None:
    assert critical_path(Metrics()) == ()
    odd = Metrics(tpot_ms=10.0, tpot_terms_ms={"dense": 4.0, "stall": 3.0})
    shares = critical_path(odd)
    assert [share.name for share in shares] == ["dense", "stall", "unexplained"]
    assert shares[-1].ms == 3.0 and sum(share.ratio for share in shares) == pytest.approx(1)
