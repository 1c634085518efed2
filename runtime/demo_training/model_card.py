"""The README.md of a trained model folder, filled from the facts of its run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from runtime.demo_training.corpus import HELD_OUT_MODULES, Source
from runtime.demo_training.settings import NetworkShape, TrainingSettings
from trace_capture.files import file_digest, write_text_atomic

_DOMAIN_TITLES = {
    "novels": "six novels by Jane Austen",
    "jargon": "the Jargon File",
    "docs": "Python documentation, reST sources",
    "code": "Python standard library sources",
}
_PURPOSE = {
    "target": "A small Mixture-of-Experts language model for trying out expert offloading without a model hub.",
    "draft": "A two-layer draft for speculative decoding with the demo model; it shares that model's tokenizer.",
}
_USES = """## Use and limits

It is made to show routing: which experts a trained router picks, how well the next layer can be predicted, what a
replaced expert costs in loss. It is far too small and too briefly trained to be a source of facts, code or prose: text
has the look of its domain and little sense. Greedy decoding repeats itself, so `generation_config.json` samples with a
repetition penalty. Its experts are a few dozen kilobytes, so its transfer times say nothing about a large model: take
expert sizes from a real model's shape. It has read English only, and was not filtered or aligned for any use with
people.
"""
_HELD_OUT = {
    "novels": "the last 4 % of each novel",
    "jargon": "the last 4 % of the Jargon File",
    "docs": "one in 25 documentation pages",
    "code": f"the library modules {', '.join(sorted(HELD_OUT_MODULES))}",
}
_PUBLIC_DOMAIN = frozenset({"novels", "jargon"})
_PSF_NOTICE = (
    "used under the PSF License Version 2: Copyright (c) 2001 Python Software Foundation; All Rights Reserved. "
    "Full text: https://docs.python.org/3/license.html."
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card states: shape, schedule, text and results of one run."""

    preset_name: str
    shape: NetworkShape
    training: TrainingSettings
    sources: tuple[Source, ...]
    train_tokens: Mapping[str, int]
    held_out_losses: Mapping[str, float]
    seconds: float
    has_teacher: bool = False


def write_model_card(folder: Path, facts: Facts) -> None:
    """Write the card of the model in `folder`, with the digests of the files that lie there now."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in (".json", ".safetensors"))
    write_text_atomic(folder / "README.md", render_model_card(facts, {path.name: file_digest(path) for path in files}))


def render_model_card(facts: Facts, digests: Mapping[str, str]) -> str:
    """The card as Markdown; `digests` are the folder's files with their SHA-256."""
    title = "MoE demo model" if facts.preset_name == "target" else f"MoE demo {facts.preset_name} model"
    sections = (
        f"# {title}\n\n{_PURPOSE.get(facts.preset_name, _PURPOSE['target'])}\n",
        _shape_section(facts.shape),
        _text_section(facts),
        _recipe_section(facts),
        _USES,
        _licence_section(facts.sources),
        _again_section(facts),
        "## Files\n\n" + "".join(f"- `{name}` {digest}\n" for name, digest in digests.items()),
    )
    return "\n".join(sections)


def num_parameters(shape: NetworkShape) -> int:
    """Parameters of a network, the tied embedding counted once."""
    query, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    experts = shape.num_experts * (3 * shape.expert_size * shape.hidden_size + shape.hidden_size)
    attention = 2 * query * shape.hidden_size + 2 * keys * shape.hidden_size + 2 * shape.head_size
    layer = experts + attention + 2 * shape.hidden_size
    return shape.num_layers * layer + shape.vocabulary_size * shape.hidden_size + shape.hidden_size


def _shape_section(shape: NetworkShape) -> str:
    """Architecture and sizes."""
    return (
        f"Architecture: `Qwen3MoeForCausalLM`, {num_parameters(shape) / 1e6:.2f} M parameters in bfloat16. "
        f"{shape.num_layers} layers, hidden {shape.hidden_size}, {shape.num_experts} experts per layer of which "
        f"{shape.top_k} are used per token, expert width {shape.expert_size}, {shape.num_heads} query and "
        f"{shape.num_kv_heads} key heads of {shape.head_size}, vocabulary {shape.vocabulary_size} (byte-level BPE), "
        f"up to {shape.max_positions} positions.\n"
    )


