"""Experts on the CPU and the memory they share with copies, worked out by hand."""

from __future__ import annotations

import pytest

from simulator.cost_model import CostModel
from simulator.costs.host import ALONE, HostCosts
from tests.simulator.builders import make_hardware, make_host, make_measured, make_shape
from trace_capture.errors import ProfileError
from trace_capture.hardware import CpuThreadCosts

SHAPE = make_shape(layers=2, expert_bytes=1000)  # top-3 of 16, two bytes per weight


def test_a_row_each_costs_reading_dispatch_and_hand_over() -> None:
    host = make_host(ram=1e9, cores=4, core_rate=1e12, half_rate_bytes=0, expert_ns=30, layer_ns=500)
    compute = CostModel(make_hardware(host=host), SHAPE).compute
    assert compute.cpu_experts_ns(0, 1, 3, 3) == 500 + 3 * (30 + 1000), "1000 bytes at one byte per nanosecond"
    assert compute.cpu_experts_ns(0, 1, 1, 3) == 500 + 30 + 1000
    assert compute.cpu_experts_ns(0, 1, 0, 3) == 0, "no expert, no hand-over"


@pytest.mark.parametrize(("threads", "expected_ns"), [(None, 500), (2, 1000), (8, 250), (100, 200)])
def test_cores_limit_the_rate_until_memory_does(threads: int | None, expected_ns: int) -> None:
    host = make_host(ram=5e9, cores=4, core_rate=0.5e9, threads=threads)
    assert CostModel(make_hardware(host=host), SHAPE).compute.cpu_experts_ns(0, 1, 1, 1) == expected_ns


def test_a_configuration_may_take_fewer_cores_than_there_are_and_no_more() -> None:
    hardware = make_hardware(bytes_per_s=1e9, host=make_host(ram=8e9, cores=4, core_rate=1e9, threads=3))
    by_threads = [CostModel(hardware, SHAPE, count) for count in (None, 1, 2, 4)]
    assert [costs.compute.cpu_experts_ns(0, 1, 1, 1) for costs in by_threads] == [333, 1000, 500, 250]
    assert by_threads[1].contention(0) == ALONE
    tight = make_hardware(bytes_per_s=1e9, host=make_host(ram=3e9, cores=4, core_rate=1e9))
    assert CostModel(tight, SHAPE, 1).contention(0) == ALONE, "one core leaves memory for the copies"
    assert CostModel(tight, SHAPE, 4).contention(0).copy_ratio == pytest.approx(4 / 3)
    with pytest.raises(ProfileError, match="cpu.threads is 5 and toy host has 4 cores"):
        _ = CostModel(hardware, SHAPE, 5).compute.cpu_experts_ns(0, 1, 1, 1)


def test_threads_that_were_measured_have_costs_of_their_own_and_others_none() -> None:
    two = CpuThreadCosts(threads=2, cpu_experts_ns=(5000.0,), cpu_layer_ns=1000.0, cpu_start_ns=7.0, cpu_beside_ns=9.0)
    measured = make_measured(cpu_layer_ns=3000.0, cpu_start_ns=5.0, cpu_beside_ns=6.0, cpu_by_threads=(two,))
    hardware = make_hardware(measured=measured)
    shape = make_shape(layers=2)
    for count, whole, half, sharing in (
        (None, 9000, 6000, (5, 0, 6)),
        (1, 9000, 6000, (5, 0, 6)),
        (2, 5000, 3000, (7, 0, 9)),
    ):
        costs = CostModel(hardware, shape, count)
        assert [costs.compute.cpu_experts_ns(0, 1, experts, 4) for experts in (4, 2)] == [whole, half]
        assert costs.sharing == sharing
        assert costs.compute.experts_ns(0, 1, 3, 3) == 700, "the device's experts are as before"
    with pytest.raises(ProfileError, match="cpu.threads is 4 .* calibrated with 1 or 2 threads"):
        CostModel(hardware, shape, 4)
    slowed = measured.slowed(2.0).cpu_by_threads[0]
    assert (slowed.cpu_experts_ns, slowed.cpu_layer_ns, slowed.threads) == ((10_000.0,), 2000.0, 2)


