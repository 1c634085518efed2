"""Options that put a machine together, shared by the verbs that take one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from runtime.cli.app import assignments

if TYPE_CHECKING:
    from trace_capture.expert_counts import ExpertCounts
    from trace_capture.hardware import HardwareProfile
    from trace_capture.trace import Trace

Routing = TypeVar("Routing", bound="Trace | ExpertCounts")

DEFAULT_HARDWARE = "rtx4090-pcie4x16"

Hardware = Annotated[
    str, typer.Option("--hardware", help="A profile: TOML file, a shipped machine, or parts joined by '+'.")
]
Gpu = Annotated[str | None, typer.Option("--gpu", help="GPU instead of the profile's, such as rtx4090.")]
Host = Annotated[str | None, typer.Option("--host", help="CPU and memory instead, such as ddr5-6000-2ch.")]
Link = Annotated[str | None, typer.Option("--link", help="Link instead, such as pcie4x16 or nvlink-c2c.")]
Disk = Annotated[str | None, typer.Option("--disk", help="Disk for experts that RAM cannot hold, such as nvme4.")]
Set = Annotated[
    list[str], typer.Option("--set", help="One number of the machine, such as host.cores=8 (may be repeated).")
]
Weights = Annotated[
    str | None, typer.Option("--weights", help="Replay with weights in another format, such as q4_k_m or mxfp4.")
]


def in_format(trace: Routing, weights: str | None) -> Routing:
    """The same routing of a model whose weights are stored in another format; None: as they are.

    Raises:
        ModelError: the format is unknown, or the trace does not say how large its experts are.
    """
    from dataclasses import replace

    if weights is None:
        return trace
    from trace_capture.trace import Trace

    shape = trace.shape.with_weights(weights)
    changes = {"info": trace.info.model_copy(update={"shape": shape})} if isinstance(trace, Trace) else {"shape": shape}
    return replace(trace, **changes)


def chosen_profile(
    hardware: str, gpu: str | None, host: str | None, link: str | None, disk: str | None, numbers: list[str]
) -> HardwareProfile:
    """The machine that the options describe.

    Raises:
        ProfileError: a name or a number is unknown or does not fit.
    """
    from trace_capture.hardware import HardwareProfile
    from trace_capture.machine_parts import compose_profile, with_quantities

    base = HardwareProfile.load(Path(hardware))
    profile = compose_profile(gpu, host, link, disk, base=base)
    return with_quantities(profile, _numbers(numbers), "given on the command line") if numbers else profile


def hardware_flags(
    hardware: str, gpu: str | None, host: str | None, link: str | None, disk: str | None, numbers: list[str]
) -> str:
    """The same options again, for a hint to the next command."""
    parts = {"gpu": gpu, "host": host, "link": link, "disk": disk}
    named = [f"--{kind} {name}" for kind, name in parts.items() if name]
    return " ".join([f"--hardware {hardware}", *named, *[f"--set {number}" for number in numbers]])


def _numbers(texts: list[str]) -> dict[str, float | str]:
    values: dict[str, float | str] = {}
    for name, value in assignments(texts, "--set").items():
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = value
    return values
