"""One wording for names that are not in a registry."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from trace_capture.errors import ConfigError


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """An error that lists the known names and offers the nearest."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1) or [known for known in names if name and known.startswith(name)]
    hint = f"did you mean '{near[0]}'? " if near else ""
    return ConfigError(f"unknown {what} '{name}'; {hint}choose one of: {', '.join(names)}")
