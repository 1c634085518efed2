"""Exports to llama.cpp and ik_llama.cpp, read as those programs read them."""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.exports import Export
from tests.simulator.export_cases import config_of, exported, machine, skewed_trace, slots, sparse_shape, text_of
from trace_capture.errors import ConfigError
from trace_capture.rewindow import rewindow

LAYERS = 8
EXPERT_TENSORS = ("up", "down", "gate", "gate_up")
OTHER_TENSORS = ("attn_q.weight", "ffn_gate_inp.weight", "ffn_up.weight", "ffn_up_shexp.weight", "ffn_norm.weight")
KINDS = "none,draft-simple,draft-eagle3,draft-mtp,draft-dflash,draft-dspark,ngram-simple,ngram-map-k,ngram-mod"


class Documented(argparse.ArgumentParser):
    """The flags that tools/server/README.md and docs/parameters.md list, as far as exports may use them."""

    def __init__(self, is_ik: bool) -> None:
        super().__init__(exit_on_error=False, allow_abbrev=False)
        self.add_argument("-m", "--model", required=True)
        self.add_argument("-md", "--model-draft", *([] if is_ik else ["--spec-draft-model"]))
        self.add_argument("-ngl", "--gpu-layers", "--n-gpu-layers", required=True)
        self.add_argument("-ot", "--override-tensor", default="")
        self.add_argument("-cmoe", "--cpu-moe", action="store_true")
        self.add_argument("-ncmoe", "--n-cpu-moe", type=int, default=0)
        for names in (("-c", "--ctx-size"), ("-b", "--batch-size"), ("-ub", "--ubatch-size"), ("-t", "--threads")):
            self.add_argument(*names, type=int)
        if is_ik:
            self.add_argument("--spec-type")
            return
        self.add_argument("-fit", "--fit", choices=("on", "off"), default="on")
        self.add_argument("--spec-type", choices=KINDS.split(","))
        self.add_argument("--spec-draft-n-max", type=int)
        self.add_argument("--spec-ngram-simple-size-m", type=int)


def parsed(done: Export) -> argparse.Namespace:
    return Documented(done.target != "llama.cpp").parse_args(shlex.split(done.command)[1:])


def layers_on_cpu(given: argparse.Namespace) -> set[int]:
    """Layers whose expert tensors end in host memory, each wholly or not at all; nothing else may end there."""
    patterns = [one.rpartition("=") for one in given.override_tensor.split(",") if one]
    if given.cpu_moe:
        patterns.append((r"\.ffn_(up|down|gate|gate_up)_(ch|)exps", "=", "CPU"))
    regex = r"blk\.%d\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    patterns += [(regex % layer, "=", "CPU") for layer in range(given.n_cpu_moe)]

    def is_moved(name: str) -> bool:
        return any(buffer == "CPU" and re.search(pattern, name) for pattern, _, buffer in patterns)

    found = set()
    for layer in range(25):  # also layers whose number holds another's
        moved = [is_moved(f"blk.{layer}.ffn_{name}_exps.weight") for name in EXPERT_TENSORS]
        assert all(moved) or not any(moved)
        assert not any(is_moved(f"blk.{layer}.{name}") for name in OTHER_TENSORS)
        if all(moved) and layer < LAYERS:
            found.add(layer)
        assert layer < LAYERS or given.cpu_moe or not any(moved)
    return found - {0, 1}  # dense layers have no expert tensors


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[int], str | None]] = {
    # cache, cpu, decoder layers whose experts are on the CPU, the flag that says so
    "half of the bytes, evenly": ({"budget_ratio": 0.5}, {}, {2, 3, 4}, "--n-cpu-moe"),
    "slots that differ by one are even": (slots(5, 5, 5, 4, 4, 4), {}, {2, 3, 4}, "--n-cpu-moe"),
    "where slots are many, layers stay": (slots(8, 2, 2, 7, 2, 3), {}, {3, 4, 6}, "-ot"),
    "layers the configuration puts there": (slots(8, 8, 8, 8, 0, 8, policy="resident"), {"layers": [4]}, {6}, "-ot"),
    "the first layers": (slots(0, 0, 8, 8, 8, 8, policy="resident"), {"layers": 2}, {2, 3}, "--n-cpu-moe"),
    "all layers": (slots(0, 0, 0, 0, 0, 0), {"layers": "all"}, {2, 3, 4, 5, 6, 7}, "--cpu-moe"),
    "no room for a whole layer": (slots(*[2] * 6) | {"slots_per_layer": None, "budget_bytes": 7 << 21,
                                                     "scope": "global"}, {}, {2, 3, 4, 5, 6, 7}, "--cpu-moe"),
    "everything fits": ({"budget_ratio": 1.0}, {}, set(), None),
}  # fmt: skip


