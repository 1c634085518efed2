"""Numbers as people read them. A number that is missing is shown as a dash, never as zero."""

from __future__ import annotations

import math

MISSING = "–"
EMULATED = "emulated link"
"""Shown wherever figures of a run with an emulated device or link are shown."""


def format_number(value: float | None) -> str:
    """About three significant digits, without exponents for the sizes that occur here."""
    if value is None or not math.isfinite(value):
        return MISSING
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def format_ms(value_ms: float | None) -> str:
    """A duration in milliseconds, or microseconds where that reads better."""
    if value_ms is None or not math.isfinite(value_ms):
        return MISSING
    if 0 < abs(value_ms) < 0.1:
        return f"{format_number(value_ms * 1e3)} µs"
    return f"{format_number(value_ms)} ms"


def format_bytes(num_bytes: float | None) -> str:
    """Bytes with a decimal unit, as links and data sheets count them."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return MISSING
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= size:
            return f"{format_number(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def format_percent(ratio: float | None, *, signed: bool = False, digits: int = 1) -> str:
    """A ratio as a percentage."""
    if ratio is None or not math.isfinite(ratio):
        return MISSING
    return f"{ratio * 100:{'+' if signed else ''}.{digits}f} %"


def format_times(ratio: float | None) -> str:
    """A speed-up such as `2.41x`."""
    return MISSING if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}×"


def short_digest(digest: str) -> str:
    """The first twelve hex digits of a digest, enough to tell two files apart by eye."""
    return digest.removeprefix("sha256:")[:12] or MISSING


def plural(count: int, noun: str) -> str:
    """`1 run`, `2 runs`, `1,234 passes`."""
    suffix = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{suffix}"
