"""Machines put together from parts: a GPU, a host, a link and a disk, each one TOML file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from trace_capture.errors import ProfileError
from trace_capture.hardware import (
    DeviceProfile,
    DiskProfile,
    HardwareProfile,
    HostProfile,
    LinkProfile,
    Quantity,
    checked,
    read_toml,
)
from trace_capture.samples import sample_folder

PART_KINDS = ("gpu", "host", "link", "disk")
_TYPES: dict[str, type[BaseModel]] = {
    "gpu": DeviceProfile,
    "host": HostProfile,
    "link": LinkProfile,
    "disk": DiskProfile,
}
_FIELDS = {"gpu": "device", "host": "host", "link": "link", "disk": "disk"}
_JOINT = "+"


def part_names(kind: str) -> list[str]:
    """Names of the parts of a kind that ship with the project."""
    return sorted(path.stem for path in _folder(kind).glob("*.toml"))


def load_part(kind: str, name: str) -> BaseModel:
    """One part.

    Args:
        kind: one of `PART_KINDS`.
        name: one of `part_names(kind)`, or the path of a TOML file with the same keys.

    Raises:
        ProfileError: no such part, or a field in its file is missing or wrong.
    """
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return checked(_TYPES[kind], read_toml(path, f"{kind} part"), f"{kind} part {path}")
    if name not in part_names(kind):
        raise _unknown(kind, name, part_names(kind))
    return _shipped_part(kind, _folder(kind) / f"{name}.toml")


@cache
def _shipped_part(kind: str, path: Path) -> BaseModel:
    """Read once, since a sweep asks for the same few over and over."""
    return checked(_TYPES[kind], read_toml(path, f"{kind} part"), f"{kind} part {path}")


def compose_profile(
    gpu: str | None = None,
    host: str | None = None,
    link: str | None = None,
    disk: str | None = None,
    base: HardwareProfile | None = None,
) -> HardwareProfile:
    """A machine from parts by name.

    Args:
        gpu: needed without a base.
        host: may be absent where no expert runs on the CPU.
        link: needed without a base.
        disk: for experts that do not fit into the host's memory.
        base: a machine whose parts are used where none is named. Another GPU takes its measured compute times
            away, any other part its error band.

    Raises:
        ProfileError: a name is unknown, or a part that is needed is missing.
    """
    named = {kind: name for kind, name in zip(PART_KINDS, (gpu, host, link, disk), strict=True) if name is not None}
    if base is not None and not named:
        return base
    fields: dict[str, Any] = {_FIELDS[kind]: load_part(kind, name) for kind, name in named.items()}
    if base is not None:
        fields = {"measured": None if gpu else base.measured, "emulated": base.emulated and not link} | fields
        fields |= {"error_band": None, "description": ""}
        return base.model_copy(update=fields | {"name": _joined_name(base.name, named)})
    for kind in ("gpu", "link"):
        if kind not in named:
            raise ProfileError(f"a machine needs a {kind}: give --{kind}, one of {', '.join(part_names(kind))}")
    return HardwareProfile(name=_JOINT.join(named[kind] for kind in PART_KINDS if kind in named), **fields)


def named_profile(name: str) -> HardwareProfile:
    """A machine that ships with the project, or parts joined by `+`.

    Raises:
        ProfileError: neither; the message lists what there is.
    """
    machines = _machines()
    if name in machines:
        parts = machines[name]
        profile = _composed(parts)
        return profile.model_copy(update={"name": name, "description": parts.get("description", "")})
    if _JOINT in name and Path(name).suffix != ".toml" and Path(name).parent == Path():
        return _composed(_parts_of(name.split(_JOINT)))
    raise ProfileError(
        f"no hardware profile '{name}'; give a TOML file, one of {', '.join(profile_names())}, parts joined by '+' "
        "such as rtx4090+ddr5-6000-2ch+pcie4x16 ('moe-studio hardware' lists them), or make one with "
        "'moe-studio calibrate'"
    )


def profile_names() -> list[str]:
    """Names of the machines that ship with the project."""
    return sorted(_machines())


def with_quantities(profile: HardwareProfile, values: dict[str, float | str], source: str) -> HardwareProfile:
    """A profile with some of its numbers replaced.

    Args:
        profile: the machine.
        values: by dotted name, such as `host.cores` or `link.host_memory`.
        source: where the new numbers come from; their kind is `guess`.

    Raises:
        ProfileError: a name is unknown, its table is missing, or the value does not fit.
    """
    raw = profile.model_dump()
    for name, value in values.items():
        table, _, key = name.partition(".")
        known = _settable(table)
        if key not in known:
            raise _unknown("hardware number", name, [f"{t}.{k}" for t in _FIELDS.values() for k in _settable(t)])
        if raw[table] is None:
            raise ProfileError(f"hardware profile '{profile.name}' has no {table} whose {key} could be set; name one")
        is_number = known[key] and not isinstance(value, str)
        raw[table][key] = {"value": value, "kind": "guess", "source": source} if is_number else value
    return checked(HardwareProfile, raw, f"hardware profile '{profile.name}'")


def _settable(table: str) -> dict[str, bool]:
    """Fields of a table of the profile, and whether each is a number with an origin."""
    kinds = {field: _TYPES[kind] for kind, field in _FIELDS.items()}
    if table not in kinds:
        return {}
    fields = {key: field.annotation for key, field in kinds[table].model_fields.items() if key != "name"}
    return {key: kind is Quantity or Quantity in get_args(kind) and get_origin(kind) is not None
            for key, kind in fields.items()}  # fmt: skip


def _composed(parts: Mapping[str, str]) -> HardwareProfile:
    return compose_profile(parts.get("gpu"), parts.get("host"), parts.get("link"), parts.get("disk"))


def _parts_of(names: Sequence[str]) -> dict[str, str]:
    """Which kind of part each name is."""
    found: dict[str, str] = {}
    for name in names:
        kinds = [kind for kind in PART_KINDS if name in part_names(kind)]
        if not kinds:
            raise _unknown("hardware part", name, [known for kind in PART_KINDS for known in part_names(kind)])
        if kinds[0] in found:
            raise ProfileError(f"'{_JOINT.join(names)}' names two of kind {kinds[0]}; leave one out")
        found[kinds[0]] = name
    return found


def _joined_name(base: str, named: dict[str, str]) -> str:
    """The name of a machine with some parts replaced: its parts where the base is made of parts, else an addition."""
    machines = _machines()
    parts = dict(machines[base]) if base in machines else None
    if parts is None and _JOINT in base:
        try:
            parts = _parts_of(base.split(_JOINT))
        except ProfileError:
            parts = None
    if parts is None:
        return _JOINT.join([base, *named.values()])
    merged = parts | named
    return _JOINT.join(merged[kind] for kind in PART_KINDS if kind in merged)


def _machines() -> Mapping[str, Mapping[str, str]]:
    return _shipped_machines(sample_folder() / "hardware" / "machines.toml")


@cache
def _shipped_machines(path: Path) -> Mapping[str, Mapping[str, str]]:
    return read_toml(path, "list of machines")


def _folder(kind: str) -> Path:
    return sample_folder() / "hardware" / f"{kind}s"


def _unknown(what: str, name: str, known: Sequence[str]) -> ProfileError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return ProfileError(f"unknown {what} '{name}'; {hint}known: {', '.join(known)}")
