"""Exports to the other engines, read by the rules that their sources state."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from simulator.config_file import load_config
from simulator.exports import TARGETS
from simulator.exports.freetoken import split_by_profile
from simulator.exports.kt import chosen_experts
from simulator.exports.source import ExportSource
from tests.simulator.builders import make_config
from tests.simulator.export_cases import (
    EXPERT_BYTES,
    config_of,
    exported,
    machine,
    skewed_trace,
    slots,
    sparse_shape,
    text_of,
)
from trace_capture.errors import ConfigError
from trace_capture.statistics import GENERATING, expert_load

SHAPE = sparse_shape()
TRACE = skewed_trace(SHAPE)
COUNTS = expert_load(TRACE, GENERATING)
HALF = config_of({"budget_ratio": 0.5})


def parse(command: str, skip: int, flags: dict[str, Any]) -> argparse.Namespace:
    """The command by the flags that an engine documents: a type, a list of choices, or None for a switch."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name, kind in flags.items():
        if kind is None:
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, **({"choices": kind} if isinstance(kind, list) else {"type": kind}))
    return parser.parse_args(shlex.split(command)[skip:])


KT_FLAGS: dict[str, Any] = {
    "--model-path": str,
    "--kt-method": "AMXINT4 AMXINT8 RAWINT4 FP8 FP8_PERCHANNEL BF16 GPTQ_INT4 LLAMAFILE MXFP4".split(),
    "--kt-weight-path": str,
    "--kt-cpuinfer": int,
    "--kt-threadpool-count": int,
    "--kt-num-gpu-experts": int,
    "--kt-max-deferred-experts-per-token": int,
    "--kt-expert-placement-strategy": ["uniform", "frequency", "front-loading", "random"],
    "--init-expert-location": str,
    "--chunked-prefill-size": int,
    "--context-length": int,
}


def test_kt_counts_are_the_traces_by_decoder_layer() -> None:
    done = exported("kt", HALF, trace=TRACE, hardware=machine())
    given = parse(done.command, 3, KT_FLAGS)
    assert (given.kt_num_gpu_experts, given.kt_cpuinfer, given.kt_method) == (4, 6, "BF16")
    assert given.kt_expert_placement_strategy == "frequency"
    stored = json.loads(text_of(done, "logical_count.json"))
    assert set(stored) == {"logical_count"}, "SGLang gives all other keys on as arguments"
    counts = np.asarray(stored["logical_count"])
    assert counts.shape == (1, SHAPE.num_layers, SHAPE.num_experts), "steps, all decoder layers, experts"
    assert not counts[0, :2].any() and (counts[0, 2:] == COUNTS).all()


def test_kt_keeps_the_hottest_of_all_layers_together() -> None:
    source = ExportSource(HALF, SHAPE, trace=TRACE)
    hot = chosen_experts(source, source.by_decoder_layer(COUNTS), 4)
    assert sum(map(len, hot)) == 4 * 6
    kept = [COUNTS[layer, expert] for layer, ids in enumerate(hot) for expert in ids]
    left = [COUNTS[layer, expert] for layer in range(6) for expert in range(8) if expert not in hot[layer]]
    assert min(kept) >= max(left)
    assert len({len(ids) for ids in hot}) > 1, "the trace is skewed enough to tell this from so many per layer"


def test_kt_layers_on_the_cpu_have_no_counts_and_no_trace_means_no_file() -> None:
    config = config_of(slots(0, 8, 8, 4, 4, 4), cpu={"layers": 1})
    counts = np.asarray(json.loads(text_of(exported("kt", config, trace=TRACE), "logical_count.json"))["logical_count"])
    assert not counts[0, 2].any() and (counts[0, 3:] == COUNTS[1:]).all()
    bare = exported("kt", HALF)
    given = parse(bare.command, 3, KT_FLAGS)
    assert given.init_expert_location is None and given.kt_expert_placement_strategy is None
    assert [file.name for file in bare.files] == ["kt-server.sh"]
    with pytest.raises(ConfigError, match="at least one expert per MoE layer"):
        exported("kt", config_of({"scope": "global", "budget_bytes": 5 * EXPERT_BYTES}))


def test_kt_script_makes_the_tensor_that_the_fork_reads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    done = exported("kt", HALF, trace=TRACE)
    done.write(tmp_path, is_folder=True)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["sh", tmp_path / "kt-server.sh"], env={"PATH": path}, capture_output=True, text=True, cwd="/"
    )
    assert result.stdout.splitlines() == ["-m", "sglang.launch_server", *done.flags], result.stderr
    stored = torch.load(tmp_path / "logical_count.pt", weights_only=True)["logical_count"]
    assert stored.dim() == 3 and (stored.sum(dim=0)[2:].numpy() == COUNTS).all()