@pytest.mark.parametrize("target", ["llama.cpp", "ik_llama.cpp"])
@pytest.mark.parametrize("case", CASES)
def test_exactly_the_intended_layers_leave_the_device(case: str, target: str) -> None:
    cache, cpu, expected, flag = CASES[case]
    done = exported(target, config_of({k: v for k, v in cache.items() if v is not None}, cpu=cpu))
    given = parsed(done)
    assert layers_on_cpu(given) == expected
    used = {name for name in ("--n-cpu-moe", "-ot", "--cpu-moe") if name in done.flags}
    assert used == ({flag} if flag else set())
    if flag == "--n-cpu-moe":
        assert given.n_cpu_moe == max(expected) + 1, "dense layers in front count"


def test_fit_params_line_names_the_same_layers() -> None:
    done = exported("llama.cpp", config_of({"budget_ratio": 0.5}), context=4096)
    line = next(line for line in text_of(done, "llama-server.sh").splitlines() if "llama-fit-params" in line)
    words = shlex.split(line.split(": ", 1)[1])
    assert words[:4] == ["-c", "4096", "-ngl", "99"]
    assert layers_on_cpu(Documented(False).parse_args(["-m", "x", *words])) == {2, 3, 4}


def test_sizes_threads_and_fit_are_said() -> None:
    config = config_of({"budget_ratio": 0.5}, prefill={"micro_batch": 4096}, cpu={"policy": "misses", "threads": 5})
    given = parsed(exported("llama.cpp", config, context=8192, model_path="/m/a b.gguf", hardware=machine()))
    assert (given.model, given.ctx_size, given.threads, given.fit) == ("/m/a b.gguf", 8192, 5, "off")
    assert (given.ubatch_size, given.batch_size) == (4096, 4096), "-ub is cut to -b, whose default is 2048"
    one = config_of({"budget_ratio": 0.5}, cpu={"policy": "misses", "threads": 1})
    assert parsed(exported("llama.cpp", one, hardware=machine())).threads == 1, "as chosen, not the host's six"
    plain = parsed(exported("llama.cpp", config_of({"budget_ratio": 0.5}), hardware=machine()))
    assert (plain.threads, plain.ubatch_size, plain.ctx_size) == (6, None, None), "the host's cores; defaults"


@pytest.mark.parametrize("target", ["llama.cpp", "ik_llama.cpp"])
def test_drafts_of_the_trace_become_flags(target: str) -> None:
    shape = sparse_shape()
    trace = rewindow(skewed_trace(shape), 4, 0.7, draft_bytes=1 << 20)
    given = parsed(exported(target, config_of({"budget_ratio": 0.5}), trace=trace, draft_model="d.gguf"))
    assert given.model_draft == "d.gguf"
    if target == "llama.cpp":
        assert (given.spec_type, given.spec_draft_n_max) == ("draft-simple", 4)
    else:
        assert given.spec_type == "draft:n_max=4"
    draft = trace.info.draft
    assert draft is not None
    info = trace.info.model_copy(update={"draft": draft.model_copy(update={"kind": "prompt-lookup"})})
    looked_up = replace(trace, info=info)
    given = parsed(exported(target, config_of({"budget_ratio": 0.5}), trace=looked_up))
    if target == "llama.cpp":
        assert (given.spec_type, given.spec_ngram_simple_size_m) == ("ngram-simple", 4)
    else:
        assert given.spec_type == "ngram-simple:n_max=4"


