"""The cost model laid open: terms, how often they are due, and where their numbers come from."""

from __future__ import annotations

import pytest

from simulator.cost_model import CostModel
from simulator.costs.listing import headlines, memory_need, term_costs
from tests.simulator.builders import make_hardware, make_measured, make_shape
from trace_capture.hardware import Quantity
from trace_capture.known_shapes import known_shape
from trace_capture.machine_parts import compose_profile, named_profile
from trace_capture.trace import DraftSettings

MACHINE = compose_profile(gpu="rtx4090", host="ddr5-6000-2ch", link="pcie4x16")
SHAPE = known_shape("qwen3-30b-a3b:q4_k_m")


def test_every_term_of_the_model_is_there_with_sources() -> None:
    terms = term_costs(MACHINE, SHAPE, 4096, DraftSettings(kind="model", gamma=4, weight_bytes=10**9))
    assert [term.name for term in terms] == [
        "attention", "router", "shared", "launch", "device experts", "head", "decide", "predict", "CPU experts",
        "copy", "issue", "wake-up", "RAM contention", "drafting",
    ]  # fmt: skip
    for term in terms:
        assert term.numbers and term.kinds, term.name
        assert all(isinstance(number, Quantity) and number.source for number in term.numbers.values()), term.name


def test_terms_are_those_of_the_cost_model_and_as_often_as_a_token_pays_them() -> None:
    costs = CostModel(MACHINE, SHAPE)
    own = {term.name: term for term in term_costs(MACHINE, SHAPE, 4096)}
    dense_ns = sum(costs.compute.dense_ns(layer, 1, 4096) for layer in range(48))
    assert sum(own[name].token_ns for name in ("attention", "router", "shared", "launch")) == pytest.approx(dense_ns)
    assert own["copy"].times == own["issue"].times == 48 * 8
    assert own["copy"].each_ns == costs.copy_ns(SHAPE.expert_bytes[0])
    assert own["CPU experts"].token_ns == 48 * costs.compute.cpu_experts_ns(0, 1, 8, 8)
    assert own["head"].times == 1
    assert own["RAM contention"].each_ns == pytest.approx((costs.contention(0).copy_ratio - 1) * own["copy"].each_ns)


def test_corners_are_sums_of_terms() -> None:
    terms = term_costs(MACHINE, SHAPE)
    own = {term.name: term.token_ns / 1e6 for term in terms}
    corners = headlines(terms)
    base = sum(own[name] for name in ("attention", "router", "shared", "launch", "head", "decide"))
    assert corners["all_resident_ms"] == pytest.approx(base + own["device experts"])
    assert corners["all_on_cpu_ms"] == pytest.approx(base + own["CPU experts"])
    assert corners["all_loaded_ms"] == pytest.approx(
        base + own["device experts"] + own["copy"] + own["issue"] + own["wake-up"]
    )


def test_calibrated_machine_lists_its_measurements() -> None:
    terms = term_costs(make_hardware(measured=make_measured()), make_shape())
    own = {term.name: term for term in terms}
    assert own["dense"].each_ns == 300 and own["device experts"].each_ns == 700 and own["CPU experts"].each_ns == 9000
    assert own["dense"].kinds == own["device experts"].kinds == ("measured",)


def test_parts_that_are_not_there_have_no_terms() -> None:
    names = {term.name for term in term_costs(compose_profile(gpu="rtx4090", link="pcie4x16"), SHAPE)}
    assert not names & {"CPU experts", "RAM contention", "disk", "drafting"}
    big = known_shape("deepseek-v3")
    with_disk = {t.name: t for t in term_costs(named_profile("rtx4090+ddr5-6000-2ch+pcie4x16+nvme4"), big)}
    ratio = 1 - 0.9 * 96 * 2**30 / big.total_expert_bytes
    assert with_disk["disk"].times == pytest.approx(58 * 8 * ratio)
    assert with_disk["disk"].each_ns == pytest.approx(80_000 + 88_080_384 / 7)


def test_memory_need() -> None:
    need = memory_need(MACHINE, SHAPE, 1000)
    assert need["experts_bytes"] == 48 * 128 * SHAPE.expert_bytes[0]
    assert need["cache_bytes"] == 1000 * SHAPE.kv_bytes_per_token
    assert need["host_bytes_for_experts"] == pytest.approx(0.9 * 96 * 2**30)
