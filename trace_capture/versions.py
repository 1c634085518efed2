"""Versions of the software that a record was made with."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version


def software_versions(*packages: str) -> dict[str, str]:
    """Versions of this project, Python and the named packages; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in ("moe-studio", *packages):
        installed = _installed(package)
        if installed is not None:
            found[package] = installed
    return found


@cache
def _installed(package: str) -> str | None:
    """Remembered, since every simulated run asks and the answer is parsed out of a file."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
