"""Traces that other programs recorded, read into the project's own `Trace`.

A new format is one module with a reader and one line in `IMPORTERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trace_capture.errors import TraceError
from trace_capture.importers.route_trace import is_route_trace, read_route_trace
from trace_capture.trace import Trace

__all__ = ["IMPORTERS", "Importer", "detect_format", "import_trace"]

_LONGEST_FIRST_LINE = 4096


class Importer(NamedTuple):
    """One foreign format: what it is, how its first line is recognised, and its reader."""

    description: str
    matches: Callable[[str], bool]
    read: Callable[[Path], Trace]


IMPORTERS: dict[str, Importer] = {
    "route-trace": Importer("BigMoeOnEdge '--route-trace' CSV, version 1", is_route_trace, read_route_trace),
}


def import_trace(path: Path, format: str | None = None) -> Trace:
    """Read a foreign trace and check it.

    Args:
        path: the file.
        format: a key of `IMPORTERS`; None to recognise it by the first line.

    Raises:
        TraceError: the file is missing or empty, its format is unknown, or it says something impossible.
    """
    path = Path(path)
    name = detect_format(path) if format is None else format
    if name not in IMPORTERS:
        raise TraceError(f"unknown trace format '{name}' for {path}; choose one of: {', '.join(sorted(IMPORTERS))}")
    return IMPORTERS[name].read(path)


def detect_format(path: Path) -> str:
    """The key in `IMPORTERS` of a file, by its first line.

    Raises:
        TraceError: the file is missing, empty, or no importer knows its first line.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            first = stream.readline(_LONGEST_FIRST_LINE).decode("utf-8", errors="replace").strip()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}; give the path of a recorded trace") from error
    if not first:
        raise TraceError(f"{path} begins with an empty line or is an empty file; record the trace again")
    for name, importer in IMPORTERS.items():
        if importer.matches(first):
            return name
    known = "; ".join(f"{name} ({importer.description})" for name, importer in sorted(IMPORTERS.items()))
    raise TraceError(f"{path} is in no known trace format (first line: '{first[:60]}'); known formats: {known}")
