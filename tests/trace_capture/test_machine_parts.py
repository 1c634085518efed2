"""Machines put together from the parts that ship."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.simulator.builders import make_hardware, make_measured
from trace_capture.band import ErrorBand
from trace_capture.errors import ProfileError
from trace_capture.hardware import HardwareProfile, HostProfile, LinkProfile, Quantity
from trace_capture.machine_parts import (
    PART_KINDS,
    compose_profile,
    load_part,
    named_profile,
    part_names,
    profile_names,
    with_quantities,
)

PARTS = [(kind, name) for kind in PART_KINDS for name in part_names(kind)]
WANTED = {
    "gpu": "rtx3060 rtx3090 rtx4070 rtx4080 rtx4090 rtx5070ti rtx5080 rtx5090 a6000 a100-40 a100-80 h100 h200 gh200",
    "host": "ddr4-3200-2ch ddr4-3600-2ch ddr5-5200-2ch ddr5-5600-2ch ddr5-6000-2ch ddr5-6400-2ch ddr4-3200-8ch "
    "ddr5-4800-8ch ddr5-4800-12ch ddr5-6400-12ch gh200-lpddr5x",
    "link": "pcie3x4 pcie3x8 pcie3x16 pcie4x4 pcie4x8 pcie4x16 pcie5x4 pcie5x8 pcie5x16 nvlink-c2c",
    "disk": "sata-ssd nvme3 nvme4 nvme5",
}
OLD_NAMES = ["a6000-pcie4x16", "h100-pcie5x16", "rtx3060-pcie4x16", "rtx3090-pcie4x16", "rtx4090-pcie4x16"]


def gb_per_s(kind: str, name: str, field: str) -> float:
    return float(getattr(load_part(kind, name), field).value) / 1e9


@pytest.mark.parametrize("kind", PART_KINDS)
def test_the_expected_parts_ship(kind: str) -> None:
    assert set(WANTED[kind].split()) <= set(part_names(kind))


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_every_number_of_a_part_has_an_origin(kind: str, name: str) -> None:
    numbers = [value for _, value in load_part(kind, name) if isinstance(value, Quantity)]
    assert len(numbers) >= 2
    assert all(number.source and number.kind != "measured" for number in numbers), "nobody measured these here"


@pytest.mark.parametrize("name", profile_names())
def test_machines_that_ship_are_combinations(name: str) -> None:
    profile = HardwareProfile.load(Path(name))
    assert profile.name == name and profile.host is not None and profile.description
    assert profile.error_band is None and profile.measured is None and not profile.emulated


def test_the_names_of_earlier_versions_still_work() -> None:
    assert set(OLD_NAMES) <= set(profile_names())
    rate = {name: named_profile(name).device.memory_bytes_per_s.value for name in OLD_NAMES}
    assert sorted(rate, key=lambda name: rate[name]) == [OLD_NAMES[i] for i in (2, 0, 3, 4, 1)]
    assert math.isclose(rate["rtx3060-pcie4x16"], 192 / 8 * 15e9)


def test_units_of_rates_survive_the_arithmetic_of_the_data_sheets() -> None:
    bus_bits = {"rtx3060": (192, 15), "rtx4070": (192, 21), "rtx5070ti": (256, 28), "rtx5080": (256, 30)}
    for name, (bits, gbit) in bus_bits.items():
        assert gb_per_s("gpu", name, "memory_bytes_per_s") == pytest.approx(bits * gbit / 8, rel=0.001)
    for name, peak in {"ddr4-3200-2ch": 51.2, "ddr5-6000-2ch": 96, "ddr5-6400-12ch": 614.4}.items():
        assert 0.7 * peak < gb_per_s("host", name, "ram_bytes_per_s") < peak


def test_link_rates_follow_generation_and_lanes_and_stay_below_the_wire() -> None:
    wire = {3: 0.985, 4: 1.969, 5: 3.938}
    for generation, lane in wire.items():
        for lanes in (4, 8, 16):
            rate = gb_per_s("link", f"pcie{generation}x{lanes}", "h2d_bytes_per_s")
            assert 0.78 * lane * lanes < rate < 0.9 * lane * lanes
            assert gb_per_s("link", f"pcie{generation}x{lanes}", "pageable_bytes_per_s") < rate
    assert gb_per_s("link", "nvlink-c2c", "h2d_bytes_per_s") == pytest.approx(416)


def test_pageable_rate_is_that_of_a_copy_after_staging() -> None:
    """fiddler issue 7 has 24.66 GB/s pinned and 6 pageable on PCIe 4.0 x16."""
    staging = 1 / (1 / 6 - 1 / 24.66)
    for name in ("pcie3x16", "pcie4x4", "pcie4x16", "pcie5x16"):
        pinned = gb_per_s("link", name, "h2d_bytes_per_s")
        expected = 1 / (1 / pinned + 1 / staging)
        assert gb_per_s("link", name, "pageable_bytes_per_s") == pytest.approx(expected, rel=0.005)


def test_parts_make_a_machine_whose_name_makes_it_again() -> None:
    profile = compose_profile(gpu="rtx4090", host="ddr5-6000-2ch", link="pcie4x16", disk="nvme4")
    assert profile.name == "rtx4090+ddr5-6000-2ch+pcie4x16+nvme4"
    assert profile == named_profile(profile.name) == HardwareProfile.load(Path(profile.name))
    assert profile.disk is not None and profile.device.name.endswith("4090 24 GB")
    assert compose_profile(gpu="rtx4090", link="pcie4x16").host is None


def test_a_part_takes_the_place_of_the_base_s_part() -> None:
    base = named_profile("rtx4090-pcie4x16")
    assert compose_profile(base=base) is base
    slower = compose_profile(link="pcie3x4", base=base)
    assert slower.name == "rtx4090+ddr5-6000-2ch+pcie3x4" and slower.device == base.device
    assert slower == named_profile(slower.name) and not slower.description, "what was said of the base is not true now"
    twice = compose_profile(host="ddr4-3200-2ch", base=slower)
    assert twice.name == "rtx4090+ddr4-3200-2ch+pcie3x4"


def test_another_gpu_drops_measured_compute_and_another_link_only_the_band() -> None:
    calibrated = make_hardware(measured=make_measured()).model_copy(
        update={"error_band": ErrorBand(low_ratio=0.96, high_ratio=1.04), "emulated": True}
    )
    other_link = compose_profile(link="pcie4x16", base=calibrated)
    assert other_link.measured is not None and other_link.error_band is None and not other_link.emulated
    assert other_link.name == "toy machine+pcie4x16"
    assert compose_profile(gpu="rtx4090", base=calibrated).measured is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtx9090+pcie4x16", "unknown hardware part 'rtx9090'; did you mean 'rtx.090'.*known: .*ddr5-6000-2ch"),
        ("rtx4090+rtx3090+pcie4x16", "names two of kind gpu"),
        ("rtx4090+ddr5-6000-2ch", "a machine needs a link: give --link, one of .*pcie4x16"),
        ("ddr5-6000-2ch+pcie4x16", "a machine needs a gpu: give --gpu, one of .*rtx4090"),
    ],
)
def test_combinations_that_make_no_machine(name: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        named_profile(name)


@pytest.mark.parametrize("kind", PART_KINDS)
def test_unknown_parts_list_the_known(kind: str) -> None:
    with pytest.raises(ProfileError, match=f"unknown {kind} 'quantum'; known: .*{part_names(kind)[0]}"):
        load_part(kind, "quantum")


def test_a_part_may_be_a_file_of_one_s_own(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "traces/hardware/links/pcie4x16.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("25700000000.0", "21e9"))
    link = load_part("link", str(tmp_path / "mine.toml"))
    assert isinstance(link, LinkProfile) and link.h2d_bytes_per_s.value == 21e9
    (tmp_path / "bad.toml").write_text(text.replace("issue_ns", "tissue_ns"))
    with pytest.raises(ProfileError, match=r"link part .*bad\.toml: issue_ns: Field required; mend that key"):
        load_part("link", str(tmp_path / "bad.toml"))


def test_single_numbers_can_be_set_and_say_so() -> None:
    base = named_profile("rtx4090-pcie4x16")
    changed = with_quantities(base, {"host.cores": 6.0, "link.host_memory": "pageable", "link.chunk_bytes": 1e6}, "me")
    assert isinstance(changed.host, HostProfile)
    assert changed.host.cores == Quantity(value=6, kind="guess", source="me")
    assert changed.link.host_memory == "pageable" and changed.link.chunk_bytes == Quantity(
        value=1e6, kind="guess", source="me"
    )
    assert changed.device == base.device and changed.digest != base.digest


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("host.corse", 6.0, "unknown hardware number 'host.corse'; did you mean 'host.cores'"),
        ("cores", 6.0, "unknown hardware number 'cores'"),
        ("disk.latency_ns", 6.0, "has no disk whose latency_ns could be set"),
        ("host.cores", -1.0, "host.cores.value: "),
        ("host.cores", "many", "host.cores: "),
        ("link.host_memory", "unpinned", "link.host_memory: "),
    ],
)
def test_numbers_that_cannot_be_set(name: str, value: float | str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        with_quantities(named_profile("rtx4090-pcie4x16"), {name: value}, "me")
