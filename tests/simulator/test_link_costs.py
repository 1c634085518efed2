"""Copies worked out by hand: rate, latency, issue, chunks, pageable memory, a disk behind the host's memory."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.cost_model import CostModel
from simulator.replay import simulate
from tests.simulator.builders import decode_trace, make_config, make_hardware, make_host, make_shape, quantity
from trace_capture.errors import ProfileError
from trace_capture.hardware import DiskProfile, HardwareProfile

SHAPE = make_shape(layers=2, experts=10, expert_bytes=1000)  # 20,000 bytes of experts


def machine(disk: tuple[float, float] | None = None, ram: float | None = None, **link: Any) -> HardwareProfile:
    base = make_hardware(bytes_per_s=1e9, latency_ns=50, issue_ns=8)
    host = None if ram is None else make_host().model_copy(update={"ram_bytes": quantity(ram)})
    part = None
    if disk is not None:
        part = DiskProfile(name="toy disk", bytes_per_s=quantity(disk[0]), latency_ns=quantity(disk[1]))
    changes = {name: quantity(value) if isinstance(value, float) else value for name, value in link.items()}
    return base.model_copy(update={"link": base.link.model_copy(update=changes), "host": host, "disk": part})


def test_a_copy_is_latency_and_bytes_and_its_issue_is_the_thread_s() -> None:
    costs = CostModel(machine(), SHAPE)
    assert costs.copy_ns(1000) == 50 + 1000 and costs.load_issue_ns(1000) == 8 == costs.issue_ns


@pytest.mark.parametrize(("chunk", "copies"), [(1000.0, 1), (999.0, 2), (500.0, 2), (300.0, 4), (1.0, 1000)])
def test_every_chunk_pays_latency_and_issue(chunk: float, copies: int) -> None:
    costs = CostModel(machine(chunk_bytes=chunk), SHAPE)
    assert costs.copy_ns(1000) == copies * 50 + 1000
    assert costs.load_issue_ns(1000) == copies * 8


def test_simulated_loads_pay_their_chunks() -> None:
    trace = decode_trace(make_shape(layers=1), [[[0, 1, 2]]])
    config = make_config(budget_bytes=3000)
    whole, halves = (simulate(trace, machine(**link), config) for link in ({}, {"chunk_bytes": 500.0}))
    assert halves.metrics.tpot_terms_ms["issue"] == pytest.approx(2 * whole.metrics.tpot_terms_ms["issue"])
    gained = (int(halves.token_ns.sum()) - int(whole.token_ns.sum()), 8 + 3 * 50)
    assert gained[0] == gained[1], (
        "the first load starts one issue later, then each of three copies takes a latency more"
    )


def test_pageable_memory_has_its_own_rate() -> None:
    costs = CostModel(machine(pageable_bytes_per_s=0.25e9, host_memory="pageable"), SHAPE)
    assert costs.copy_ns(1000) == 50 + 4000
    assert CostModel(machine(pageable_bytes_per_s=0.25e9), SHAPE).copy_ns(1000) == 50 + 1000, "pinned is the default"
    with pytest.raises(ProfileError, match="'toy link' has no pageable_bytes_per_s"):
        CostModel(machine(host_memory="pageable"), SHAPE)


def test_experts_that_memory_cannot_hold_cost_their_share_of_a_disk_read() -> None:
    half = CostModel(machine(disk=(0.1e9, 400), ram=10_000 / 0.9), SHAPE)
    assert half.link.disk_ratio == pytest.approx(0.5)
    assert half.copy_ns(1000) == 50 + 1000 + (400 + 10_000) // 2
    assert CostModel(machine(disk=(0.1e9, 400), ram=1e9), SHAPE).copy_ns(1000) == 1050, "all of them fit"
    assert CostModel(machine(ram=100), SHAPE).copy_ns(1000) == 1050, "no disk named: as if they fitted"


def test_a_run_says_when_experts_do_not_fit_into_memory() -> None:
    trace = decode_trace(SHAPE, [[[0, 1, 2], [3, 4, 5]]])
    config = make_config(budget_bytes=6000)
    notes = simulate(trace, machine(ram=10_000 / 0.9), config).info.notes
    assert any("50 % of the experts' bytes do not fit" in note and "--disk" in note for note in notes)
    notes = simulate(trace, machine(disk=(1e9, 1), ram=10_000 / 0.9), config).info.notes
    assert any("50 % of the experts" in note and "toy disk" in note for note in notes)
    assert not any(
        "do not fit" in note for note in simulate(trace, machine(ram=1e9), make_config(budget_bytes=6000)).info.notes
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"chunk_bytes": 0.0}, "link.chunk_bytes"), ({"disk": (0, 1)}, "disk.bytes_per_s"),
     ({"pageable_bytes_per_s": 0.0, "host_memory": "pageable"}, "link.pageable_bytes_per_s")],
)  # fmt: skip
def test_rates_of_zero_are_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ProfileError, match=f"'toy machine' has {name} = 0"):
        CostModel(machine(**changes), SHAPE)
