"""llama.cpp: a `llama-server` command and a preset file (tools/server/README.md, common/preset.cpp)."""

from __future__ import annotations

from simulator.exports.commands import ABOUT, command_line, plain_name, script
from simulator.exports.llama_flags import (
    Flag,
    base_flags,
    fit_params_line,
    placement_losses,
    placement_notes,
    words_of,
)
from simulator.exports.result import ExportedFile, Mapping
from simulator.exports.source import ExportSource
from simulator.exports.whole_layers import cpu_split_config, split_family, split_layers
from trace_capture.errors import ConfigError


def to_llama_cpp(source: ExportSource) -> Mapping:
    """Whole layers on the device or on the CPU, nearest to the configuration; explicit, so `--fit` is off."""
    split = split_layers(source)
    flags = [*base_flags(source, split), Flag("--fit", "off", "fit"), *_draft_flags(source)]
    words = ["llama-server", *words_of(flags)]
    after = [f"as llama-fit-params prints it: {fit_params_line(source, split)}"]
    if _has_cache(source):
        mebibytes = source.budget_bytes >> 20
        after.append(
            f"if 'llama-server --help' lists --moe-cache-mib, this keeps an expert cache of the configuration's size "
            f"instead of whole layers: --cpu-moe --moe-cache-mib {mebibytes}"
        )
    return Mapping(
        files=(
            ExportedFile("llama-server.sh", script(words, after=after), has_about=True),
            ExportedFile("preset.ini", _preset(source, flags), has_about=True),
        ),
        command=command_line(words),
        flags=tuple(words[1:]),
        lost=tuple(placement_losses(source, split, "llama.cpp")),
        notes=tuple(
            [*placement_notes(source, split), "start the preset with: llama-server --models-preset preset.ini"]
        ),
        mapped=cpu_split_config(source, split),
        with_drafts=True,
        family=split_family(split),
    )


def _has_cache(source: ExportSource) -> bool:
    return source.config.cache.policy not in ("resident", "none") and source.budget_bytes >= 1 << 20


def _draft_flags(source: ExportSource) -> list[Flag]:
    """Drafting as the trace was drafted: n-gram look-up, or a draft model of as many tokens."""
    draft = source.draft
    if draft is None:
        return []
    if draft.kind == "prompt-lookup" and not source.options.draft_model:
        size = Flag("--spec-ngram-simple-size-m", str(draft.gamma), "spec-ngram-simple-size-m")
        return [Flag("--spec-type", "ngram-simple", "spec-type"), size]
    return [
        Flag("--spec-type", "draft-simple", "spec-type"),
        Flag("--spec-draft-model", source.options.draft_model or "DRAFT.gguf", "spec-draft-model"),
        Flag("--spec-draft-n-max", str(draft.gamma), "spec-draft-n-max"),
    ]


def _preset(source: ExportSource, flags: list[Flag]) -> str:
    """A file for `--models-preset`, whose reader ends a value at `;` and `#`.

    Raises:
        ConfigError: a value holds one of them.
    """
    for flag in flags:
        if set(flag.value or "") & set(";#\n\r"):
            raise ConfigError(
                f"{flag.value!r} cannot stand in a preset file, whose values end at ';' and '#'; rename that file"
            )
    lines = ["version = 1", ABOUT, "", f"[{plain_name(source.shape.name)}]"]
    lines += [f"{flag.key} = {'true' if flag.value is None else flag.value}" for flag in flags]
    return "\n".join(lines) + "\n"
