"""Options that say which experts the CPU runs, shared by verbs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from simulator.policies.config import OffloadConfig

CpuLayers = Annotated[
    str | None,
    typer.Option("--cpu-layers", help="MoE layers altogether on the CPU: how many from the first on, or 'all'."),
]
CpuExperts = Annotated[
    str | None,
    typer.Option(
        "--cpu-experts",
        help="What the CPU runs of the other layers: 'misses', or 'threshold:N', misses that up to N tokens ask for.",
    ),
]
CpuThreads = Annotated[int | None, typer.Option("--cpu-threads", min=1, help="Cores that run experts on the CPU.")]


def with_cpu(
    config: OffloadConfig, layers: str | None, experts: str | None, threads: int | None = None
) -> OffloadConfig:
    """A configuration with the CPU's part as the options say; as it is where they are left out.

    Raises:
        ConfigError: an option cannot be read.
    """
    from simulator.policies.config import parse_config
    from trace_capture.errors import ConfigError

    if layers is None and experts is None and threads is None:
        return config
    cpu: dict[str, Any] = config.cpu.model_dump()
    if layers is not None:
        cpu["layers"] = "all" if layers == "all" else _number(layers, "--cpu-layers", "a number of layers, or 'all'")
    if experts is not None:
        policy, _, tokens = experts.partition(":")
        cpu["policy"] = policy
        if tokens or policy == "threshold":
            cpu["max_tokens"] = _number(tokens, "--cpu-experts threshold", "threshold:N with N tokens")
    if threads is not None:
        cpu["threads"] = threads
    chosen = parse_config(config.model_dump() | {"cpu": cpu}, where="--cpu-layers, --cpu-experts, --cpu-threads")
    if threads is not None and not chosen.cpu.is_used:
        raise ConfigError("--cpu-threads: no expert runs on the CPU; give --cpu-experts or --cpu-layers too")
    return chosen


def read_threads(text: str | None, *, has_cores: bool) -> tuple[int, ...]:
    """Numbers of threads to calibrate with: as given; else powers of two up to the cores and all of these, where the
    cores are free for experts (`has_cores`), or one.

    Raises:
        ConfigError: not numbers from 1 to the cores.
    """
    from simulator.costs.host import thread_counts
    from trace_capture.errors import ConfigError

    cores = os.cpu_count() or 1
    if text is None:
        return thread_counts(cores) if has_cores else (1,)
    counts = tuple(_number(part.strip(), "--cpu-threads", "numbers such as 1,2,4") for part in text.split(","))
    if not all(1 <= count <= cores for count in counts):
        raise ConfigError(f"--cpu-threads {text}: this machine has {cores} cores; give numbers from 1 to {cores}")
    return counts


def _number(text: str, option: str, wanted: str) -> int:
    from trace_capture.errors import ConfigError

    if not text.isdecimal():
        raise ConfigError(f"{option}: '{text}' is not a number; give {wanted}")
    return int(text)