FREETOKEN_FLAGS: dict[str, Any] = {
    "--model": str,
    "--moe-strategy": ["auto", "offload", "hybrid", "cpu", "fused"],
    "--moe-cache-policy": ["lru"],
    "--moe-cache-size": int,
    "--moe-cache-scope": ["unified", "per-layer"],
    "--moe-cache-split": str,
    "--moe-cpu-threads": int,
    "--moe-cpu-layers": str,
    "--moe-hybrid-max-fetch": int,
    "--kv-reserve-tokens": int,
    "--moe-collect-stats": None,
}


def test_freetoken_has_the_same_slots_and_a_profile() -> None:
    config = config_of(slots(5, 4, 4, 3, 4, 6))
    done = exported("freetoken", config, trace=TRACE)
    given = parse(done.command, 2, FREETOKEN_FLAGS)
    assert (given.moe_strategy, given.moe_cache_size, given.moe_cache_scope) == ("offload", 26, "per-layer")
    assert given.model == "MODEL", "required, and not positional"
    assert given.moe_cache_split == "profile:profile.json"
    profile = json.loads(text_of(done, "profile.json"))
    assert profile["model"] == "toy" and (np.asarray(profile["expert_counts"]) == COUNTS).all()
    pool = parse(exported("freetoken", config_of({"scope": "global", "budget_ratio": 0.5})).command, 2, FREETOKEN_FLAGS)
    assert (pool.moe_cache_size, pool.moe_cache_scope, pool.moe_cache_split) == (24, "unified", None)


def test_freetoken_profile_split_is_its_rule() -> None:
    """Slots one by one: each layer has top-k, then the next goes to the largest share that is not yet covered."""
    source = ExportSource(config_of(slots(5, 4, 4, 3, 4, 6)), SHAPE, trace=TRACE)
    shares = [sorted((row / row.sum()).tolist(), reverse=True) for row in COUNTS]
    expected = [SHAPE.top_k] * 6
    for _ in range(26 - sum(expected)):
        best = max(range(6), key=lambda layer: shares[layer][expected[layer]] if expected[layer] < 8 else -1)
        expected[best] += 1
    found = split_by_profile(source, 26, COUNTS)
    covered = [sum(share[:count]) for share, count in zip(shares, expected, strict=True)]
    assert sum(found) == 26 and min(found) >= SHAPE.top_k
    assert sum(sum(s[:c]) for s, c in zip(shares, found, strict=True)) == pytest.approx(sum(covered))
    assert sum(split_by_profile(source, 26, None)) == 26


@pytest.mark.parametrize(
    ("cpu", "strategy", "layers"),
    [
        ({"layers": [3], "policy": "none"}, "offload", "3,"),
        ({"layers": [0, 3], "policy": "misses", "admissions": 2}, "hybrid", "0,3,"),
        ({"policy": "threshold", "max_tokens": 2, "admissions": 0}, "hybrid", None),
        ({"layers": "all"}, "cpu", None),
    ],
)
def test_freetoken_layers_are_a_list_and_never_a_count(cpu: dict[str, Any], strategy: str, layers: str | None) -> None:
    gone = range(6) if cpu.get("layers") == "all" else cpu.get("layers", [])
    config = config_of(slots(*(0 if layer in gone else 6 for layer in range(6))), cpu=cpu | {"threads": 3})
    given = parse(exported("freetoken", config).command, 2, FREETOKEN_FLAGS)
    assert (given.moe_strategy, given.moe_cpu_layers, given.moe_cpu_threads) == (strategy, layers, 3)
    assert given.moe_hybrid_max_fetch == (cpu["admissions"] if strategy == "hybrid" else None)


def test_freetoken_refuses_what_it_would_refuse() -> None:
    with pytest.raises(ConfigError, match="at least 8 expert slots in all, and the configuration has 5"):
        exported("freetoken", config_of({"scope": "global", "budget_bytes": 5 * EXPERT_BYTES}))


