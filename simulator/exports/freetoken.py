"""FreeToken: expert slots on the GPU with LRU, fetched over the link or run on the CPU (freetoken 0.2.1)."""

from __future__ import annotations

import json

import numpy as np

from simulator.exports.commands import command_line, script
from simulator.exports.losses import lost_draft, lost_prefetch
from simulator.exports.result import ExportedFile, Mapping
from simulator.exports.source import ExportSource
from simulator.policies.config import CacheConfig, OffloadConfig, PrefetchConfig, PrefillConfig
from simulator.validation.record import Family
from trace_capture.errors import ConfigError
from trace_capture.statistics import Counts

PROFILE_FILE = "profile.json"


def to_freetoken(source: ExportSource) -> Mapping:
    """The same number of slots, per layer or in one pool, always LRU.

    Raises:
        ConfigError: fewer slots in all than the model has experts in a layer, which FreeToken refuses.
    """
    strategy = _strategy(source)
    scope = _scope(source)
    slots = _total_slots(source)
    if strategy != "cpu" and slots < source.shape.num_experts:
        raise ConfigError(
            f"FreeToken needs at least {source.shape.num_experts} expert slots in all, and the configuration has "
            f"{slots}; raise cache.budget_bytes"
        )
    has_profile = scope == "per-layer" and source.counts is not None
    flags = ["--model", source.options.model_path or "MODEL", *_flags(source, strategy, scope, slots, has_profile)]
    words = ["ft", "serve", *flags]
    files = [ExportedFile("ft-serve.sh", script(words, before=['cd "$(dirname "$0")"']), has_about=True)]
    if has_profile and source.counts is not None:
        profile = {"model": source.shape.name.partition(":")[0], "expert_counts": source.counts.tolist()}
        files.append(ExportedFile(PROFILE_FILE, json.dumps(profile, separators=(",", ":")) + "\n"))
    return Mapping(
        files=tuple(files),
        command=command_line(words),
        flags=tuple(flags),
        lost=tuple(_losses(source, scope)),
        notes=tuple(_notes(source, strategy)),
        mapped=_mapped(source, scope, slots),
        family=_family(strategy),
    )


def _strategy(source: ExportSource) -> str:
    if len(source.cpu_layers) == source.shape.num_moe_layers:
        return "cpu"
    return "offload" if source.config.cpu.policy == "none" else "hybrid"


def _family(strategy: str) -> Family:
    families: dict[str, Family] = {"cpu": "cpu_experts", "hybrid": "hybrid"}
    return families.get(strategy, "expert_cache")


def _scope(source: ExportSource) -> str:
    """Pools of each layer's own do not go together with layers on the CPU."""
    return "per-layer" if source.config.cache.scope == "layer" and not source.cpu_layers else "unified"


def _total_slots(source: ExportSource) -> int:
    if source.slots is not None:
        return sum(source.slots)
    return source.budget_bytes * source.shape.num_moe_layers // sum(source.shape.expert_bytes)


def split_by_profile(source: ExportSource, total: int, counts: Counts | None) -> tuple[int, ...]:
    """Slots per layer [L] as `--moe-cache-split profile:` gives them: top-k each, the rest to the largest counts.

    Each layer's counts are first divided by their sum.
    """
    shape = source.shape
    if counts is None:
        base, more = divmod(total, shape.num_moe_layers)
        return tuple(base + (layer < more) for layer in range(shape.num_moe_layers))
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    hottest = -np.sort(-share, axis=1)[:, shape.top_k :]
    order = np.argsort(-hottest, axis=None, kind="stable")[: total - shape.top_k * shape.num_moe_layers]
    extra = np.bincount(order // max(1, hottest.shape[1]), minlength=shape.num_moe_layers)
    return tuple((shape.top_k + extra).tolist())


def _mapped(source: ExportSource, scope: str, slots: int) -> OffloadConfig:
    if scope == "per-layer":
        cache = CacheConfig(slots_per_layer=split_by_profile(source, slots, source.training_counts))
    else:
        size = max(1, slots * sum(source.shape.expert_bytes) // source.shape.num_moe_layers)
        cache = CacheConfig(scope="global", budget_bytes=size)
    return OffloadConfig(
        label="FreeToken's cache",
        cache=cache,
        prefetch=PrefetchConfig(),
        cpu=source.config.cpu.model_copy(update={"policy": "none" if source.config.cpu.policy == "none" else "misses"}),
        prefill=PrefillConfig(strategy="stream", micro_batch=source.config.prefill.micro_batch),
        device=source.config.device,
    )


def _flags(source: ExportSource, strategy: str, scope: str, slots: int, has_profile: bool) -> list[str]:
    flags = ["--moe-strategy", strategy]
    if strategy != "cpu":
        flags += ["--moe-cache-policy", "lru", "--moe-cache-size", str(slots), "--moe-cache-scope", scope]
        if scope == "per-layer":
            flags += ["--moe-cache-split", f"profile:{PROFILE_FILE}" if has_profile else "equal"]
    if strategy == "hybrid":
        flags += ["--moe-hybrid-max-fetch", str(source.config.cpu.admissions)]
    if source.cpu_layers and strategy != "cpu":
        # a number without a comma is a count of layers spread over the depth
        flags += ["--moe-cpu-layers", ",".join(map(str, sorted(source.cpu_layers))) + ","]
    if source.config.cpu.is_used and source.threads:
        flags += ["--moe-cpu-threads", str(source.threads)]
    if source.options.context:
        flags += ["--kv-reserve-tokens", str(source.options.context)]
    return [*flags, "--moe-collect-stats"]


def _losses(source: ExportSource, scope: str) -> list[str]:
    lost, cache = [], source.config.cache
    if cache.policy != "lru":
        lost.append(f"the cache policy '{cache.policy}' is lost: FreeToken has only lru")
    if cache.scope == "layer" and scope == "unified":
        lost.append("slots of each layer's own are lost: FreeToken cannot have them beside layers on the CPU")
    elif source.slots is not None and source.slots != split_by_profile(source, sum(source.slots), source.counts):
        lost.append("the exact slots of each layer are lost: FreeToken divides the same number by its own rule")
    if cache.preload:
        lost.append("starting with hot experts on the device is lost")
    if source.config.cpu.policy == "threshold":
        lost.append("the CPU's threshold on tokens is lost: hybrid sends misses to the CPU whatever their tokens")
    if source.config.cpu.policy != "none" and source.config.cpu.admissions:
        lost.append(
            "an expert that the CPU ran is not loaded behind it: hybrid waits in every step for up to "
            f"{source.config.cpu.admissions} loads instead"
        )
    lost += lost_prefetch(source, "FreeToken")
    if source.config.prefill.strategy == "on-demand":
        lost.append("loading on demand while a prompt is read is lost: FreeToken streams layers through two buffers")
    return lost + lost_draft(source, "FreeToken")


def _notes(source: ExportSource, strategy: str) -> list[str]:
    notes = [f"--moe-cache-size counts slots of all layers together; --moe-cpu-layers counts MoE layers from 0, of "
             f"{source.shape.num_moe_layers}"]  # fmt: skip
    if strategy == "hybrid":
        notes.append("hybrid has been reported slower than offload on several machines: measure both")
    if source.cpu_layers and strategy != "cpu":
        notes.append("--moe-cpu-layers needs an expert format with a CPU path: bf16, fp8_block, nvfp4 or mxfp4")
    return notes
