"""Flags that llama.cpp and ik_llama.cpp share: where whole layers' experts lie, sizes, threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from simulator.exports.losses import lost_cache, lost_cpu_rule, lost_prefetch, lost_prefill
from simulator.exports.source import ExportSource
from simulator.exports.whole_layers import LayerSplit, first_layers, split_notes

_EXPERT_TENSORS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"
"""As in llama.cpp's `LLM_FFN_EXPS_REGEX`, so that fused and channelled experts match as well."""
_DEFAULT_BATCH = 2048
_ALL_LAYERS = "99"


class Flag(NamedTuple):
    """One option of the command line and of a preset file."""

    name: str
    """As on the command line."""
    value: str | None
    """None for a switch."""
    key: str
    """In a preset file: the long name without dashes."""


def expert_regex(decoder_layers: Iterable[int]) -> str:
    """A pattern for the expert tensors of exactly these layers; it holds no comma, which would end it."""
    return rf"blk\.({'|'.join(map(str, decoder_layers))})\.{_EXPERT_TENSORS}"


def placement_flags(source: ExportSource, split: LayerSplit) -> list[Flag]:
    """What keeps the experts of whole layers in host memory."""
    if not split.elsewhere:
        return []
    if not split.on_device:
        return [Flag("--cpu-moe", None, "cpu-moe")]
    count = first_layers(source, split.elsewhere)
    if count is not None:
        return [Flag("--n-cpu-moe", str(count), "n-cpu-moe")]
    pattern = f"{expert_regex(source.decoder_layers(split.elsewhere))}=CPU"
    return [Flag("-ot", pattern, "override-tensor")]


def fit_params_line(source: ExportSource, split: LayerSplit) -> str:
    """The placement as `llama-fit-params` prints it: context, layers and patterns."""
    words = ["-c", str(source.options.context)] if source.options.context else []
    words += ["-ngl", _ALL_LAYERS]
    if split.elsewhere:
        words += ["-ot", f'"{expert_regex(source.decoder_layers(split.elsewhere))}=CPU"']
    return " ".join(words)


def base_flags(source: ExportSource, split: LayerSplit) -> list[Flag]:
    """Model, placement, context, micro-batch and threads."""
    flags = [Flag("-m", source.options.model_path or "MODEL.gguf", "model"), Flag("-ngl", _ALL_LAYERS, "n-gpu-layers")]
    flags += placement_flags(source, split)
    if source.options.context:
        flags.append(Flag("-c", str(source.options.context), "ctx-size"))
    micro_batch = source.config.prefill.micro_batch
    if micro_batch:
        if micro_batch > _DEFAULT_BATCH:
            flags.append(Flag("-b", str(micro_batch), "batch-size"))
        flags.append(Flag("-ub", str(micro_batch), "ubatch-size"))
    if source.threads:
        flags.append(Flag("-t", str(source.threads), "threads"))
    return flags


def words_of(flags: Iterable[Flag]) -> list[str]:
    """The flags as arguments."""
    return [word for flag in flags for word in (flag.name, flag.value) if word is not None]


def placement_losses(source: ExportSource, split: LayerSplit, engine: str) -> list[str]:
    """What whole layers cannot express of the configuration."""
    instead = "all experts of a layer stay on the device or all run on the CPU"
    lost = lost_cache(source, engine, instead)
    lost += lost_cpu_rule(source, engine, "the CPU runs all experts of the layers placed there")
    lost += lost_prefetch(source, engine)
    lost += lost_prefill(source, engine, "it copies a CPU layer's experts for batches of 32 tokens or more by itself")
    if source.config.prefill.micro_batch is None:
        lost.append(
            f"prompts are read in micro-batches of 512 tokens (-ub), not in one pass: {engine} always cuts them"
        )
    if not source.threads:
        lost.append("the number of threads (-t) is left out: no host is known, so the engine takes its default")
    return lost


def _draft_notes(source: ExportSource) -> list[str]:
    """What the predicted speed assumes of drafts that the tuner chose."""
    provenance = source.config.provenance
    if source.draft is None or provenance is None or not provenance.gamma:
        return []
    if provenance.acceptance_ratio is None:
        if source.recorded_draft is not None:
            return []
        return ["the speed there is predicted without drafts: the configuration does not say how many are kept"]
    kept, size = f"{100 * provenance.acceptance_ratio:.0f} %", f"{provenance.draft_bytes / 2**20:,.0f} MiB"
    return [
        f"the speed there is predicted with drafts of which {kept} are kept, by a draft model of {size}, as assumed "
        "when tuning (tune --acceptance, --draft-mib)"
    ]


def placement_notes(source: ExportSource, split: LayerSplit) -> list[str]:
    """What a user should know of the placement."""
    notes = split_notes(source, split)
    if not split.is_exact and split.elsewhere and split.on_device:
        notes.append("each layer is asked equally often, so how many layers leave matters, and not which")
    if source.draft is None and source.options.draft_model is not None:
        notes.append("the draft model is left out: neither the configuration nor the trace drafts (tune --drafts N)")
    notes += _draft_notes(source)
    if source.options.model_path is None:
        notes.append("MODEL.gguf stands for your file; --model-path writes it")
    return notes
