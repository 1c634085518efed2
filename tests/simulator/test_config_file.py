"""Configurations as files: equal after a round trip, readable, and plain about mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.config_file import load_config, save_config
from simulator.policies.config import OffloadConfig, Provenance, parse_config
from tests.simulator.builders import make_config
from trace_capture.band import ErrorBand
from trace_capture.errors import ConfigError

PROVENANCE = Provenance(
    model="toy",
    trace_digest="sha256:1",
    hardware="toy machine",
    hardware_digest="sha256:2",
    predicted_tpot_ms=1.25,
    predicted_hit_rate=0.5,
    error_band=ErrorBand(low_ratio=0.93, high_ratio=1.08, count=12, source="live"),
    candidates=18,
    versions={"python": "3.11.7", "moe-studio": "0.1.0"},
)


@pytest.mark.parametrize(
    "config",
    [
        make_config(budget_bytes=123_456_789_012),
        make_config("lfu", "quasi-hidden", budget_ratio=0.1, max_experts=4, scope="global", serial=True),
        make_config("lfu-ageing", slots_per_layer=[4, 5, 16]).model_copy(update={"provenance": PROVENANCE}),
        parse_config({"label": 'a "b" # c\\', "cache": {"budget_ratio": 1 / 3}}),
    ],
)
def test_round_trip_is_equal(config: OffloadConfig, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "tuned.toml"
    save_config(config, path, comments=["tuned on Monday", "twice\nin two lines"])
    assert load_config(path) == config


def test_files_of_version_1_say_one_thread_whoever_chose_it(tmp_path: Path) -> None:
    for version, threads, found in ((1, 1, None), (1, 2, 2), (2, 1, 1)):
        (tmp_path / "c.toml").write_text(f"schema_version = {version}\n{GOOD}[cpu]\nlayers = 2\nthreads = {threads}\n")
        config = load_config(tmp_path / "c.toml")
        assert (config.cpu.threads, config.cpu.layers, config.schema_version) == (found, 2, 2)
        assert OffloadConfig.model_validate(config.model_dump()) == config


def test_file_says_what_it_is_and_how_to_use_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    save_config(make_config(budget_ratio=0.1).model_copy(update={"provenance": PROVENANCE}), path, ["from trace x"])
    lines = path.read_text().splitlines()
    assert "moe-studio run --model <folder> --config mine.toml" in lines[1]
    assert "# from trace x" in lines
    assert any(line.startswith('policy = "lru" # who leaves') for line in lines)
    assert "[provenance] # where this comes from" in path.read_text()
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


GOOD = "[cache]\npolicy = 'lru'\nbudget_ratio = 0.5\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[cache]\npolicy = lru\n", r"is not TOML: .*line 2.*mend that line"),
        (GOOD + "polcy = 'lru'", r"unknown key 'cache.polcy'; did you mean 'cache.policy'"),
        (GOOD + "[devise]\nserial = true", r"unknown key 'devise'; did you mean 'device'"),
        (GOOD + "[device]\nlatncy_ns = 3", r"did you mean 'device.latency_ns'"),
        ("schema_version = 3\n" + GOOD, r"schema_version is 3, this program reads 1 and 2"),
        (GOOD.replace("lru", "lro"), r"cache.policy: unknown cache policy 'lro'; did you mean 'lru'"),
        (GOOD.replace("0.5", "1.5"), r"cache.budget_ratio: .*less than or equal to 1"),
        (GOOD + "budget_bytes = 3", r"cache: give exactly one of slots_per_layer, budget_bytes, budget_ratio"),
        ("[cache]\nscope = 'global'\nslots_per_layer = [3]", r"slots_per_layer needs scope = 'layer'"),
        ("label = 'x'", r"cache: Field required"),
        (GOOD + "[prefetch]\nsource = 'quasi'", r"unknown prefetch source 'quasi'; did you mean 'quasi-hidden'"),
    ],
)
def test_mistakes_are_named_in_one_line(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration .*nope.toml.*moe-studio tune"):
        load_config(tmp_path / "nope.toml")


def test_bytes_that_are_not_text_are_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(path)


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "config.toml"
    save_config(make_config(budget_ratio=0.1), path)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(ValueError, match="No space left"):
        save_config(make_config(budget_ratio=0.9), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
