"""Traces and counts that other programs recorded, read into the project's own `Trace` or `ExpertCounts`.

A new format is one module with a reader and one line in `IMPORTERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trace_capture.errors import TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.importers.count_tables import (
    is_counts_csv,
    is_freetoken,
    is_logical_count,
    read_counts_csv,
    read_freetoken,
    read_logical_count,
)
from trace_capture.importers.formats import NO_OPTIONS, FileHead, Importer, ImportOptions
from trace_capture.importers.imatrix import is_imatrix, read_imatrix
from trace_capture.importers.moe_policylang import is_policylang, read_policylang
from trace_capture.importers.moe_trace import is_moe_trace, read_moe_trace
from trace_capture.importers.responses import is_responses, read_responses
from trace_capture.importers.route_trace import is_route_trace, read_route_trace
from trace_capture.importers.routed_array import is_array, read_array
from trace_capture.trace import Trace

__all__ = ["IMPORTERS", "FileHead", "ImportOptions", "Importer", "detect_format", "import_file", "import_trace"]

IMPORTERS: dict[str, Importer] = {
    "route-trace": Importer("BigMoeOnEdge '--route-trace' CSV, version 1", "trace", is_route_trace, read_route_trace),
    "routed-array": Importer("vLLM 'routed_experts' as a .npy file", "trace", is_array, read_array),
    "responses": Importer(
        "answers of a vLLM or SGLang server with 'routed_experts', JSON or JSON lines",
        "trace",
        is_responses,
        read_responses,
    ),
    "moe-trace": Importer(
        "llama.cpp moe-trace CSV: 'layer,expert', 'pos,layer,ids', or 'phase,token,layer,rank,expert'",
        "trace",
        is_moe_trace,
        read_moe_trace,
    ),
    "moe-policylang": Importer("moe-policylang JSON lines or Parquet", "trace", is_policylang, read_policylang),
    "imatrix": Importer("llama.cpp importance matrix, GGUF (pip package gguf)", "counts", is_imatrix, read_imatrix),
    "freetoken": Importer("FreeToken's 'expert_counts' profile, JSON", "counts", is_freetoken, read_freetoken),
    "logical-count": Importer(
        "SGLang and kt-kernel 'logical_count', JSON", "counts", is_logical_count, read_logical_count
    ),
    "counts-csv": Importer("SGLang 'layer_id,expert_id,count' CSV", "counts", is_counts_csv, read_counts_csv),
}


def import_file(
    path: Path,
    format: str | None = None,
    options: ImportOptions = NO_OPTIONS,
    importers: Mapping[str, Importer] = IMPORTERS,
) -> Trace | ExpertCounts:
    """Read a foreign file and check it.

    Args:
        path: the file.
        format: a key of `importers`; None to recognise it by its content.
        options: what the file does not say.
        importers: the formats to choose from.

    Raises:
        TraceError: the file is missing or empty, its format is unknown, it says something impossible, or something
            that it does not say was not given.
    """
    path = Path(path)
    name = detect_format(path, importers) if format is None else format
    if name not in importers:
        raise TraceError(f"unknown trace format '{name}' for {path}; choose one of: {', '.join(sorted(importers))}")
    return importers[name].read(path, options)


def import_trace(path: Path, format: str | None = None, options: ImportOptions = NO_OPTIONS) -> Trace:
    """Read a foreign trace and check it; see `import_file`.

    Raises:
        TraceError: as there, or the file holds counts without order.
    """
    routing = import_file(path, format, options)
    if not isinstance(routing, Trace):
        raise TraceError(f"{path} holds counts of experts without their order, so it is no trace")
    return routing


def detect_format(path: Path, importers: Mapping[str, Importer] = IMPORTERS) -> str:
    """The key in `importers` of a file, by its content.

    Raises:
        TraceError: the file is missing, empty, or in no known format.
    """
    head = FileHead.of(path)
    for name, importer in importers.items():
        if importer.matches(head):
            return name
    known = "; ".join(f"{name} ({importer.description})" for name, importer in sorted(importers.items()))
    raise TraceError(f"{path} is in no known trace format (first line: '{head.line[:60]}'); known formats: {known}")