def test_small_experts_reach_less_of_the_rate() -> None:
    costs = HostCosts(make_hardware(host=make_host(ram=8e9, cores=1, core_rate=1e12, half_rate_bytes=3000)))
    assert costs.bytes_per_s(3000, 2.0) == 4e9
    assert costs.bytes_per_s(1000, 2.0) == 2e9
    assert costs.experts_ns(2, 1000, 1, 2.0) == 2 * 500


def test_fewer_bits_per_weight_help_only_until_the_cores_are_the_limit() -> None:
    costs = HostCosts(make_hardware(host=make_host(ram=4e9, cores=4, core_rate=2e9)))  # 4 weights per nanosecond
    assert costs.bytes_per_s(1000, 2.0) == 4e9, "memory: two bytes per weight"
    assert costs.bytes_per_s(1000, 0.5) == 2e9, "cores: the same weights in a quarter of the bytes"


def test_many_rows_cost_operations_and_few_cost_bytes() -> None:
    host = make_host(ram=1e9, cores=2, core_rate=1e12, core_flops=0.5e9)
    compute = CostModel(make_hardware(host=host), SHAPE).compute
    # twelve tokens' 36 rows on six experts are six rows each: 2 x 6 x 500 weights at one operation per nanosecond
    assert compute.cpu_experts_ns(0, 12, 6, 6) == 6 * 6000
    assert compute.cpu_experts_ns(0, 1, 3, 3) == 3 * 1000, "one row: 1000 operations or 1000 bytes"


def test_cores_and_copies_share_memory_in_proportion_to_what_they_ask() -> None:
    host = make_host(ram=4e9, cores=1, core_rate=3e9, contended_ratio=0.75)
    costs = CostModel(make_hardware(bytes_per_s=1.5e9, host=host), SHAPE)
    assert costs.contention(0) == (1.5, 1.5), "asked 3 + 1.5, given 4 x 0.75"
    idle = CostModel(make_hardware(bytes_per_s=0.1e9, host=make_host(ram=4e9, cores=1, core_rate=1e9)), SHAPE)
    assert idle.contention(1) == ALONE, "memory has enough for both"


@pytest.mark.parametrize(
    ("stream", "cpu", "copies", "together"),
    [(31.75, 29.97, 13.09, (21.89, 8.41)), (84.5, 63.8, 24.9, (54.0, 23.9)), (80.6, 65.8, 25.1, (43.4, 21.6))],
)
def test_contention_is_near_the_published_pairs(
    stream: float, cpu: float, copies: float, together: tuple[float, float]
) -> None:
    """FreeToken issue 436, pull request 232, issue 281; the sum of both rates is what memory is said to give."""
    host = make_host(ram=stream * 1e9, cores=1, core_rate=cpu * 1e9, contended_ratio=0.9)
    found = CostModel(make_hardware(bytes_per_s=copies * 1e9, host=host), SHAPE).contention(0)
    total = cpu / found.cpu_ratio + copies / found.copy_ratio
    assert total == pytest.approx(sum(together), rel=0.12)
    assert cpu / found.cpu_ratio == pytest.approx(together[0], rel=0.25)


def test_without_a_host_cpu_experts_are_refused_and_copies_run_alone() -> None:
    costs = CostModel(make_hardware(), SHAPE)
    assert costs.contention(0) == ALONE
    with pytest.raises(ProfileError, match=r"'toy machine' says nothing of the host's cores.*--host"):
        costs.compute.cpu_experts_ns(0, 1, 1, 3)


@pytest.mark.parametrize("field", ["ram", "cores", "core_rate", "core_flops", "contended_ratio"])
def test_a_rate_of_zero_is_refused_by_name(field: str) -> None:
    with pytest.raises(ProfileError, match=r"'toy machine' has .*host\."):
        HostCosts(make_hardware(host=make_host(**{field: 0})))


def test_calibrated_machine_takes_its_share_of_the_measured_table() -> None:
    hardware = make_hardware(measured=make_measured(tokens=(1, 3), cpu_experts_ns=(9000.0, 21000.0),
                             dense_ns=(1.0, 1.0), experts_ns=(1.0, 1.0), pass_overhead_ns=(1.0, 1.0)))  # fmt: skip
    compute = CostModel(hardware, make_shape()).compute
    assert compute.cpu_experts_ns(0, 1, 2, 3) == 6000
    assert compute.cpu_experts_ns(0, 2, 6, 6) == 15000
    assert compute.cpu_experts_ns(0, 1, 0, 3) == 0
