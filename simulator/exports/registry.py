"""All targets by name. A new one is a function and a line here; command line and dashboard then know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.exports.accelerate import to_accelerate
from simulator.exports.fitz import to_fitz
from simulator.exports.freetoken import to_freetoken
from simulator.exports.ik_llama_cpp import to_ik_llama_cpp
from simulator.exports.kt import to_kt
from simulator.exports.ktransformers import to_ktransformers
from simulator.exports.llama_cpp import to_llama_cpp
from simulator.exports.moe_infinity import to_moe_infinity
from simulator.exports.native import to_native
from simulator.exports.result import Mapping
from simulator.exports.source import ExportSource
from simulator.exports.vllm import to_vllm
from simulator.policies.config import CONFIG_SCHEMA_VERSION


@dataclass(frozen=True)
class Target:
    """An engine that a configuration can be exported to.

    Attributes:
        title: what it is and what is written.
        engine: the version that the files are written for, and how to check one's own.
        mapping: puts a configuration into its terms.
        family: engines of published measurements that speak for predictions of it.
        comment: how lines of its files that are for people begin.
    """

    title: str
    engine: str
    mapping: Callable[[ExportSource], Mapping]
    family: str = ""
    comment: str = "#"


TARGETS: dict[str, Target] = {
    "native": Target(
        "MoE Offload Studio: configuration (TOML)", f"this version, schema_version {CONFIG_SCHEMA_VERSION}", to_native
    ),
    "llama.cpp": Target(
        "llama.cpp: llama-server command and preset file (INI)",
        "llama.cpp, tools/server/README.md at commit 00dc8057; compare with 'llama-server --help'",
        to_llama_cpp,
        "llama.cpp",
    ),
    "ik_llama.cpp": Target(
        "ik_llama.cpp: llama-server command",
        "ik_llama.cpp, docs/parameters.md at commit 8337e4cd; compare with 'llama-server --help'",
        to_ik_llama_cpp,
        "ik_llama.cpp",
    ),
    "kt": Target(
        "kt-kernel with SGLang: server command and logical_count file (JSON)",
        "kt-kernel 0.7.2 (ktransformers at commit 95009ea) with its SGLang fork",
        to_kt,
        "ktransformers",
    ),
    "ktransformers": Target(
        "ktransformers: rules for the experts modules (YAML)",
        "ktransformers at commit 95009ea, archive/ktransformers/optimize",
        to_ktransformers,
        "ktransformers",
    ),
    "freetoken": Target(
        "FreeToken: ft serve command and expert profile (JSON)",
        "freetoken 0.2.1; compare with 'ft serve --help'",
        to_freetoken,
        "custom",
    ),
    "vllm": Target(
        "vLLM: serve command with weight offloading",
        "vLLM, vllm/config/offload.py at commit 00593fa7; compare with 'vllm serve --help'",
        to_vllm,
        "vllm",
    ),
    "moe-infinity": Target(
        "MoE-Infinity: configuration (JSON)",
        "MoE-Infinity at commit d617801; the package of that name on PyPI is empty",
        to_moe_infinity,
        "transformers",
    ),
    "accelerate": Target(
        "accelerate and transformers: device_map (JSON)",
        "accelerate at commit 16cb6eb with transformers 5",
        to_accelerate,
        "transformers",
    ),
    "fitz": Target("fitz-tec: bench command and pin list", "fitz-tec 0.1.1", to_fitz, "llama.cpp"),
}
