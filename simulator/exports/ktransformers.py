"""ktransformers: YAML rules that place each layer's experts module (archive/ktransformers/optimize/optimize_rules)."""

from __future__ import annotations

import json
from collections.abc import Mapping as Table
from typing import Any

from simulator.exports.commands import ABOUT, command_line
from simulator.exports.losses import lost_cache, lost_cpu_rule, lost_draft, lost_prefetch, lost_prefill
from simulator.exports.result import ExportedFile, Mapping
from simulator.exports.source import ExportSource
from simulator.exports.whole_layers import cpu_split_config, split_family, split_layers, split_notes

RULES_FILE = "experts.yaml"
_CLASS = "ktransformers.operators.experts.KTransformersExperts"


def to_ktransformers(source: ExportSource) -> Mapping:
    """A rule for the layers on the GPU, then one for all others on the CPU; the first that matches wins."""
    split = split_layers(source)
    rules = []
    if split.on_device:
        layers = "|".join(map(str, source.decoder_layers(split.on_device)))
        rules.append(_rule(rf"^model\.layers\.({layers})\.mlp\.experts$", "cuda", "KExpertsMarlin"))
    if split.elsewhere:
        rules.append(_rule(r"^model\.layers\..*\.mlp\.experts$", "cpu", "KExpertsCPU"))
    words = ["python", "-m", "ktransformers.local_chat", "--model_path", source.options.model_path or "MODEL"]
    words += ["--gguf_path", "GGUF_FOLDER", "--optimize_config_path", "MODEL_RULES.yaml"]
    if source.threads:
        words += ["--cpu_infer", str(source.threads)]
    if source.config.prefill.micro_batch:
        words += ["--chunk_size", str(source.config.prefill.micro_batch)]
    instead = "all experts of a layer are on the GPU or on the CPU"
    lost = lost_cache(source, "ktransformers", instead) + lost_cpu_rule(source, "ktransformers", instead)
    lost += lost_prefetch(source, "ktransformers") + lost_prefill(source, "ktransformers", "prompts run on the GPU")
    return Mapping(
        files=(ExportedFile(RULES_FILE, f"{ABOUT}\n{as_yaml(rules)}", has_about=True),),
        command=command_line(words),
        flags=tuple(words[3:]),
        lost=tuple(lost + lost_draft(source, "ktransformers")),
        notes=tuple(
            [
                *split_notes(source, split),
                "put these rules in place of the rule for mlp.experts in the rules of your model (MODEL_RULES.yaml)",
                "rules for its server (balance_serve) name KTransformersExpertsV2: write that class here too",
                "experts on the GPU do not go together with its CUDA graphs",
            ]
        ),
        mapped=cpu_split_config(source, split),
        family=split_family(split),
    )


def _rule(name: str, device: str, op: str) -> dict[str, Any]:
    kwargs = {
        "prefill_device": "cuda",
        "prefill_op": "KExpertsTorch",
        "generate_device": device,
        "generate_op": op,
        "out_device": "cuda",
    }
    return {"match": {"name": name}, "replace": {"class": _CLASS, "kwargs": kwargs}, "recursive": False}


def as_yaml(rules: list[dict[str, Any]]) -> str:
    """Rules as YAML: nested tables of strings and booleans. A JSON string is a YAML string, escapes included."""
    lines = []
    for rule in rules:
        body = _lines(rule)
        lines += [f"- {body[0]}", *(f"  {line}" for line in body[1:])]
    return "\n".join(lines) + "\n"


def _lines(table: Table[str, Any]) -> list[str]:
    lines = []
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {line}" for line in _lines(value))]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return lines
