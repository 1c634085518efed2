"""What exports promise, and the verb that writes them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from runtime.cli import main
from simulator import simulate
from simulator.config_file import save_config
from simulator.exports import TARGETS
from simulator.exports.prediction import engine_band
from simulator.policies.config import OffloadConfig, Provenance, parse_config
from simulator.tune import split_trace
from tests.simulator.builders import make_hardware, make_measured
from tests.simulator.export_cases import config_of, exported, machine, skewed_trace, slots, sparse_shape
from trace_capture.band import ErrorBand
from trace_capture.errors import ConfigError, StudioError
from trace_capture.trace import Trace

SHAPE = sparse_shape()
TRACE = skewed_trace(SHAPE)
HALF = config_of({"budget_ratio": 0.5})


def tuned(band: float | None, config: OffloadConfig = HALF) -> OffloadConfig:
    provenance = Provenance(
        model="toy",
        trace_digest=TRACE.digest,
        hardware="toy machine",
        hardware_digest=machine().digest,
        predicted_tpot_ms=12.5,
        predicted_hit_rate=0.5,
        error_band=None if band is None else ErrorBand(low_ratio=1 - band, high_ratio=1 + 2 * band),
    )
    return config.model_copy(update={"provenance": provenance})


def test_no_number_is_told_without_a_band() -> None:
    done = exported("llama.cpp", tuned(None), trace=TRACE, hardware=machine())
    assert done.configured.tpot_ms is None and set(done.configured.as_json()) == {"text"}
    assert "no band: not validated" in done.configured.text and not re.search(r"\d", done.configured.text)
    assert "12.5" not in "".join(file.text for file in done.files)
    banded = exported("llama.cpp", tuned(0.1)).configured
    assert banded.text.startswith("predicted 12.5 ms per output token (80 tokens/s), expected between 11.2 and 15 ms")
    assert banded.as_json()["high_ms"] == pytest.approx(15.0)


def test_bands_come_from_published_measurements_of_that_engine_and_strategy() -> None:
    band = engine_band("llama.cpp", "layer_split")
    assert band is not None and band.count >= 5 and "layer split rates of llama.cpp engines" in band.source
    other = engine_band("nobody", "layer_split")
    assert other is not None and other.count > band.count and "other engines" in other.source


def test_compute_measured_with_our_engine_says_nothing_about_another() -> None:
    profile = make_hardware(host=machine().host, measured=make_measured())
    done = exported("llama.cpp", HALF, trace=TRACE, hardware=profile)
    assert done.predicted.tpot_ms == exported("llama.cpp", HALF, trace=TRACE, hardware=machine()).predicted.tpot_ms


def test_target_is_predicted_by_what_it_does_on_tokens_it_was_not_counted_on() -> None:
    held_out = split_trace(TRACE)[1]
    whole = {"cache": {"policy": "resident", "slots_per_layer": [0, 0, 0, 8, 8, 8]}, "cpu": {"layers": 3}}
    expected = simulate(held_out, machine(), parse_config(whole), bounds=False).metrics.tpot_ms
    assert exported("llama.cpp", HALF, trace=TRACE, hardware=machine()).predicted.tpot_ms == expected
    as_lru = {"cache": {"slots_per_layer": [4] * 6}, "prefill": {"strategy": "stream"}}
    expected = simulate(held_out, machine(), parse_config(as_lru), bounds=False).metrics.tpot_ms
    found = exported("freetoken", config_of({"scope": "global", "budget_ratio": 0.5}), trace=TRACE, hardware=machine())
    assert found.predicted.tpot_ms is not None and found.predicted.tpot_ms != expected, (
        "one pool is not slots per layer"
    )
    hot = exported("kt", HALF, trace=TRACE, hardware=machine()).predicted
    assert hot.tpot_ms is not None and hot.band is not None


def test_hot_experts_of_a_prediction_are_not_counted_on_what_it_replays() -> None:
    """Counts of held-out tokens are moved to other experts: files change, what is replayed does not."""

    held_out = np.isin(TRACE.sequence, split_trace(TRACE)[1].sequences())
    turned = np.where(held_out[:, None, None] & (TRACE.experts < 8), 7 - TRACE.experts, TRACE.experts)
    other = replace(TRACE, experts=turned.astype(np.uint16))
    first, second = (exported("kt", HALF, trace=trace, hardware=machine()) for trace in (TRACE, other))
    assert first.files[1].text != second.files[1].text
    assert first.predicted.tpot_ms is not None and second.predicted.tpot_ms is not None
    assert second.predicted.tpot_ms > first.predicted.tpot_ms, "the training part's experts do not serve these tokens"


def test_another_engine_is_not_predicted_from_an_emulated_link_or_without_a_host() -> None:
    emulated = machine().model_copy(update={"emulated": True})
    said = exported("llama.cpp", HALF, trace=TRACE, hardware=emulated).predicted
    assert said.tpot_ms is None and "is emulated, which says nothing about another engine" in said.text
    hostless = machine().model_copy(update={"host": None})
    assert "host" in exported("llama.cpp", HALF, trace=TRACE, hardware=hostless).predicted.text
    assert "needs a trace and a machine" in exported("llama.cpp", HALF).predicted.text


def test_other_trace_other_machine_and_too_little_memory_are_said() -> None:
    small = machine(memory_bytes=1e6)
    done = exported("llama.cpp", tuned(0.1), trace=TRACE.rows(TRACE.sequence < 2), hardware=small)
    about = "\n".join(done.about)
    assert "tuned on another trace" in about and "tuned for another machine" in about and "Too much:" in about


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"unknown target 'lama.cpp'; did you mean 'llama.cpp'\?"):
        exported("lama.cpp", HALF)
    with pytest.raises(
        ConfigError, match="the routing is of toy .6 MoE layers x 8 experts. and the model is toy .5 x 8"
    ):
        exported("llama.cpp", HALF, shape=sparse_shape(layers=5), trace=TRACE)
    with pytest.raises(ConfigError, match="slots_per_layer has 3 entries"):
        exported("llama.cpp", config_of(slots(4, 4, 4)))
    with pytest.raises(ConfigError, match="architecture 'llama9' are not known here"):
        exported("accelerate", HALF, shape=sparse_shape(architecture="llama9"))


def test_writing_is_atomic(tmp_path: Path, monkeypatch: Any) -> None:
    done = exported("llama.cpp", HALF)
    (tmp_path / "llama-server.sh").write_text("before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(StudioError, match="No space left"):
        done.write(tmp_path, is_folder=True)
    assert [path.name for path in tmp_path.iterdir()] == ["llama-server.sh"]
    assert (tmp_path / "llama-server.sh").read_text() == "before"


class Said(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def studio(*arguments: object) -> Said:
    """The command line, started as the installed program starts it."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["moe-studio", *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("tuned")
    save_config(tuned(0.1), folder / "tuned.toml")
    TRACE.save(folder / "t.parquet")
    machine().save(folder / "machine.toml")
    return folder / "tuned.toml", folder / "t.parquet", folder / "machine.toml"


