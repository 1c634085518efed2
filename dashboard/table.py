"""The comparison as a table: the same cells on the page and in the report."""

from __future__ import annotations

from dataclasses import dataclass

from dashboard.texts import EMULATED, format_bytes, format_number, format_percent, format_times
from dashboard.views import BASELINE, ComparisonRow

COLUMN_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ("strategy",)),
    ("time per output token (ms)", ("predicted", "band", "measured", "error")),
    ("hit rate, decode", ("predicted", "measured")),
    ("copied per token", ("predicted", "measured")),
    (f"speed against {BASELINE}", ("predicted", "measured")),
)
"""Headings in two rows: (group, its columns)."""
TABLE_NOTE = (
    "Error: predicted over measured, less one. Band: a share of predicted, within which measured should lie. "
    f"Speed: how many times as many tokens per second as {BASELINE}. "
    "Copied: expert weights over the link per output token."
)


@dataclass(frozen=True)
class Cell:
    """Text for people; the number behind it for programs; a remark shown beside it."""

    text: str
    value: float | None = None
    remark: str = ""


def _band_cell(row: ComparisonRow) -> Cell:
    if row.band is None:
        return Cell("none")
    low, high = row.band.low_ratio - 1, row.band.high_ratio - 1
    text = f"{format_percent(low, signed=True)} to {format_percent(high, signed=True)}"
    return Cell(text, row.band.half_width_ratio, row.band.source)


def cells(row: ComparisonRow) -> tuple[Cell, ...]:
    """The cells of a row in the order of `COLUMN_GROUPS`."""
    inside = {True: "inside band", False: "outside band", None: ""}[row.is_inside_band]
    remarks = ([EMULATED] if row.emulated else []) + ([row.warning] if row.warning else [])
    return (
        Cell(row.label, remark="; ".join(remarks)),
        Cell(format_number(row.predicted_tpot_ms), row.predicted_tpot_ms),
        _band_cell(row),
        Cell(format_number(row.measured_tpot_ms), row.measured_tpot_ms),
        Cell(format_percent(row.error_ratio, signed=True), row.error_ratio, inside),
        Cell(format_percent(row.predicted_hit_rate), row.predicted_hit_rate),
        Cell(format_percent(row.measured_hit_rate), row.measured_hit_rate),
        Cell(format_bytes(row.predicted_bytes_per_token), row.predicted_bytes_per_token),
        Cell(format_bytes(row.measured_bytes_per_token), row.measured_bytes_per_token),
        Cell(format_times(row.predicted_speedup), row.predicted_speedup),
        Cell(format_times(row.measured_speedup), row.measured_speedup),
    )
