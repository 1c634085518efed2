"""Versions of the software that a record was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def software_versions(*packages: str) -> dict[str, str]:
    """Versions of this project, Python and the named packages; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in ("moe-studio", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
