"""What happened: model shapes, routing traces, runs, hardware profiles, and the recorder that captures routing.

Public names, loaded when first used so that the command line starts at once:
    Trace, TraceInfo, Phase, NO_EXPERT: the routing trace and its file.
    Run, RunInfo, Span, Metrics: a simulated or measured run.
    HardwareProfile: the numbers the simulator's clock runs on.
    ModelShape: counts and bytes of a model.
    StudioError: a mistake in the input; the command line prints it and exits with 2.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trace_capture.errors import StudioError
    from trace_capture.hardware import HardwareProfile
    from trace_capture.model_shape import ModelShape
    from trace_capture.run import Metrics, Run, RunInfo, Span
    from trace_capture.trace import NO_EXPERT, Phase, Trace, TraceInfo

__all__ = [
    "NO_EXPERT",
    "HardwareProfile",
    "Metrics",
    "ModelShape",
    "Phase",
    "Run",
    "RunInfo",
    "Span",
    "StudioError",
    "Trace",
    "TraceInfo",
]

_HOME = {
    "StudioError": "errors",
    "HardwareProfile": "hardware",
    "ModelShape": "model_shape",
    **dict.fromkeys(("Metrics", "Run", "RunInfo", "Span"), "run"),
    **dict.fromkeys(("NO_EXPERT", "Phase", "Trace", "TraceInfo"), "trace"),
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"trace_capture.{_HOME[name]}"), name)
    raise AttributeError(f"module 'trace_capture' has no attribute '{name}'")
