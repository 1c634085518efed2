"""Choosing a machine: a profile of the folder, or one that ships with the project."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc

from dashboard.address import Query, one_of
from dashboard.data import Snapshot
from trace_capture.hardware import HardwareProfile
from trace_capture.machine_parts import named_profile, profile_names

NONE = "none"
"""Value of a choice that was left open; files end in a suffix, so that no file is called so."""


def machine_select(select_id: str, snapshot: Snapshot, query: Query, *, optional: bool = False) -> Any:
    """A choice of machines, set to the one that the address names in `hardware`, else the folder's first."""
    own = [item.name for item in snapshot.profiles]
    shipped = profile_names()
    groups = [{"group": "Ships with the project", "items": shipped}]
    groups = [{"group": "In this folder", "items": own}, *groups] if own else groups
    names = [*own, *shipped]
    if optional:
        groups = [{"group": "Leave open", "items": [NONE]}, *groups]
        names = [*own, NONE, *shipped]
    return dmc.Select(
        id=select_id,
        label="Machine",
        data=groups,
        value=one_of(query.get("hardware"), names),
        allowDeselect=False,
        searchable=True,
        className="control",
    )


def machine_named(snapshot: Snapshot, name: str | None) -> HardwareProfile | None:
    """The profile of that name. A name that is not offered, such as a path, is none."""
    own = next((item.profile for item in snapshot.profiles if item.name == name), None)
    return named_profile(name) if own is None and name in profile_names() else own
