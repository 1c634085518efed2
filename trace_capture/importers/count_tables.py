"""Tables of how often each expert was used, without order: FreeToken, SGLang and kt-kernel.

- FreeToken's profile for `--moe-cache-split profile:`: JSON `{"model": .., "expert_counts": [[layers x experts]]}`.
- SGLang and kt-kernel's `--init-expert-location` file: JSON with `logical_count`, [layers, experts], or one such
  table per recorded step in front.
- SGLang's first expert recorder (2025): CSV `layer_id,expert_id,count`.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_capture.errors import ModelError, TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.importers.formats import FileHead, ImportOptions, provenance, read_text
from trace_capture.known_shapes import known_shape
from trace_capture.model_shape import ModelShape

NO_ORDER = "only counts are known: no order of tokens, so no hit rate of a cache that evicts, and no time"
_CSV_HEADER = ["layer_id", "expert_id", "count"]


def is_freetoken(head: FileHead) -> bool:
    """Whether a file is FreeToken's profile."""
    return head.is_json and head.contains(b'"expert_counts"')


def is_logical_count(head: FileHead) -> bool:
    """Whether a file is a table for `--init-expert-location`."""
    return head.is_json and head.contains(b'"logical_count"')


def is_counts_csv(head: FileHead) -> bool:
    """Whether a file is SGLang's CSV of counts."""
    return head.line.replace(" ", "").split(",") == _CSV_HEADER


def read_freetoken(path: Path, options: ImportOptions) -> ExpertCounts:
    """Read FreeToken's profile; the model may be given by its own name in the file.

    Raises:
        TraceError: not JSON, not a table of counts, or one that does not fit the model.
    """
    raw = _object(path)
    shape = options.shape or _named(raw.get("model"), path)
    return counted(raw.get("expert_counts"), shape, "freetoken", path)


def read_logical_count(path: Path, options: ImportOptions) -> ExpertCounts:
    """Read a `logical_count` file.

    Raises:
        TraceError: not JSON, not a table of counts, or one that does not fit the model.
    """
    return counted(_object(path).get("logical_count"), options.require_shape(path), "logical-count", path)


def read_counts_csv(path: Path, options: ImportOptions) -> ExpertCounts:
    """Read SGLang's CSV; layers are decoder layers.

    Raises:
        TraceError: a cell is no number, or a layer or expert is beyond the model's.
    """
    shape = options.require_shape(path)
    table = np.zeros((shape.num_layers, shape.num_experts), dtype=np.int64)
    rows = list(csv.reader(read_text(path).splitlines()))
    for number, cells in enumerate(rows[1:], start=2):
        try:
            layer, expert, count = (int(cell) for cell in cells)
        except ValueError as error:
            raise TraceError(f"{path}: line {number} is not three whole numbers ({error}); record it again") from error
        if not (0 <= layer < shape.num_layers and 0 <= expert < shape.num_experts):
            raise TraceError(
                f"{path}: line {number} has layer {layer}, expert {expert}; {shape.name} has {shape.num_layers} layers "
                f"x {shape.num_experts} experts; give the model that was recorded with --model"
            )
        table[layer, expert] += count
    return counted(table, shape, "counts-csv", path)


def counted(
    table: Any, shape: ModelShape, source: str, path: Path, physical_to_logical: npt.NDArray[Any] | None = None
) -> ExpertCounts:
    """Counts from a table [layers, experts], or several of them one after another, whose sum is taken.

    Args:
        table: whole numbers; layers are the MoE layers or all decoder layers.
        shape: the model.
        source: name of the format.
        path: the file, for messages and provenance.
        physical_to_logical: [layers, experts of the table] -> expert, where the table counts replicas.

    Raises:
        TraceError: ragged, not numbers, or of another size than the model's.
    """
    notes = [NO_ORDER]
    try:
        values = np.asarray(table, dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise TraceError(f"{path}: its counts are no table of numbers; record them again") from error
    if values.ndim == 3:
        notes.append(f"the sum of {len(values)} recorded steps")
        values = values.sum(axis=0)
    if values.ndim != 2 or not np.isfinite(values).all():
        raise TraceError(f"{path}: its counts have shape {values.shape}, wanted [layers, experts]; record them again")
    if physical_to_logical is not None and physical_to_logical.shape == values.shape:
        values = _logical(values, physical_to_logical, shape.num_experts, path)
        notes.append("counts of replicated experts are added up by the recorded map")
    if values.shape[1] > shape.num_experts and values.shape[0] in (shape.num_layers, shape.num_moe_layers):
        raise TraceError(
            f"{path} counts {values.shape[1]} experts of {shape.num_experts} of {shape.name}: physical experts of an "
            "engine that replicates them (record logical ones), or another model (give it with --model)"
        )
    if len(values) == shape.num_layers != shape.num_moe_layers:
        dense = sorted(set(range(len(values))) - set(shape.moe_layer_ids))
        if values[dense].any():
            raise TraceError(f"{path} counts experts in dense layers of {shape.name}; give the right --model")
        values = values[list(shape.moe_layer_ids)]
    return ExpertCounts(shape, np.rint(values).astype(np.int64), f"import:{source}", provenance(path, notes))


def _logical(
    values: npt.NDArray[np.float64], logical: npt.NDArray[Any], num_experts: int, path: Path
) -> npt.NDArray[np.float64]:
    if logical.min() < 0 or logical.max() >= num_experts:
        raise TraceError(f"{path}: its map of physical to logical experts goes beyond {num_experts}; record it again")
    result = np.zeros((len(values), num_experts))
    for layer, row in enumerate(values):
        result[layer] = np.bincount(logical[layer], weights=row, minlength=num_experts)
    return result


def _named(name: Any, path: Path) -> ModelShape:
    try:
        return known_shape(str(name))
    except ModelError as error:
        raise TraceError(f"{path} is of model '{name}', not built in: give --model config.json") from error


def _object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_text(path))
    except ValueError as error:
        raise TraceError(f"{path} is not JSON ({error}); record it again") from error
    if not isinstance(raw, dict):
        raise TraceError(f"{path} holds no JSON object; record it again")
    return raw