def _text_section(facts: Facts) -> str:
    """Training text with versions and digests, and the held-out loss of each domain."""
    lines = [
        "## Text and held-out loss\n",
        "| domain | source | version | licence | training tokens | held-out loss, nats per token |",
        "|---|---|---|---|---|---|",
    ]
    for source in facts.sources:
        domain = source.domain
        lines.append(
            f"| {domain}: {_DOMAIN_TITLES[domain]} | {source.name} | {source.version} | {source.licence} "
            f"| {facts.train_tokens[domain]:,} | {facts.held_out_losses[domain]:.3f} |"
        )
    held_out = "; ".join(_HELD_OUT[source.domain] for source in facts.sources)
    mean = sum(facts.held_out_losses.values()) / len(facts.held_out_losses)
    lines.append(
        f"\nMean over domains {mean:.3f}. Held out: {held_out}. Each loss is the mean over up to 64 evenly spread "
        "windows of 256 tokens.\n\nDigests of the text (package file, or all sources joined):\n"
    )
    lines += [f"- {source.domain}: {source.digest}" for source in facts.sources]
    return "\n".join(lines) + "\n"


def _recipe_section(facts: Facts) -> str:
    """Schedule, optimiser and losses of the run."""
    training = facts.training
    seen = training.num_steps * training.batch_tokens
    teacher = (
        f" From {training.teacher_from:.0%} of the steps on, {training.teacher_ratio:.0%} of the loss is the "
        "cross-entropy against the demo model's distribution."
        if facts.has_teacher
        else ""
    )
    precision = "fp32" if training.precision == "float32" else "bf16 with fp32 master weights"
    sentences = (
        f"{training.num_steps} steps of {training.batch_tokens} tokens ({seen / 1e6:.2f} M tokens), "
        f"{facts.seconds / 60:.0f} minutes on the CPU, seed {training.seed}, {precision}.",
        f"Windows of {training.short_context} tokens, from {training.long_context_from:.0%} of the steps on of "
        f"{training.long_context}; every batch mixes all domains.",
        f"Muon (rate {training.muon_rate}) for attention and experts, AdamW (rate {training.adam_rate}, router half "
        f"of it) for the rest; {training.warmup_steps} warm-up steps, flat to {training.flat_until:.0%} of the steps, "
        f"then linear to {training.final_rate_ratio:.0%}.",
        f"Load-balance weight {training.balance_weight}, from {training.late_balance_from:.0%} of the steps on "
        f"{training.late_balance_weight}; router z-loss weight {training.router_z_weight}.{teacher}",
    )
    return "## Recipe\n\n" + "\n".join(sentences) + "\n"


def _licence_section(sources: tuple[Source, ...]) -> str:
    """Whose text was read, with the notice that its licence asks for."""
    free = [_DOMAIN_TITLES[source.domain] for source in sources if source.domain in _PUBLIC_DOMAIN]
    licensed = [_DOMAIN_TITLES[source.domain] for source in sources if source.domain not in _PUBLIC_DOMAIN]
    lines = ["## Licences\n", "The weights are the project's own, under the project's licence."]
    if free:
        lines.append(f"In the public domain: {', '.join(free)}.")
    if licensed:
        lines.append(f"{', '.join(licensed)}: {_PSF_NOTICE}")
    lines.append("This folder contains no text beyond the tokenizer's vocabulary of word pieces.")
    return "\n".join(lines) + "\n"


def _again_section(facts: Facts) -> str:
    """How to train the same model again."""
    teacher = " --preset draft --teacher DEMO_MODEL" if facts.preset_name == "draft" else ""
    return (
        f"## Train it again\n\n    python -m runtime.demo_training --out DIR{teacher} --steps "
        f"{facts.training.num_steps} --seed {facts.training.seed}\n\nEqual text, seed, thread count, processor and "
        f"library versions give equal bits. Trained with Python {platform.python_version()}, torch "
        f"{torch.__version__} and transformers {transformers.__version__}.\n"
    )