@pytest.mark.parametrize(("ratio", "away"), [(0.5, 3), (0.34, 4), (0.9, 1), (1.0, 0)])
def test_vllm_offloads_exactly_the_first_layers(ratio: float, away: int) -> None:
    done = exported("vllm", config_of({"budget_ratio": ratio}), context=4096)
    flags = {"--cpu-offload-gb": float, "--cpu-offload-params": str, "--max-model-len": int}
    given = parse(done.command, 3, flags)
    assert given.max_model_len == 4096
    if not away:
        assert given.cpu_offload_gb is None
        return
    assert given.cpu_offload_params == "experts"
    limit, moved, layers = given.cpu_offload_gb * 2**30, 0, []
    for layer in range(6):
        for size in (EXPERT_BYTES * 16 // 3, EXPERT_BYTES * 8 - EXPERT_BYTES * 16 // 3):  # w13, w2
            if moved < limit:
                moved += size
                layers.append(layer)
    assert sorted(layers * 1) == sorted([*range(away)] * 2), "both weights of each, and no third layer's"
    text = text_of(done, "vllm-serve.sh")
    found = re.search(r"--offload-group-size (\d+) --offload-num-in-group (\d+) --offload-prefetch-step 1", text)
    assert found is not None
    group, count = map(int, found.groups())
    assert 1 <= count < group and count / group >= away / 6


def test_moe_infinity_knows_a_share_of_memory() -> None:
    done = exported("moe-infinity", HALF, hardware=machine())
    config = json.loads(text_of(done, "moe_infinity.json"))
    keys = {"offload_path", "trace_capacity", "trace_path", "device_memory_ratio", "host_memory_ratio", "num_threads"}
    assert set(config) <= keys and {"offload_path", "device_memory_ratio"} <= set(config)
    assert config["device_memory_ratio"] == pytest.approx(24 * EXPERT_BYTES / 1e9, abs=1e-4)
    assert config["device_memory_ratio"] * 1e9 <= 24 * EXPERT_BYTES and config["num_threads"] == 6
    about = text_of(done, "moe-infinity.about.txt")
    assert "MoE-Infinity at commit d617801" in about and "Not expressed: the cache policy 'lru' is lost" in about
    with pytest.raises(ConfigError, match="name it with --hardware"):
        exported("moe-infinity", HALF)
    with pytest.raises(ConfigError, match="no share of it that MoE-Infinity could be given"):
        exported("moe-infinity", HALF, hardware=machine(memory_bytes=1e6))


@pytest.mark.parametrize("counts", [(8, 2, 2, 7, 2, 3), (4, 4, 4, 4, 4, 4), (8,) * 6])
def test_ktransformers_rules_match_the_modules_they_mean(counts: tuple[int, ...]) -> None:
    done = exported("ktransformers", config_of(slots(*counts)))
    rules = yaml.safe_load(text_of(done, "experts.yaml"))
    devices = []
    for layer in range(2, 8):
        name = f"model.layers.{layer}.mlp.experts"
        rule = next(rule for rule in rules if re.search(rule["match"]["name"], name))
        kwargs = rule["replace"]["kwargs"]
        assert rule["recursive"] is False and rule["replace"]["class"].endswith(".KTransformersExperts")
        assert (kwargs["generate_device"], kwargs["generate_op"]) in (
            ("cuda", "KExpertsMarlin"),
            ("cpu", "KExpertsCPU"),
        )
        devices.append(kwargs["generate_device"])
        for other in (f"model.layers.{layer}.mlp.gate", f"model.layers.{layer}.mlp.experts.0", f"xmodel.{name}"):
            assert not any(re.search(rule["match"]["name"], other) for rule in rules)
    expected = {(8, 2, 2, 7, 2, 3): "cuda cpu cpu cuda cpu cuda", (8,) * 6: " ".join(["cuda"] * 6)}
    assert " ".join(devices) == expected.get(counts, "cpu cpu cpu cuda cuda cuda")


def test_fitz_pins_by_count_under_decoder_layers() -> None:
    done = exported("fitz", HALF, trace=TRACE)
    lines = [line for line in text_of(done, "experts.pinlist").splitlines() if not line.startswith("#")]
    assert lines[:2] == ["n_layer 8", "n_expert 8"] and len(lines) == 10
    lists = {int(line.split(":")[0].split()[1]): [int(x) for x in line.split(":")[1].split()] for line in lines[2:]}
    assert lists[0] == lists[1] == []
    for layer in range(6):
        ids = lists[layer + 2]
        assert [int(COUNTS[layer, expert]) for expert in ids] == sorted(COUNTS[layer][COUNTS[layer] > 0], reverse=True)
    assert done.flags == ("--capacity", "4", "--pinned", "2", "--pin-list", "experts.pinlist")
    with pytest.raises(ConfigError, match="give the trace with --trace"):
        exported("fitz", HALF)


def test_native_file_is_the_configuration(tmp_path: Path) -> None:
    config = make_config("lfu-ageing", slots_per_layer=[4, 5, 8, 2, 2, 2]).model_copy(update={"label": "mine @ABOUT@"})
    paths = exported("native", config, trace=TRACE).write(tmp_path / "my.toml", is_folder=False)
    assert paths == [tmp_path / "my.toml"] and load_config(paths[0]) == config


@pytest.mark.parametrize("target", TARGETS)
def test_every_export_says_version_trace_prediction_and_what_is_lost(target: str) -> None:
    config = config_of(
        slots(5, 4, 4, 3, 4, 6, policy="lfu-ageing"),
        prefetch={"source": "quasi-hidden", "mode": "commit"},
        prefill={"strategy": "stream"},
    )
    done = exported(target, config, trace=TRACE, hardware=machine())
    said = "\n".join(file.text for file in done.files)
    assert TARGETS[target].engine in said and TRACE.digest in said
    assert f"In MoE Offload Studio: {done.configured.text}" in said
    if target == "native":
        assert not done.lost
        return
    assert f"With these files: {done.predicted.text}" in said
    assert any("prefetch from 'quasi-hidden' is lost" in sentence for sentence in done.lost)
    assert any("(commit) is lost" in sentence for sentence in done.lost)
    assert any("lfu-ageing" in sentence for sentence in done.lost)
    assert all(f"Not expressed: {sentence}" in said for sentence in done.lost)
    assert "@ABOUT@" not in said and "pickle" not in said
