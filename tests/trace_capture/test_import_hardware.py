"""Rates that FreeToken and llama-bench measured become hardware profiles; the simulator's host model, fed with
them, gives back what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.costs.host import HostCosts
from trace_capture.errors import ProfileError
from trace_capture.importers.calibration import Calibrated, calibrated
from trace_capture.importers.freetoken_bandwidth import is_freetoken_bandwidth, read_freetoken_bandwidth
from trace_capture.importers.llama_bench import is_llama_bench, read_llama_bench
from trace_capture.known_shapes import known_shape

KIND = "gguf[down_type=8,gate_up_type=8]:2048x768:top8:t12"
PATH = Path("benchbw/GPU-1.json")
SHAPE = known_shape("qwen3-30b-a3b:q4_k_m")


def bandwidth(row: dict[str, Any] | None = None, **top: Any) -> str:
    """The figures of FreeToken pull request 232: 63.8 and 24.9 GB/s alone, 54.0 and 23.9 together."""
    rates = {
        "cpu_moe_gbs": 63.8,
        "pcie_gather_gbs": 24.9,
        "cpu_moe_overlap_gbs": 54.0,
        "pcie_gather_overlap_gbs": 23.9,
        "cpu_threads": 12,
        "note": None,
    }
    content = {
        "version": 6,
        "timestamp": "2026-10-01",
        "gpu": {"index": 0, "name": "NVIDIA GeForce RTX 4090", "uuid": "GPU-1"},
        "cpu": {"model": "x", "physical_cores": 16, "numa_nodes": 1},
        "ceilings": {"cpu_stream_read_gbs": 84.4, "pcie_linear_h2d_gbs": 25.2, "pcie_linear_d2h_gbs": 26.0},
        "layer_kinds": {KIND: rates | (row or {})},
    }
    return json.dumps(content | top)


def from_freetoken(text: str, **parts: Any) -> Calibrated:
    assert is_freetoken_bandwidth(text)
    return calibrated(read_freetoken_bandwidth(text, PATH), **parts)


def test_rates_alone_and_together() -> None:
    result = from_freetoken(bandwidth())
    profile, host = result.profile, result.profile.host
    assert host is not None and profile.device.name.startswith("NVIDIA GeForce RTX 4090 24")
    assert profile.link.h2d_bytes_per_s.value == 25.2e9 and profile.link.h2d_bytes_per_s.kind == "measured"
    assert "GPU-1.json" in profile.link.h2d_bytes_per_s.source
    assert host.ram_bytes_per_s.value == 84.4e9 and host.cores.value == 16
    assert host.threads is not None and host.threads.value == 12
    assert host.contended_ratio.value == pytest.approx((54.0 + 23.9) / 84.4)
    assert {"link.h2d_bytes_per_s", "host.read_ratio", "host.contended_ratio"} <= set(result.measured)
    assert "core_bytes_per_s" not in " ".join(result.measured) and profile.measured is None


@pytest.mark.parametrize("expert_bytes", [500_000, 2_600_000, 50_000_000])
def test_the_host_model_gives_the_measured_rate_back(expert_bytes: int) -> None:
    costs = HostCosts(from_freetoken(bandwidth()).profile)
    assert costs.bytes_per_s(expert_bytes, 0.56) == pytest.approx(63.8e9)
    both = costs.contention(expert_bytes, 0.56, 24.9e9)
    assert 63.8 / both.cpu_ratio + 24.9 / both.copy_ratio == pytest.approx(54.0 + 23.9)


def test_other_numbers_come_from_the_nearest_parts_and_say_so(tmp_path: Path) -> None:
    result = from_freetoken(bandwidth())
    assert any("are those of pcie4x16, the nearest that ships" in note for note in result.notes)
    assert any("host's other numbers are those of ddr4-3200-8ch" in note for note in result.notes)
    named = from_freetoken(bandwidth(), gpu="rtx3090", host="ddr4-3200-8ch", link="pcie3x16")
    assert named.profile.link.name == "PCIe 3.0 x16" and named.profile.link.h2d_bytes_per_s.value == 25.2e9
    assert any("measured on 'NVIDIA GeForce RTX 4090', and all numbers of the device" in note for note in named.notes)
    named.profile.save(tmp_path / "hw.toml")
    assert type(named.profile).load(tmp_path / "hw.toml") == named.profile


def test_what_was_not_measured_stays_the_parts() -> None:
    row = {"cpu_moe_gbs": None, "cpu_moe_overlap_gbs": None, "pcie_gather_overlap_gbs": None}
    result = from_freetoken(bandwidth(row), host="ddr5-6000-2ch")
    assert result.profile.host is not None and result.profile.host.contended_ratio.value == 0.9
    assert "host.read_ratio" not in result.measured and any("not measured together" in n for n in result.notes)
    bare = from_freetoken(bandwidth(layer_kinds={}), host="ddr5-6000-2ch")
    assert set(bare.measured) == {"link.h2d_bytes_per_s", "host.ram_bytes_per_s", "host.cores"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bandwidth(version=5), "has version 5, this program reads 6"),
        (bandwidth({"cpu_moe_gbs": -1}), "cpu_moe_gbs is -1, wanted a positive number"),
        (bandwidth({"cpu_moe_gbs": "fast"}), "cpu_moe_gbs is 'fast'"),
        (bandwidth(ceilings=None), "lacks 'ceilings'"),
        (bandwidth(layer_kinds={"a": {}, "b": {}}), "several layer kinds; give --layer-kind, one of: a, b"),
        (bandwidth(gpu={"name": "NVIDIA Moon"}), "was made on 'NVIDIA Moon': give --gpu"),
        (bandwidth()[:-9], "is not JSON"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        from_freetoken(text)


def token_s(cpu_moe: int, rate: float = 50e9, layer_ns: float = 0.0) -> float:
    """Seconds per token of a machine whose cores take experts at `rate` and whose device takes 5 ms for all else."""
    layer_bytes = SHAPE.top_k * SHAPE.expert_bytes[0]
    return 5e-3 - cpu_moe * layer_bytes / 900e9 + cpu_moe * (layer_bytes / rate + layer_ns / 1e9)


def result(cpu_moe: int, **fields: Any) -> dict[str, Any]:
    seconds = token_s(cpu_moe, layer_ns=1e5)
    row = {"backends": "CUDA", "gpu_info": "NVIDIA GeForce RTX 4090", "model_type": "qwen3moe 30B.A3B Q4_K - Medium"}
    row |= {"n_threads": 12, "n_gpu_layers": 99, "n_cpu_moe": cpu_moe, "n_prompt": 0, "n_gen": 128, "n_depth": 0}
    row |= {"avg_ns": round(128e9 * seconds), "avg_ts": 1 / seconds, "stddev_ts": 0.1}
    return row | fields


def written(rows: list[dict[str, Any]], form: str) -> str:
    if form == "json":
        return json.dumps(rows)
    if form == "jsonl":
        return "\n".join(map(json.dumps, rows)) + "\n"
    if form == "csv":
        lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
        return "\n".join(lines) + "\n"
    if form == "sql":
        lines = ["CREATE TABLE IF NOT EXISTS llama_bench (", "  n_gen INTEGER,", "  avg_ts REAL", ");", ""]
        for row in rows:
            values = ", ".join(f"'{value}'" for value in row.values())
            lines.append(f"INSERT INTO llama_bench ({', '.join(row)}) VALUES ({values});")
        return "\n".join(lines) + "\n"
    lines = ["| model | size | params | backend | ngl | n_cpu_moe | threads |            test |                  t/s |"]
    lines += ["| --- | ---: | ---: | --- | --: | --: | --: | --------------: | -------------------: |"]
    for row in rows:
        test = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        lines.append(
            f"| qwen3moe | 17.3 GiB | 30.5 B | {row['backends']} | {row['n_gpu_layers']} | {row['n_cpu_moe']} | "
            f"{row['n_threads']} | {test} | {row['avg_ts']:.6f} ± 0.05 |"
        )
    return "\n".join([*lines, "", "build: 1234abcd (5000)"]) + "\n"


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "sql", "markdown"])
def test_two_numbers_of_layers_tell_the_rate_of_experts_on_the_cpu(form: str) -> None:
    rows = [result(0, n_prompt=512, n_gen=0, avg_ts=3000.0), result(16), result(40)]
    text = written(rows, form)
    assert is_llama_bench(text) and not is_freetoken_bandwidth(text)
    found = read_llama_bench(text, Path("bench"), SHAPE, 900e9, layer_ns=1e5)
    assert found.cpu_experts == pytest.approx(50e9, rel=1e-3) and found.threads == 12
    assert "n_cpu_moe 16 and 40, 24 MoE layers apart" in found.source


def test_results_without_a_gpu_tell_the_rate_over_all_weights() -> None:
    moved = SHAPE.bytes_per_token + sum(SHAPE.dense_bytes) + SHAPE.head_bytes
    text = written([result(0, backends="CPU", n_gpu_layers=0, avg_ts=40e9 / moved)], "json")
    found = read_llama_bench(text, Path("bench"), SHAPE, 900e9, 0)
    assert found.cpu_experts == pytest.approx(40e9) and found.gpu is None


def test_of_several_numbers_of_threads_the_fastest_is_taken_and_said() -> None:
    rows = [
        result(0, backends="CPU", n_gpu_layers=0, n_threads=n, avg_ts=rate) for n, rate in ((4, 9), (8, 12), (16, 5))
    ]
    found = read_llama_bench(written(rows, "json"), Path("bench"), SHAPE, 900e9, 0)
    assert found.threads == 8 and any("slower results with 4, 16 threads" in note for note in found.notes)
    alone = read_llama_bench(written(rows[:1], "json"), Path("bench"), SHAPE, 900e9, 0)
    assert not any("slower results" in note for note in alone.notes)


def test_results_of_other_settings_are_not_paired() -> None:
    for other in (result(40, n_threads=6), result(40, n_gpu_layers=20), result(40, n_depth=4096)):
        with pytest.raises(ProfileError, match="tells nothing of experts on the CPU: run llama-bench with two values"):
            read_llama_bench(written([result(16), other], "json"), Path("bench"), SHAPE, 900e9, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (written([result(16, avg_ts=30.0), result(40, avg_ts=300.0)], "json"), "more experts on the CPU cost no time"),
        (written([result(0, n_prompt=512, n_gen=0)], "json"), "has no result of generation"),
        (written([result(16, avg_ts="fast")], "json"), "lacks a field or a number"),
        (written([result(16), result(40)], "json")[:-9], "is cut or edited"),
    ],
)
def test_other_results_are_refused(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        read_llama_bench(text, Path("bench"), SHAPE, 900e9, 0)
