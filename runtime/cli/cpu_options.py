"""Options that say which experts the CPU runs, shared by verbs."""

from __future__ import annotations

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


def with_cpu(config: OffloadConfig, layers: str | None, experts: str | None) -> OffloadConfig:
    """A configuration with the CPU's part as the options say; as it is where they are left out.

    Raises:
        ConfigError: an option cannot be read.
    """
    from simulator.policies.config import parse_config

    if layers is None and experts is None:
        return config
    cpu: dict[str, Any] = config.cpu.model_dump()
    if layers is not None:
        cpu["layers"] = "all" if layers == "all" else _number(layers, "--cpu-layers", "a number of layers, or 'all'")
    if experts is not None:
        policy, _, tokens = experts.partition(":")
        cpu["policy"] = policy
        if tokens or policy == "threshold":
            cpu["max_tokens"] = _number(tokens, "--cpu-experts threshold", "threshold:N with N tokens")
    return parse_config(config.model_dump() | {"cpu": cpu}, where="--cpu-layers, --cpu-experts")


def _number(text: str, option: str, wanted: str) -> int:
    from trace_capture.errors import ConfigError

    if not text.isdecimal():
        raise ConfigError(f"{option}: '{text}' is not a number; give {wanted}")
    return int(text)
