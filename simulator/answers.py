"""What a simulated run answers, as a flat table row and as JSON: the figures with their band, bound and limit."""

from __future__ import annotations

from typing import Any

from simulator.critical_path import critical_path, what_limits
from trace_capture.run import Run

COLUMNS = (
    "tpot_ms",
    "tpot_low_ms",
    "tpot_high_ms",
    "tokens_per_s",
    "ttft_ms",
    "decode_hit_rate",
    "bytes_per_token",
    "device_expert_bytes",
    "bound_ms",
    "regret_ratio",
)
"""Numbers of an answer, in the order of tables."""


def answer_of(run: Run, device_expert_bytes: int) -> dict[str, Any]:
    """The answer that a run gives: `COLUMNS`, what limits it, its critical path, and what a reader must know.

    `device_expert_bytes` is device memory that slots for experts take.
    `tpot_low_ms` and `tpot_high_ms` are the error band; None where nobody validated such a prediction.
    """
    metrics, band = run.metrics, run.info.error_band
    tpot_ms = metrics.tpot_ms
    return {
        "label": run.info.label,
        "hardware": run.info.hardware,
        "model": run.info.model,
        "emulated": run.info.emulated,
        "tpot_ms": tpot_ms,
        "tpot_low_ms": None if band is None else tpot_ms * band.low_ratio,
        "tpot_high_ms": None if band is None else tpot_ms * band.high_ratio,
        "band": None if band is None else band.model_dump(),
        "tokens_per_s": metrics.tokens_per_s,
        "ttft_ms": metrics.ttft_ms,
        "decode_hit_rate": metrics.decode_hit_rate,
        "bytes_per_token": metrics.bytes_per_token,
        "device_expert_bytes": device_expert_bytes,
        "bound_ms": run.info.bounds.get("max_ms"),
        "regret_ratio": run.regret_ratio,
        "what_limits": what_limits(run),
        "critical_path": [share._asdict() for share in critical_path(metrics)],
        "notes": list(run.info.notes),
    }