@pytest.mark.parametrize("target", ["llama.cpp", "ik_llama.cpp"])
def test_drafts_that_the_tuner_chose_become_flags(target: str) -> None:
    trace = skewed_trace(sparse_shape())
    tuned = {"predicted_tpot_ms": 1.0, "predicted_hit_rate": 0.5, "trace_digest": trace.digest}
    names = {"model": "toy", "hardware": "toy", "hardware_digest": "none"}
    given = {}
    for gamma in (None, 0, 3):
        config = config_of({"budget_ratio": 0.5}, provenance=tuned | names | {"gamma": gamma})
        done = exported(target, config, trace=trace, draft_model="d.gguf")
        given[gamma] = parsed(done)
        assert any("the draft model is left out" in note for note in done.notes) == (not gamma)
        assert any("predicted without drafts" in note for note in done.notes) == bool(gamma)
    assert given[None].model_draft is None and given[0].model_draft is None
    assert given[3].model_draft == "d.gguf"
    wanted = "draft-simple" if target == "llama.cpp" else "draft:n_max=3"
    assert given[3].spec_type == wanted and (target != "llama.cpp" or given[3].spec_draft_n_max == 3)


@pytest.mark.parametrize("target", ["llama.cpp", "ik_llama.cpp"])
def test_drafts_are_in_the_predicted_speed_as_the_tuner_assumed_them(target: str) -> None:
    """Nearly all drafts kept, by a draft model that weighs nothing: a pass gives several tokens, so less time each."""
    trace = skewed_trace(sparse_shape())
    tuned = {"predicted_tpot_ms": 1.0, "predicted_hit_rate": 0.5, "trace_digest": trace.digest}
    tuned |= {"model": "toy", "hardware": "toy", "hardware_digest": "none"}
    found = {}
    for gamma, kept, draft_bytes in ((0, None, 0), (3, 0.95, 0), (3, 0.95, 1 << 30), (3, 0.0, 0)):
        drafts = {"gamma": gamma, "acceptance_ratio": kept, "draft_bytes": draft_bytes}
        config = config_of({"budget_ratio": 0.5}, provenance=tuned | drafts)
        done = exported(target, config, trace=trace, hardware=machine())
        found[kept, draft_bytes] = done.predicted.tpot_ms
        said = any("predicted with drafts of which 95 % are kept" in note for note in done.notes)
        assert said == (kept == 0.95)
    assert None not in found.values()
    assert found[0.95, 0] < found[None, 0] < found[0.0, 0], "drafts that are dropped cost their experts"
    assert found[0.95, 1 << 30] > found[0.95, 0], "a draft model takes time"
    assert exported("kt", config, trace=trace, hardware=machine()).predicted.tpot_ms is not None


def test_preset_holds_the_flags_of_the_command() -> None:
    config = config_of(slots(8, 2, 2, 7, 2, 3), prefill={"micro_batch": 1024})
    done = exported("llama.cpp", config, context=4096, model_path="/m/q.gguf")
    text = text_of(done, "preset.ini")
    assert text.splitlines()[0] == "version = 1", "as its reader wants it, above all sections"
    reader = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#", ";"), strict=True)
    reader.read_string(f"[top]\n{text}")
    assert reader.sections() == ["top", "toy"] and dict(reader["top"]) == {"version": "1"}
    found = dict(reader["toy"])
    given = parsed(done)
    assert found == {
        "model": "/m/q.gguf",
        "n-gpu-layers": "99",
        "override-tensor": given.override_tensor,
        "ctx-size": "4096",
        "ubatch-size": "1024",
        "fit": "off",
    }
    assert "cpu-moe = true" in text_of(exported("llama.cpp", config_of(slots(*[0] * 6), cpu={"layers": "all"})),
                                       "preset.ini")  # fmt: skip
    with pytest.raises(ConfigError, match="values end at ';' and '#'; rename that file"):
        exported("llama.cpp", config, model_path="/m/q#1.gguf")


@pytest.mark.parametrize(("target", "name"), [("llama.cpp", "llama-server.sh"), ("ik_llama.cpp", "ik-llama-server.sh")])
def test_script_gives_the_program_the_very_flags(target: str, name: str, tmp_path: Path) -> None:
    """A program of that name that prints its arguments takes the engine's place."""
    label = "fast\nrm -rf / ; $(touch owned) `touch owned` @ABOUT@"
    done = exported(target, config_of(slots(8, 2, 2, 7, 2, 3)) .model_copy(update={"label": label}),
                    model_path="/m/it's $HOME.gguf")  # fmt: skip
    program = tmp_path / "llama-server"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    done.write(tmp_path / "out", is_folder=True)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["sh", name, "--port", "1"], cwd=tmp_path / "out", env={"PATH": path}, capture_output=True, text=True
    )
    assert result.stdout.splitlines() == [*done.flags, "--port", "1"], result.stderr
    assert not list(tmp_path.rglob("owned"))
