"""Published measurements as rows of a table, and ordering facts between them."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
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


def _row(cells: dict[str, str]) -> PublishedRow:
    faults: list[str] = []
    strategy = cells["strategy"]
    if strategy not in get_args(Family) or strategy == "any":
        faults.append(f"unknown strategy '{strategy}'")
        strategy = "any"

    def number(name: str) -> float | None:
        text = cells.get(name, "").strip()
        try:
            value = float(text) if text else None
        except ValueError:
            value = math.nan
        if value is not None and not 0 <= value < math.inf:
            faults.append(f"{name} is '{text}', wanted a number or an empty cell")
            return None
        return value

    context, count, hit_rate = number("context_tokens"), number("gpu_count"), number("hit_rate")
    if count is None:
        count = first_number(r"(\d)x ", cells.get("gpu", "").lower()) or 1
    if hit_rate is not None and hit_rate > 1:
        hit_rate /= 100
    return PublishedRow(
        id=cells["id"],
        engine=cells["engine"],
        model=cells["model"],
        strategy=strategy,  # type: ignore[arg-type]  # checked above
        quantisation=cells.get("quant", ""),
        expert_bytes=number("expert_bytes") or None,
        gpu=cells.get("gpu", ""),
        gpu_count=int(count),
        device_memory_gb=number("vram_gb") or None,
        pcie=cells.get("pcie", ""),
        h2d_gb_per_s=number("h2d_gbs") or None,
        cpu=cells.get("cpu", ""),
        ram_gb_per_s=number("ram_gbs") or None,
        ram_kind=cells.get("ram_gbs_kind", ""),
        offloaded_layers=number("offloaded_layers"),
        cache_slots=number("cache_slots"),
        cache_slots_unit=cells.get("cache_slots_unit", ""),
        hit_rate=hit_rate,
        context_tokens=None if context is None else int(context),
        speculative=cells.get("speculative", ""),
        decode_per_s=number("decode_tok_s"),
        prefill_per_s=number("prefill_tok_s"),
        grade=cells.get("grade", ""),
        note=cells.get("note", ""),
        setting=cells.get("setting", ""),
        source_group=cells.get("source_group", "") or cells.get("source", ""),
        fault="; ".join(faults),
    )


def first_number(pattern: str, text: str) -> float | None:
    """The first group of a pattern that matched in a text, as a number."""
    found = re.search(pattern, text)
    if found is None:
        return None
    return float(next(group for group in found.groups() if group is not None))
