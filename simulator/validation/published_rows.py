"""Published measurements as rows of a table, and ordering facts between them."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from simulator.validation.record import Family
from trace_capture.errors import TraceError

NEEDED = ("id", "engine", "model", "strategy", "decode_tok_s")
PAIR_COLUMNS = ("id_faster", "id_slower", "metric", "strength")


@dataclass(frozen=True)
class PublishedRow:
    """One operating point as its source gives it. Empty cells are None or ""; units are in the names."""

    id: str
    engine: str
    model: str
    strategy: Family
    quantisation: str = ""
    expert_bytes: float | None = None
    gpu: str = ""
    gpu_count: int = 1
    device_memory_gb: float | None = None
    pcie: str = ""
    h2d_gb_per_s: float | None = None
    cpu: str = ""
    ram_gb_per_s: float | None = None
    ram_kind: str = ""
    """theoretical, stated or measured."""
    offloaded_layers: float | None = None
    cache_slots: float | None = None
    cache_slots_unit: str = ""
    hit_rate: float | None = None
    context_tokens: int | None = None
    speculative: str = ""
    decode_per_s: float | None = None
    prefill_per_s: float | None = None
    grade: str = ""
    note: str = ""
    setting: str = ""
    source_group: str = ""
    fault: str = ""
    """What is wrong with a cell, if anything: such a row is not predicted."""

    @property
    def text(self) -> str:
        """Everything that the source says in words, in lower case."""
        return " | ".join((self.note, self.setting, self.cpu, self.gpu, self.pcie, self.speculative)).lower()


@dataclass(frozen=True)
class OrderedPair:
    """Two rows of which the first was measured to be faster."""

    faster: str
    slower: str
    metric: str
    """decode or prefill."""
    strong: bool


def read_rows(path: Path) -> list[PublishedRow]:
    """The rows of a table of published measurements, in its order.

    Raises:
        TraceError: missing, or without a column that is needed.
    """
    return [_row(cells) for cells in _read(path, NEEDED)]


def read_pairs(path: Path) -> list[OrderedPair]:
    """The ordering facts of a table.

    Raises:
        TraceError: missing, or without a column that is needed.
    """
    return [
        OrderedPair(cells["id_faster"], cells["id_slower"], cells["metric"], cells["strength"] == "strong")
        for cells in _read(path, PAIR_COLUMNS)
    ]


def _read(path: Path, needed: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            rows = [{key: value or "" for key, value in cells.items() if key is not None} for cells in reader]
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}; give a table of published measurements") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path} is not a table with comma-separated values: {error}") from error
    if missing:
        raise TraceError(f"{path} has no column {', '.join(missing)}; the head of the file must name it")
    return rows


class _Cells:
    """Cells of one row as numbers; what cannot be read is kept as a fault of the row."""

    def __init__(self, cells: dict[str, str]) -> None:
        self._cells = cells
        self.faults: list[str] = []

    def text(self, name: str) -> str:
        return self._cells.get(name, "")

    def number(self, name: str) -> float | None:
        text = self.text(name).strip()
        try:
            value = float(text) if text else None
        except ValueError:
            value = math.nan
        if value is not None and not 0 <= value < math.inf:
            self.faults.append(f"{name} is '{text}', wanted a number or an empty cell")
            return None
        return value

    def positive(self, name: str) -> float | None:
        """A size or a rate, of which 0 says that it is not known."""
        return self.number(name) or None

    def strategy(self) -> Family:
        text = self.text("strategy")
        found: Family = next((known for known in get_args(Family) if known == text), "any")
        if found == "any":
            self.faults.append(f"unknown strategy '{text}'")
        return found

    def gpu_count(self) -> int:
        count = self.number("gpu_count")
        return int(first_number(r"(\d)x ", self.text("gpu").lower()) or 1) if count is None else int(count)

    def hit_rate(self) -> float | None:
        """From 0 to 1; larger numbers are percent."""
        rate = self.number("hit_rate")
        return rate / 100 if rate is not None and rate > 1 else rate


def _row(values: dict[str, str]) -> PublishedRow:
    cells = _Cells(values)
    context = cells.number("context_tokens")
    row = PublishedRow(
        id=values["id"],
        engine=values["engine"],
        model=values["model"],
        strategy=cells.strategy(),
        quantisation=cells.text("quant"),
        expert_bytes=cells.positive("expert_bytes"),
        gpu=cells.text("gpu"),
        gpu_count=cells.gpu_count(),
        device_memory_gb=cells.positive("vram_gb"),
        pcie=cells.text("pcie"),
        h2d_gb_per_s=cells.positive("h2d_gbs"),
        cpu=cells.text("cpu"),
        ram_gb_per_s=cells.positive("ram_gbs"),
        ram_kind=cells.text("ram_gbs_kind"),
        offloaded_layers=cells.number("offloaded_layers"),
        cache_slots=cells.number("cache_slots"),
        cache_slots_unit=cells.text("cache_slots_unit"),
        hit_rate=cells.hit_rate(),
        context_tokens=None if context is None else int(context),
        speculative=cells.text("speculative"),
        decode_per_s=cells.number("decode_tok_s"),
        prefill_per_s=cells.positive("prefill_tok_s"),
        grade=cells.text("grade"),
        note=cells.text("note"),
        setting=cells.text("setting"),
        source_group=cells.text("source_group") or cells.text("source"),
    )
    return replace(row, fault="; ".join(cells.faults))


def first_number(pattern: str, text: str) -> float | None:
    """The first group of a pattern that matched in a text, as a number."""
    found = re.search(pattern, text)
    if found is None:
        return None
    return float(next(group for group in found.groups() if group is not None))
