"""fitz-tec: a patched llama.cpp with an LRU cache per layer and a list of experts to pin (fitz-tec 0.1.1)."""

from __future__ import annotations

from simulator.exports.commands import ABOUT, command_line, script
from simulator.exports.losses import lost_cpu_rule, lost_draft, lost_prefetch, lost_prefill
from simulator.exports.result import ExportedFile, Mapping
from simulator.exports.source import ExportSource
from simulator.policies.popularity import hottest_per_layer
from trace_capture.errors import ConfigError

PIN_FILE = "experts.pinlist"


def to_fitz(source: ExportSource) -> Mapping:
    """One capacity for all layers; the hottest experts first in the pin list, all of them pinned where they stay.

    Raises:
        ConfigError: neither the configuration nor a trace says which experts are hot, or the room is too small.
    """
    capacity = min(source.budget_bytes // sum(source.shape.expert_bytes), source.shape.num_experts)
    if capacity < source.shape.top_k:
        raise ConfigError(
            f"fitz needs room for the top-{source.shape.top_k} experts of every layer, and the budget holds {capacity}"
        )
    hot = source.config.cache.hot_experts
    if source.counts is not None:
        hot = hottest_per_layer(source.counts.tolist(), [source.shape.num_experts] * source.shape.num_moe_layers)
    if hot is None:
        raise ConfigError("fitz pins experts by how often they are used: give the trace with --trace")
    is_static = source.config.cache.policy == "static"
    pinned = capacity - source.shape.top_k if is_static else capacity // 2
    model = source.options.model_path or "MODEL.gguf"
    words = ["fitz", "bench", model, "--capacity", str(capacity), "--pinned", str(pinned), "--pin-list", PIN_FILE]
    variables = f"EXPERT_CACHE_ENABLE=1 EXPERT_CACHE_CAPACITY={capacity} EXPERT_CACHE_PINNED={pinned}"
    after = [f"the patched binary itself reads: {variables} EXPERT_CACHE_PIN_LIST={PIN_FILE}"]
    return Mapping(
        files=(
            ExportedFile("fitz.sh", script(words, before=['cd "$(dirname "$0")"'], after=after), has_about=True),
            ExportedFile(PIN_FILE, _pin_list(source, hot), has_about=True),
        ),
        command=command_line(words),
        flags=tuple(words[3:]),
        lost=tuple(_losses(source)),
        notes=(f"{capacity} slots in each layer, {pinned} of them pinned",),
        not_predicted="whether fitz copies an expert that is missing or runs it on the CPU is not known here",
    )


def _pin_list(source: ExportSource, hot: tuple[tuple[int, ...], ...]) -> str:
    """Experts of each decoder layer, hottest first; layers without experts have an empty line."""
    by_layer = dict(zip(source.shape.moe_layer_ids, hot, strict=True))
    lines = ["# EXPERT_CACHE_PIN_LIST v1", ABOUT, f"n_layer {source.shape.num_layers}"]
    lines.append(f"n_expert {source.shape.num_experts}")
    for layer in range(source.shape.num_layers):
        lines.append(f"layer {layer}: {' '.join(map(str, by_layer.get(layer, ())))}")
    return "\n".join(lines) + "\n"


def _losses(source: ExportSource) -> list[str]:
    cache = source.config.cache
    lost = []
    if cache.policy not in ("lru", "static"):
        lost.append(f"the cache policy '{cache.policy}' is lost: fitz has lru and pinned experts")
    if source.slots is None:
        lost.append("one pool for all layers is lost: fitz has slots of each layer's own")
    elif not source.is_even:
        lost.append("slots per layer are lost: fitz gives every layer the same number")
    if source.cpu_layers:
        lost.append("layers that run on the CPU altogether are lost: fitz caches experts of every layer")
    lost += lost_cpu_rule(source, "fitz", "what happens to a miss is fixed")
    lost += lost_prefetch(source, "fitz") + lost_prefill(source, "fitz", "it times decode only")
    return lost + lost_draft(source, "fitz")
