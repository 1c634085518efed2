"""The command line about machines: lists, terms, and one clear line for what does not exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runtime.cli import hardware, machines, tune  # noqa: F401 - they register the verbs
from runtime.cli.app import app
from tests.simulator.builders import make_shape, mixed_trace
from trace_capture.errors import ModelError, StudioError
from trace_capture.trace import Trace

PARTS = ["--gpu", "rtx4090", "--host", "ddr5-6000-2ch", "--link", "pcie4x16"]


def studio(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    shape = make_shape(expert_bytes=3000, hidden_size=10, moe_intermediate_size=50)
    path = tmp_path / "t.parquet"
    mixed_trace(shape).save(path)
    return path


def tpot(*arguments: object) -> float:
    return float(json.loads(studio("simulate", *arguments, "--json"))["tpot_ms"])


def test_parts_are_listed() -> None:
    listing = json.loads(studio("hardware", "--json"))
    assert "rtx5070ti" in listing["gpu"] and "nvlink-c2c" in listing["link"] and "q4_k_m" in listing["weights"]
    assert "rtx4090-pcie4x16" in listing["machines"] and "kimi-k2" in listing["models"]
    text = studio("hardware")
    assert "--host: ddr4-3200-2ch" in text and "next: moe-studio hardware --gpu" in text


def test_a_machine_shows_every_number_with_kind_and_source() -> None:
    text = studio("hardware", *PARTS, "--set", "host.cores=6")
    assert "h2d_bytes_per_s = 2.57e+10 (derived: Speculating Experts" in text
    assert "cores = 6 (guess: given on the command line)" in text


def test_terms_of_a_model_on_a_machine() -> None:
    arguments = ["hardware", *PARTS, "--model", "qwen3-30b-a3b:q4_k_m", "--context", 4096, "--draft-mib", 4500]
    report = json.loads(studio(*arguments, "--json"))
    assert report["hardware"] == "rtx4090+ddr5-6000-2ch+pcie4x16" and report["weights"] == "q4_k_m"
    copy = next(term for term in report["terms"] if term["term"] == "copy")
    assert copy["times_per_token"] == 384 and copy["token_ms"] == pytest.approx(384 * copy["each_ns"] / 1e6)
    assert {"number", "value", "kind", "source"} <= copy["from"][0].keys()
    assert {term["term"] for term in report["terms"]} >= {"attention", "CPU experts", "drafting", "RAM contention"}
    text = studio(*arguments)
    assert "all on the CPU" in text and "next: moe-studio simulate TRACE" in text


def test_model_may_be_a_trace_or_a_configuration(trace: Path, tmp_path: Path) -> None:
    assert json.loads(studio("hardware", "--model", trace, "--json"))["model"] == "toy"
    with pytest.raises(ModelError, match="is not JSON"):
        (tmp_path / "config.json").write_text("{")
        studio("hardware", "--model", tmp_path)
    with pytest.raises(ModelError, match="no built-in shape of model 'qwen9'"):
        studio("hardware", "--model", "qwen9")


def test_parts_change_what_is_simulated(trace: Path) -> None:
    fast, slow = tpot(trace, *PARTS), tpot(trace, *PARTS[:4], "--link", "pcie3x4")
    assert slow > fast == tpot(trace, "--hardware", "rtx4090+ddr5-6000-2ch+pcie4x16")
    assert fast == tpot(trace), "the default machine is the same combination"
    assert tpot(trace, "--set", "link.issue_ns=1e6") > fast + 1


def test_formats_change_what_is_simulated(trace: Path) -> None:
    runs = {
        name: json.loads(studio("simulate", trace, "--json", "--weights", name)) for name in ("bf16", "q4_k", "q8_0")
    }
    loads = {name: run["loads"] for name, run in runs.items()}
    assert len(set(loads.values())) == 1, "the budget is a share of the experts, so the same ones are loaded"
    assert runs["bf16"]["bytes_loaded"] == loads["bf16"] * 3000 and runs["bf16"]["model"] == "toy:bf16"
    assert runs["q8_0"]["bytes_loaded"] == loads["q8_0"] * 1594 and runs["q4_k"]["bytes_loaded"] == loads["q4_k"] * 844


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "rtx4091"], "unknown gpu 'rtx4091'; did you mean 'rtx4090'"),
        (["--host", "ddr6"], "unknown host 'ddr6'.*known: ddr4-3200-2ch"),
        (["--link", "usb"], "unknown link 'usb'; known: nvlink-c2c"),
        (["--set", "host.cores"], "--set host.cores: wanted NAME=VALUE"),
        (["--set", "host.legs=2"], "unknown hardware number 'host.legs'"),
        (["--hardware", "rtx9999"], "no hardware profile 'rtx9999'.*moe-studio hardware"),
    ],
)
def test_what_does_not_exist_is_one_clear_line(trace: Path, arguments: list[str], message: str) -> None:
    for verb in (["hardware"], ["simulate", trace], ["tune", trace, "--out", trace.with_name("x.toml")]):
        with pytest.raises(StudioError, match=message) as caught:
            studio(*verb, *arguments)
        assert "\n" not in str(caught.value)


def test_sizes_are_needed_for_another_format(tmp_path: Path) -> None:
    mixed_trace(make_shape()).save(tmp_path / "bare.parquet")
    with pytest.raises(ModelError, match="does not say its hidden and expert sizes"):
        studio("simulate", tmp_path / "bare.parquet", "--weights", "q4_k")
    assert Trace.load(tmp_path / "bare.parquet").shape.bytes_per_weight == 2.0
