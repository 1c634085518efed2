"""Traces of moe-policylang's recorder, as JSON lines or Parquet: one row per prompt, token and layer.

JSON lines begin with a header (`model_name`, `num_layers`, `num_experts`, `top_k`, `num_entries`); rows have `p`
prompt, `t` token, `l` layer, `e` experts, `s` their weights, and may have `ti` token id and `ph` phase. Parquet has the
same as `prompt_id`, `token_idx`, `layer_idx`, `selected_experts`, `router_scores`, `token_id`, `phase`, and no header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_capture.errors import TraceError
from trace_capture.importers.assemble import RoutedSequence, split_at_prompt, to_trace
from trace_capture.importers.formats import FileHead, ImportOptions, provenance, read_text
from trace_capture.importers.routed_rows import RoutedRows, routed_rows
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Trace

_HEADER = ("num_layers", "num_experts", "top_k")
_NAMES = {
    "prompt_id": "p",
    "token_idx": "t",
    "layer_idx": "l",
    "selected_experts": "e",
    "router_scores": "s",
    "token_id": "ti",
    "phase": "ph",
}
_MEND = "the file was cut or edited; record it again"

Columns = Mapping[str, Sequence[Any]]


def is_policylang(head: FileHead) -> bool:
    """Whether a file is such a trace."""
    if head.start.startswith(b"PAR1"):
        return head.contains(b"selected_experts") and head.contains(b"prompt_id")
    return head.is_json and all(f'"{name}"' in head.line for name in _HEADER)


def read_policylang(path: Path, options: ImportOptions) -> Trace:
    """Read either form. Every prompt is a sequence.

    Raises:
        TraceError: cut, rows are missing or double, or they do not fit the model.
    """
    shape = options.require_shape(path)
    is_parquet = FileHead.of(path).start.startswith(b"PAR1")
    header, columns = ({}, _parquet(path)) if is_parquet else _lines(path)
    if header and header["num_experts"] != shape.num_experts:
        raise TraceError(
            f"{path} is of '{header.get('model_name')}' with {header['num_experts']} experts, {shape.name} has "
            f"{shape.num_experts}; give the model that was recorded with --model"
        )
    layers = _layer_places(columns["l"], shape, path)
    sequences: list[RoutedSequence] = []
    notes: list[str] = []
    by_prompt: dict[int, list[int]] = {}
    for place, prompt in enumerate(columns["p"]):
        by_prompt.setdefault(prompt, []).append(place)
    for prompt, places in by_prompt.items():
        rows, one = _sequence(columns, places, layers, shape, options, f"{path}: prompt {prompt}")
        notes += rows.notes
        sequences.append(one)
    options_kept = provenance(path, list(dict.fromkeys(notes)))
    final = rows.shape if sequences else shape
    return to_trace(final, sequences, "moe-policylang", options_kept, str(path))


def _sequence(
    columns: Columns, places: list[int], layers: npt.NDArray[np.int64], shape: ModelShape, options: ImportOptions,
    where: str,
) -> tuple[RoutedRows, RoutedSequence]:  # fmt: skip
    tokens = np.array([columns["t"][place] for place in places])
    token, count = tokens - tokens.min(), int(np.ptp(tokens)) + 1
    layer = layers[places]
    experts = [columns["e"][place] for place in places]
    top_k = len(experts[0])
    if count * shape.num_moe_layers != len(places) or len(set(zip(token, layer, strict=True))) != len(places):
        raise TraceError(
            f"{where} has {len(places)} rows for {count} tokens x {shape.num_moe_layers} layers: rows are missing or "
            f"double; {_MEND}"
        )
    if {len(ids) for ids in experts} != {top_k}:
        raise TraceError(f"{where} has rows with different numbers of experts; {_MEND}")
    ids = np.empty((count, shape.num_moe_layers, top_k), dtype=np.int64)
    ids[token, layer] = experts
    rows = routed_rows(ids, shape, where)
    if rows.dropped:
        raise TraceError(f"{where} begins with a warm-up of {rows.dropped} equal tokens; record it without")
    prompt = _prompt_tokens(columns, places, token, options, where)
    one = split_at_prompt(rows.experts, prompt, where)._replace(first_position=int(tokens.min()))
    scores = [columns["s"][place] for place in places] if "s" in columns else []
    if scores and all(score is not None and len(score) == top_k for score in scores):
        weights = np.zeros(ids.shape, dtype=np.float16)
        weights[token, layer] = scores
        one = one._replace(weights=weights)
    if "ti" in columns and all(columns["ti"][place] is not None for place in places):
        token_ids = np.zeros(count, dtype=np.int32)
        token_ids[token] = [columns["ti"][place] for place in places]
        one = one._replace(token_ids=token_ids)
    return rows, one


def _prompt_tokens(
    columns: Columns, places: list[int], token: npt.NDArray[np.int64], options: ImportOptions, where: str
) -> int:
    """Length of the prompt: by the phases in the file, else as given."""
    phases = [columns["ph"][place] for place in places] if "ph" in columns else [None]
    if any(phase is None for phase in phases):
        return options.require_prompt_tokens(Path(where))
    in_prompt = np.array([phase == "prefill" for phase in phases])
    length = len(set(token[in_prompt].tolist()))
    if (token[in_prompt] >= length).any() or (token[~in_prompt] < length).any():
        raise TraceError(f"{where} has prefill rows behind decode rows; {_MEND}")
    return length


def _layer_places(values: Sequence[int], shape: ModelShape, path: Path) -> npt.NDArray[np.int64]:
    """MoE layer index of each row; the recorder counts decoder layers, or MoE layers alone."""
    found = sorted(set(values))
    for ids in (list(shape.moe_layer_ids), list(range(shape.num_moe_layers))):
        if found == ids:
            return np.searchsorted(ids, np.array(values))
    raise TraceError(
        f"{path} has layers {found[0]} to {found[-1]}, {len(found)} in all; {shape.name} has experts in "
        f"{shape.num_moe_layers} layers from {shape.moe_layer_ids[0]} to {shape.moe_layer_ids[-1]}; give the right "
        "--model, or record it again"
    )


def _lines(path: Path) -> tuple[dict[str, Any], Columns]:
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise TraceError(f"{path}: line {number} is not JSON ({error}); {_MEND}") from error
    header, entries = rows[0], rows[1:]
    if header.get("num_entries", len(entries)) != len(entries) or not entries:
        raise TraceError(f"{path} has {len(entries)} rows, its header says {header.get('num_entries')}; {_MEND}")
    missing = [name for name in ("t", "l", "e") if name not in entries[0]]
    if missing:
        raise TraceError(f"{path}: line 2 lacks {', '.join(missing)}; {_MEND}")
    columns = {name: [entry.get(name) for entry in entries] for name in _NAMES.values()}
    columns["p"] = [entry.get("p", 0) for entry in entries]
    return header, columns


def _parquet(path: Path) -> Columns:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{path} cannot be read as Parquet ({str(error).splitlines()[0]}); {_MEND}") from error
    missing = [name for name in list(_NAMES)[:4] if name not in table.schema.names]
    if missing or not table.num_rows:
        raise TraceError(f"{path} lacks {', '.join(missing) or 'rows'}; {_MEND}")
    return {short: table.column(name).to_pylist() for name, short in _NAMES.items() if name in table.schema.names}
