"""What another program measured of a machine, put into a hardware profile made of parts."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import NamedTuple, cast

from pydantic import BaseModel

from trace_capture.errors import ProfileError
from trace_capture.hardware import DeviceProfile, HardwareProfile, HostProfile, LinkProfile, Quantity
from trace_capture.machine_parts import compose_profile, load_part, part_names


class Calibration(NamedTuple):
    """Rates in bytes per second; None for what was not measured.

    Attributes:
        source: what every number says of its origin: program and file.
        gpu: name of the device, where the file has it.
        h2d: of large copies from pinned memory to the device.
        ram_read: what all cores together read in a stream.
        cpu_experts: at which cores work through experts, alone.
        cpu_beside_copies, copies_beside_cpu: both while both run.
        cores, threads: of the host, and those that ran the experts.
        notes: what a reader should know, a sentence each.
    """

    source: str
    gpu: str | None = None
    h2d: float | None = None
    ram_read: float | None = None
    cpu_experts: float | None = None
    cpu_beside_copies: float | None = None
    copies_beside_cpu: float | None = None
    cores: int | None = None
    threads: int | None = None
    notes: tuple[str, ...] = ()


class Calibrated(NamedTuple):
    """A profile, the fields that were measured, and what a reader should know."""

    profile: HardwareProfile
    measured: tuple[str, ...]
    notes: tuple[str, ...]


def calibrated(
    found: Calibration, gpu: str | None = None, host: str | None = None, link: str | None = None
) -> Calibrated:
    """A profile with the measured rates, and all other numbers from parts.

    The rate of experts on the CPU takes the place of everything that the model of the host adds up to it: the share of
    the memory's rate that kernels reach, what small experts cost, and the dispatch of each.

    Args:
        found: the measurements.
        gpu, host, link: parts for all other numbers; where not named, the device is found by its name, and host and
            link are the ones that ship whose rate is the nearest.

    Raises:
        ProfileError: a part is unknown, or cannot be chosen from the file.
    """
    notes = list(found.notes)
    gpu = gpu or _gpu_named(found.gpu)
    device = cast(DeviceProfile, load_part("gpu", gpu))
    if found.gpu is not None and not _same_device(found.gpu, device.name):
        notes.append(f"measured on '{found.gpu}', and all numbers of the device are those of {device.name}")
    if link is None:
        link = _nearest("link", found.h2d, lambda part: cast(LinkProfile, part).h2d_bytes_per_s.value)
        notes.append(f"the link's other numbers are those of {link}, the nearest that ships; --link names another")
    if host is None:
        rate = found.ram_read or found.cpu_experts
        host = _nearest("host", rate, lambda part: cast(HostProfile, part).ram_bytes_per_s.value)
        notes.append(f"the host's other numbers are those of {host}, the nearest that ships; --host names another")
    base = compose_profile(gpu, host, link)
    base_host = cast(HostProfile, base.host)
    links = _link_numbers(found)
    hosts = _host_numbers(found, base_host)
    profile = base.model_copy(
        update={
            "name": f"{base.name} calibrated",
            "description": f"rates by {found.source}",
            "link": base.link.model_copy(update=links),
            "host": base_host.model_copy(update=hosts),
        }
    )
    measured = [f"link.{name}" for name in links] + [f"host.{name}" for name, value in hosts.items() if value]
    return Calibrated(profile, tuple(measured), tuple(notes))


def _link_numbers(found: Calibration) -> dict[str, Quantity]:
    if found.h2d is None:
        return {}
    return {"h2d_bytes_per_s": Quantity(value=found.h2d, kind="measured", source=found.source)}


def _host_numbers(found: Calibration, base: HostProfile) -> dict[str, Quantity | None]:
    def measured(value: float, more: str = "") -> Quantity:
        return Quantity(value=value, kind="measured", source=found.source + more)

    numbers: dict[str, Quantity | None] = {}
    ram = base.ram_bytes_per_s.value
    if found.ram_read is not None:
        ram = found.ram_read
        numbers["ram_bytes_per_s"] = measured(ram)
    if found.cpu_experts is not None:
        share = f": experts at {found.cpu_experts / 1e9:.1f} GB/s, over ram_bytes_per_s"
        numbers["read_ratio"] = measured(found.cpu_experts / ram, share)
        for name in ("half_rate_bytes", "expert_dispatch_ns"):
            numbers[name] = measured(0, ": contained in read_ratio")
        numbers["core_bytes_per_s"] = None
    if found.cpu_beside_copies is not None and found.copies_beside_cpu is not None:
        both = found.cpu_beside_copies + found.copies_beside_cpu
        pair = (
            f"{found.cpu_beside_copies / 1e9:.1f} GB/s of experts beside {found.copies_beside_cpu / 1e9:.1f} of copies"
        )
        numbers["contended_ratio"] = measured(both / ram, f": {pair}, over ram_bytes_per_s")
    if found.cores is not None:
        numbers["cores"] = measured(found.cores)
    if found.threads is not None:
        numbers["threads"] = measured(found.threads)
    return numbers


def _gpu_named(name: str | None) -> str:
    """The part of a device by what its driver calls it."""
    fitting = [
        part
        for part in part_names("gpu")
        if name is not None and _same_device(name, cast(DeviceProfile, load_part("gpu", part)).name)
    ]
    if len(fitting) != 1:
        what = "does not say which device it was" if name is None else f"was made on '{name}'"
        raise ProfileError(f"the file {what}: give --gpu, one of {', '.join(fitting or part_names('gpu'))}")
    return fitting[0]


def _same_device(driver_name: str, part_name: str) -> bool:
    """Whether a part, whose name is the driver's and the memory's size, is that device."""
    words = part_name.lower().split()
    return driver_name.lower().split() in (words, words[:-2])


def _nearest(kind: str, rate: float | None, of: Callable[[BaseModel], float]) -> str:
    if rate is None:
        raise ProfileError(f"the file holds no rate of the {kind}: give --{kind}, one of {', '.join(part_names(kind))}")
    return min(part_names(kind), key=lambda name: abs(log(of(load_part(kind, name)) / rate)))
