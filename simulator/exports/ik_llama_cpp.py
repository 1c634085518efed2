"""ik_llama.cpp: a `llama-server` command (docs/parameters.md)."""

from __future__ import annotations

from simulator.exports.commands import command_line, script
from simulator.exports.llama_flags import Flag, base_flags, placement_losses, placement_notes, words_of
from simulator.exports.result import ExportedFile, Mapping
from simulator.exports.source import ExportSource
from simulator.exports.whole_layers import cpu_split_config, split_family, split_layers


def to_ik_llama_cpp(source: ExportSource) -> Mapping:
    """As for llama.cpp; that experts are fused and only active ones copied in batches are its defaults, for which
    `llama-server` has no flag."""
    split = split_layers(source)
    flags = [*base_flags(source, split), *_draft_flags(source)]
    words = ["llama-server", *words_of(flags)]
    ratio = source.shape.num_experts / source.shape.top_k
    note = (
        f"prompts: experts on the CPU are copied to the device for micro-batches of {32 * ratio:.0f} tokens or more "
        "(its rule: 32 x experts / top-k), and run on the CPU below that"
    )
    return Mapping(
        files=(ExportedFile("ik-llama-server.sh", script(words), has_about=True),),
        command=command_line(words),
        flags=tuple(words[1:]),
        lost=tuple(placement_losses(source, split, "ik_llama.cpp")),
        notes=tuple([*placement_notes(source, split), note]),
        mapped=cpu_split_config(source, split),
        with_drafts=True,
        family=split_family(split),
    )


def _draft_flags(source: ExportSource) -> list[Flag]:
    """`--spec-type name:key=value`; a draft model besides has a flag of its own."""
    draft = source.draft
    if draft is None:
        return []
    if draft.kind == "prompt-lookup" and not source.options.draft_model:
        return [Flag("--spec-type", f"ngram-simple:n_max={draft.gamma}", "spec-type")]
    return [
        Flag("--spec-type", f"draft:n_max={draft.gamma}", "spec-type"),
        Flag("-md", source.options.draft_model or "DRAFT.gguf", "model-draft"),
    ]
