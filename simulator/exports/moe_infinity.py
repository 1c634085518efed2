"""MoE-Infinity: the dictionary that `MoE(model, config)` takes, as JSON."""

from __future__ import annotations

import json
import math

from simulator.exports.losses import lost_draft, lost_prefetch
from simulator.exports.result import ExportedFile, Mapping
from simulator.exports.source import ExportSource
from trace_capture.errors import ConfigError

CONFIG_FILE = "moe_infinity.json"
_HOST_MEMORY_RATIO = 0.9
_TRACE_CAPACITY = 1000
_DEFAULT_THREADS = 8


def to_moe_infinity(source: ExportSource) -> Mapping:
    """Only how much of the GPU's memory is for experts can be said.

    Raises:
        ConfigError: the machine is not known, or its memory does not hold the budget.
    """
    if source.hardware is None:
        raise ConfigError("MoE-Infinity's device_memory_ratio is a share of the GPU's memory: name it with --hardware")
    memory = source.hardware.device.memory_bytes.value
    ratio = math.floor(1e4 * source.budget_bytes / memory) / 1e4 if memory else 0.0
    if not 0 < ratio <= 1:
        raise ConfigError(
            f"experts get {source.budget_bytes:,} bytes and {source.hardware.device.name} has {memory:,.0f}: that is "
            "no share of it that MoE-Infinity could be given; change cache.budget_bytes or --hardware"
        )
    config = {
        "offload_path": "OFFLOAD_DIR",
        "trace_capacity": _TRACE_CAPACITY,
        "device_memory_ratio": ratio,
        "host_memory_ratio": _HOST_MEMORY_RATIO,
        "num_threads": source.threads or _DEFAULT_THREADS,
    }
    model = source.options.model_path or "MODEL"
    return Mapping(
        files=(ExportedFile(CONFIG_FILE, json.dumps(config, indent=1) + "\n"),),
        command=f"MoE({model!r}, json.load(open({CONFIG_FILE!r})))",
        lost=tuple(_losses(source)),
        notes=(
            "OFFLOAD_DIR stands for an empty folder on a fast disk, which MoE-Infinity fills with the experts",
            f"device_memory_ratio is {ratio:.4g} of {source.hardware.device.name}: the budget for experts alone",
        ),
        not_predicted="MoE-Infinity evicts by activation patterns of past requests, which the simulator does not have",
    )


def _losses(source: ExportSource) -> list[str]:
    cache = source.config.cache
    lost = [
        f"the cache policy '{cache.policy}' is lost: MoE-Infinity evicts by its own record of activations",
        "slots per layer are lost: one pool serves all layers" if cache.scope == "layer" else "",
    ]
    if source.config.cpu.is_used:
        lost.append("running experts on the CPU is lost: MoE-Infinity computes all experts on the GPU")
    lost += lost_prefetch(source, "MoE-Infinity")
    if source.config.prefill.micro_batch or source.config.prefill.strategy == "stream":
        lost.append("how prompts are read (micro-batches, streaming) is lost")
    return [sentence for sentence in lost if sentence] + lost_draft(source, "MoE-Infinity")
