"""Points of a sweep as tables: CSV for spreadsheets, Parquet for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from simulator.answers import COLUMNS
from simulator.sweep import Point
from trace_capture.files import atomic_path, write_text_atomic

_TEXTS = ("label", "hardware", "model", "what_limits", "error")


def rows_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """One flat row per point: what was swept, the numbers of the answer (None where it is impossible), the texts."""
    return [dict(point.values) | {name: point.answer.get(name) for name in (*COLUMNS, *_TEXTS)} for point in points]


def write_csv(points: Sequence[Point], path: Path) -> None:
    """Write the rows as CSV with a header, atomically."""
    rows = rows_of(points)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text_atomic(path, text.getvalue())


def write_parquet(points: Sequence[Point], path: Path) -> None:
    """Write the rows as Parquet, atomically; numbers are float64, everything else text."""
    rows = rows_of(points)
    columns: dict[str, pa.Array] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        is_number = name in COLUMNS
        columns[name] = pa.array(
            [None if value is None else float(value) if is_number else str(value) for value in values],
            type=pa.float64() if is_number else pa.string(),
        )
    with atomic_path(path) as temporary:
        pq.write_table(pa.table(columns), temporary)
