"""Decide, and tell the time: policies shared with the live engine, the SimPy replay, bounds and the tuner.

Public names: `simulate` (trace + hardware + configuration -> Run), `tune` (the best configuration for a trace and a
machine), `OffloadConfig`.
"""

from simulator.policies.config import OffloadConfig
from simulator.replay import simulate
from simulator.tune import TuneResult, tune

__all__ = ["OffloadConfig", "TuneResult", "simulate", "tune"]
