"""vLLM: expert weights of the first layers in host memory, read over the link in place (vllm/config/offload.py)."""

from __future__ import annotations

import math
from fractions import Fraction

from simulator.exports.commands import command_line, script
from simulator.exports.losses import lost_cache, lost_draft, lost_prefetch, lost_prefill
from simulator.exports.result import ExportedFile, Mapping
from simulator.exports.source import ExportSource
from simulator.exports.whole_layers import LayerSplit, split_layers, split_notes
from simulator.policies.config import CacheConfig, OffloadConfig

_LARGEST_GROUP = 8


def to_vllm(source: ExportSource) -> Mapping:
    """As many whole layers' experts in host memory as do not fit the configuration's budget."""
    split = split_layers(source, any_layer=False)
    size = sum(source.shape.num_experts * source.shape.expert_bytes[layer] for layer in split.elsewhere)
    words = ["vllm", "serve", source.options.model_path or "MODEL", *_flags(source, size)]
    return Mapping(
        files=(ExportedFile("vllm-serve.sh", script(words, after=_alternative(source, split)), has_about=True),),
        command=command_line(words),
        flags=tuple(words[3:]),
        lost=tuple(_losses(source)),
        notes=tuple(
            [
                *split_notes(source, split),
                "the GPU reads experts in host memory in place (UVA): only active ones cross the link, every time",
            ]
        ),
        mapped=_mapped(source, split),
        family="on_demand" if split.elsewhere else "all_resident",
    )


def offload_gib(size: int) -> str:
    """Gibibytes for `--cpu-offload-gb`, rounded down to a mebibyte: vLLM offloads weights until it is past them."""
    return f"{math.floor(size / 2**20) / 1024:.6f}".rstrip("0").rstrip(".")


def _flags(source: ExportSource, size: int) -> list[str]:
    flags = ["--cpu-offload-gb", offload_gib(size), "--cpu-offload-params", "experts"] if size else []
    if source.options.context:
        flags += ["--max-model-len", str(source.options.context)]
    return flags


def _alternative(source: ExportSource, split: LayerSplit) -> list[str]:
    """The prefetching backend: whole layers, the last K of every G."""
    total, away = source.shape.num_moe_layers, len(split.elsewhere)
    if not split.elsewhere or not split.on_device:
        return []
    groups = (Fraction(count, group) for group in range(2, _LARGEST_GROUP + 1) for count in range(1, group))
    enough = [share for share in groups if share * total >= away]
    if not enough:
        return []
    share = min(enough)
    return [
        "other backend, which copies whole layers ahead instead of reading active experts: "
        f"--offload-group-size {share.denominator} --offload-num-in-group {share.numerator} --offload-prefetch-step 1"
    ]


def _mapped(source: ExportSource, split: LayerSplit) -> OffloadConfig:
    """Experts of the layers elsewhere cross the link each time; the others are there."""
    shape = source.shape
    every = tuple(range(shape.num_experts))
    away = set(split.elsewhere)
    return OffloadConfig(
        label="experts of some layers read over the link",
        cache=CacheConfig(
            policy="static",
            slots_per_layer=tuple(
                shape.top_k if layer in away else shape.num_experts for layer in range(shape.num_moe_layers)
            ),
            hot_experts=tuple(() if layer in away else every for layer in range(shape.num_moe_layers)),
        ),
        device=source.config.device,
    )


def _losses(source: ExportSource) -> list[str]:
    lost = lost_cache(source, "vLLM", "an expert in host memory crosses the link whenever it is asked for")
    if not source.is_even:
        lost.append("which layers matter most is lost: vLLM fills --cpu-offload-gb from the first layer on")
    if source.config.cpu.is_used:
        lost.append("running experts on the CPU is lost: vLLM computes all experts on the GPU")
    lost += lost_prefetch(source, "vLLM")
    lost += lost_prefill(source, "vLLM", "the backend with --offload-group-size copies whole layers ahead")
    return lost + lost_draft(source, "vLLM")
