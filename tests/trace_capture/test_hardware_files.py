"""Hardware profiles as files, those that ship included; and writing files atomically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trace_capture import HardwareProfile
from trace_capture.errors import ProfileError, StudioError
from trace_capture.files import atomic_path, file_digest, make_folder, text_digest, write_text_atomic
from trace_capture.hardware import CpuThreadCosts, DeviceProfile, LinkProfile, MeasuredCosts, Quantity


def quantity(value: float, kind: Any = "guess", source: str = "here, \"quoted\" = 'x'") -> Quantity:
    return Quantity(value=value, kind=kind, source=source)


@pytest.fixture
def profile() -> HardwareProfile:
    return HardwareProfile(
        name="bench",
        emulated=True,
        link=LinkProfile(
            name="emulated",
            h2d_bytes_per_s=quantity(25.7e9, "measured"),
            latency_ns=quantity(1.5),
            issue_ns=quantity(0),
            wakeup_ns=quantity(1e-3, "derived"),
        ),
        device=DeviceProfile(
            name="cpu",
            memory_bytes=quantity(2**34, "data sheet"),
            memory_bytes_per_s=quantity(1e10),
            flops_per_s=quantity(1e11),
            launch_ns=quantity(5000),
        ),
        measured=MeasuredCosts(
            model="tiny",
            tokens=(1, 8),
            dense_ns=(100.5, 300),
            experts_ns=(200, 900),
            cpu_experts_ns=(400, 2000),
            pass_overhead_ns=(50, 60),
            decide_ns=9,
            decide_per_load_ns=3,
            predict_ns=70,
            samples=64,
            cpu_by_threads=(CpuThreadCosts(threads=4, cpu_experts_ns=(100, 500), cpu_start_ns=2.5),),
        ),
        error_band_ratio=0.08,
    )


def test_profile_survives_toml_with_kinds_and_digest(profile: HardwareProfile, tmp_path: Path) -> None:
    profile.save(tmp_path / "p.toml")
    loaded = HardwareProfile.load(tmp_path / "p.toml")
    assert loaded == profile and loaded.digest == profile.digest
    assert loaded.error_band is not None and loaded.error_band.low_ratio == pytest.approx(0.92)
    assert profile.model_copy(update={"error_band": None}).digest == profile.digest
    assert profile.measured is not None
    fewer = profile.model_copy(update={"measured": profile.measured.model_copy(update={"cpu_by_threads": ()})})
    assert fewer.digest != profile.digest
    known = json.loads(fewer.model_dump_json(exclude={"error_band"}))
    del known["measured"]["cpu_by_threads"]  # as written by a version without that field
    assert fewer.digest == text_digest(json.dumps(known, separators=(",", ":")))
    assert loaded.link.h2d_bytes_per_s.kind == "measured" and loaded.device.memory_bytes.kind == "data sheet"
    profile.model_copy(update={"measured": None, "error_band": None}).save(tmp_path / "q.toml")
    assert HardwareProfile.load(tmp_path / "q.toml").measured is None


def test_profiles_written_before_bands_had_two_sides_are_read(profile: HardwareProfile, tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    profile.model_copy(update={"error_band": None}).save(path)
    text = path.read_text()
    for lines, ratio in (
        ('error_band_source = ""\n', None),
        ('error_band_ratio = 0.2\nerror_band_source = "x"\n', 0.2),
    ):
        path.write_text(lines + text)
        band = HardwareProfile.load(path).error_band
        assert (band and (band.low_ratio, band.high_ratio, band.source)) == (ratio and (0.8, 1.2, "x"))


def test_saved_twice_gives_equal_bytes_and_a_readable_line_per_number(profile: HardwareProfile, tmp_path: Path) -> None:
    profile.save(tmp_path / "a.toml")
    profile.save(tmp_path / "b.toml")
    text = (tmp_path / "a.toml").read_text()
    assert text == (tmp_path / "b.toml").read_text()
    assert 'launch_ns = {value = 5000.0, kind = "guess"' in text


def test_digest_follows_every_number(profile: HardwareProfile) -> None:
    device = profile.device.model_copy(update={"launch_ns": quantity(5001)})
    assert profile.model_copy(update={"device": device}).digest != profile.digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[link]", "[link", "is not TOML"),
        ("schema_version = 1", "schema_version = 7", "has schema_version 7, wanted 1"),
        ("schema_version = 1\n", "", "has schema_version None"),
        ('kind = "measured"', 'kind = "dreamt"', "link.h2d_bytes_per_s.kind: .*mend that key"),
        ("value = 25700000000.0", "value = -1.0", "link.h2d_bytes_per_s.value: "),
        ("value = 25700000000.0", "value = inf", "link.h2d_bytes_per_s.value: "),
        ("launch_ns", "lunch_ns", "device.launch_ns: "),
        ("tokens = [1, 8]", "tokens = [8, 1]", "measured: .*tokens must rise"),
        ("tokens = [1, 8]", "tokens = [1]", "measured: .*entries for 1 token counts"),
    ],
)
def test_wrong_profile_names_file_and_key(
    profile: HardwareProfile, tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "p.toml"
    profile.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ProfileError, match=rf"p\.toml.*{message}"):
        HardwareProfile.load(path)


def test_profile_without_host_and_disk_is_still_read(profile: HardwareProfile, tmp_path: Path) -> None:
    """Files written before hosts were part of a profile."""
    profile.save(tmp_path / "old.toml")
    text = (tmp_path / "old.toml").read_text()
    assert "[host]" not in text and "pageable" not in text
    loaded = HardwareProfile.load(tmp_path / "old.toml")
    assert loaded.host is None and loaded.disk is None and loaded.link.host_memory == "pinned"


def test_missing_profile_lists_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no hardware profile 'rtx9090'; .*rtx4090-pcie4x16.*calibrate"):
        HardwareProfile.load(Path("rtx9090"))
    with pytest.raises(ProfileError, match="no hardware profile"):
        HardwareProfile.load(tmp_path / "rtx4090-pcie4x16")


def test_pcie4_link_rate_reproduces_the_published_copy_time() -> None:
    """Qwen3-30B-A3B copies 48 x 8 experts of 9,437,184 bytes per token; the A6000 figures put that at 140-142 ms."""
    rate = HardwareProfile.load(Path("a6000-pcie4x16")).link.h2d_bytes_per_s.value
    assert 140e-3 < 48 * 8 * 9_437_184 / rate < 142e-3


def test_failed_block_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    write_text_atomic(path, "old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        assert path.read_text() == "old"
        raise RuntimeError
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.txt"]


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StudioError, match=r"cannot write to folder .*file.*; choose another place with --out"):
        write_text_atomic(tmp_path / "file" / "x.txt", "x")
    with pytest.raises(StudioError, match="cannot write to folder"):
        make_folder(tmp_path / "file")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "inside").write_text("")
    with pytest.raises(StudioError, match=r"cannot write .*taken: "):
        write_text_atomic(tmp_path / "taken", "x")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "taken"]


def test_digests_are_sha256_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    known = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_digest(tmp_path / "x") == text_digest("abc") == known
