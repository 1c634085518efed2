"""What happened: model shapes, routing traces, runs, hardware profiles, and the recorder that captures routing.

Public names:
    Trace, TraceInfo, Phase, NO_EXPERT: the routing trace and its file.
    Run, Span, Metrics: a simulated or measured run.
    HardwareProfile: the numbers the simulator's clock runs on.
    ModelShape: counts and bytes of a model.
    StudioError: a mistake in the input; the command line prints it and exits with 2.
"""

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
