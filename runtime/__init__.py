"""Do it live: the offloaded engine, calibration, and the command line.

Public names, loaded when first used since most of them import torch: `offload`, `unload`, `offloaded`, `adapt`,
`OffloadConfig`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.adapters import adapt
    from runtime.offloading import offload, offloaded, unload
    from simulator.policies.config import OffloadConfig

__all__ = ["OffloadConfig", "adapt", "offload", "offloaded", "unload"]


def __getattr__(name: str) -> Any:
    if name == "OffloadConfig":
        from simulator.policies.config import OffloadConfig

        return OffloadConfig
    if name in ("adapt", "offload", "offloaded", "unload"):
        try:
            from runtime import adapters, offloading
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; the live engine needs: pip install 'moe-studio[live]'") from error
        return getattr(adapters if name == "adapt" else offloading, name)
    raise AttributeError(f"module 'runtime' has no attribute '{name}'")
