"""Configurations, models and machines that exports are tested with."""

from __future__ import annotations

from typing import Any

from simulator.exports import Export, ExportOptions, export
from simulator.policies.config import OffloadConfig, parse_config
from tests.simulator.builders import make_hardware, make_host, mixed_trace
from trace_capture.hardware import HardwareProfile
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Phase, Trace

EXPERT_BYTES = 2 << 20


def sparse_shape(dense_first: int = 2, layers: int = 6, **fields: Any) -> ModelShape:
    """A model whose first decoder layers have no experts, so that its two ways of counting layers differ."""
    numbers: dict[str, Any] = {
        "name": "toy",
        "architecture": "qwen3_moe",
        "num_layers": dense_first + layers,
        "moe_layer_ids": tuple(range(dense_first, dense_first + layers)),
        "num_experts": 8,
        "top_k": 2,
        "expert_bytes": (EXPERT_BYTES,) * layers,
        "dense_bytes": (1000,) * layers,
    }
    return ModelShape(**(numbers | fields))


def skewed_trace(shape: ModelShape) -> Trace:
    """Routing that prefers some experts, with predictions; without verify passes, so not drafted."""
    trace = mixed_trace(shape, sequences=3, decode=12)
    return trace.rows(trace.phase != Phase.VERIFY)


def config_of(cache: dict[str, Any], **tables: Any) -> OffloadConfig:
    return parse_config({"cache": cache} | tables)


def slots(*counts: int, **cache: Any) -> dict[str, Any]:
    return {"slots_per_layer": list(counts)} | cache


def machine(**device: float) -> HardwareProfile:
    return make_hardware(host=make_host(cores=6), **device)


def exported(target: str, config: OffloadConfig, shape: ModelShape | None = None, **more: Any) -> Export:
    """An export of a case; paths are options by name."""
    names = {name: more.pop(name) for name in ("model_path", "draft_model", "context") if name in more}
    return export(config, target, shape or sparse_shape(), options=ExportOptions(**names), **more)


def text_of(done: Export, name: str) -> str:
    return next(file.text for file in done.files if file.name == name)