def test_all_targets_get_a_folder(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    config, trace, hardware = files
    result = studio("export", config, "--all", "--trace", trace, "--hardware", hardware, "--out", tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert set(said["exports"]) == set(TARGETS) and not said["refused"]
    assert {path.name for path in tmp_path.iterdir()} == set(TARGETS)
    for one in said["exports"].values():
        assert one["paths"] and all(Path(path).stat().st_size for path in one["paths"])
    assert said["exports"]["llama.cpp"]["predicted"]["low_ms"] > 0


def test_one_target_as_a_file_with_its_weights(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    config, trace, _ = files
    out = tmp_path / "start.sh"
    arguments = ("export", config, "--target", "kt", "--trace", trace, "--gguf", "/m/q.gguf", "--out", out)
    result = studio(*arguments)
    assert result.returncode == 0, result.stderr
    assert "--model-path /m/q.gguf" in out.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logical_count.json", "start.sh"]
    for place in ("llama.cpp", "plain", "dotted.d/"):
        studio("export", config, "--target", "llama.cpp", "--trace", trace, "--out", f"{tmp_path}/{place}")
        assert {path.name for path in (tmp_path / place).iterdir()} == {"llama-server.sh", "preset.ini"}
    studio("export", config, "--target", "llama.cpp", "--trace", trace, "--out", tmp_path / "start.sh")
    assert (tmp_path / "start.sh").is_file() and (tmp_path / "preset.ini").is_file(), (
        "the first file, and one beside it"
    )
    shown = studio("export", config, "--target", "llama.cpp", "--trace", trace)
    assert shown.stdout.startswith("#!/bin/sh\n") and "exec llama-server" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--target", "kt"), "'toy', the configuration's model, has no built-in shape: give --trace t.parquet"),
        ((), "give one of --target NAME and --all; 'moe-studio export --list' shows the targets"),
        (("--all",), "say where with --out FOLDER"),
        (("--target", "lama", "--model", "qwen3-30b-a3b"), "unknown target 'lama'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(
    files: tuple[Path, Path, Path], tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    out = [] if arguments == ("--all",) else ["--out", tmp_path / "new"]
    result = studio("export", files[0], *arguments, *out)
    assert result.returncode == 2 and expected in result.stderr and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_impossible_mapping_writes_nothing(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, trace, _ = files
    save_config(config_of({"scope": "global", "budget_bytes": 5 * (2 << 20)}), tmp_path / "small.toml")
    result = studio("export", tmp_path / "small.toml", "--target", "kt", "--trace", trace, "--out", tmp_path / "kt")
    assert result.returncode == 2 and "kt needs room for at least one expert per MoE layer" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


def test_list_names_every_target_and_its_version() -> None:
    said = studio("export", "--list").stdout
    assert all(name in said and target.engine in said for name, target in TARGETS.items())


def test_trace_is_put_into_the_format_it_was_tuned_in(tmp_path: Path) -> None:
    shape = sparse_shape(hidden_size=1024, moe_intermediate_size=341, weight_dtype="bfloat16")
    trace: Trace = skewed_trace(shape)
    trace.save(tmp_path / "t.parquet")
    provenance = tuned(0.1).provenance
    assert provenance is not None
    config = HALF.model_copy(update={"provenance": provenance.model_copy(update={"model": "toy:q4_k"})})
    save_config(config, tmp_path / "tuned.toml")
    result = studio("export", tmp_path / "tuned.toml", "--target", "kt", "--trace", tmp_path / "t.parquet", "--json")
    assert result.returncode == 0, result.stderr
    flags = json.loads(result.stdout)["flags"]
    assert flags[flags.index("--kt-method") + 1] == "LLAMAFILE"
