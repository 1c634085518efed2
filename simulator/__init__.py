"""Decide, and tell the time: policies shared with the live engine, the SimPy replay, bounds and the tuner.

Public names: `simulate` (trace + hardware + configuration -> Run), `tune` (the best configuration for a trace and a
machine), `OffloadConfig`. They are imported on first use, so that a list of policies costs no simulator.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from simulator import compiled

if TYPE_CHECKING:
    from simulator.policies.config import OffloadConfig
    from simulator.replay import simulate
    from simulator.tune import TuneResult, tune

__all__ = ["OffloadConfig", "TuneResult", "simulate", "tune"]

compiled.guard()

_HOME = {"OffloadConfig": "policies.config", "simulate": "replay", "tune": "tune", "TuneResult": "tune"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"simulator.{_HOME[name]}"), name)
    raise AttributeError(f"module 'simulator' has no attribute '{name}'")


class _Room(ModuleType):
    """The package; a module of it that is imported does not hide the public function of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _HOME):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Room
