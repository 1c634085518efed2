"""What SGLang's expert distribution recorder dumps, once its tensors are arrays.

Mode `per_token`: `records`, one per forward pass and rank, with `topk_ids_of_layer` [F, T, 8] (room for 8 experts
whatever the model uses, -1 where unused), `positions` [T], `input_ids` [T] and, in prefill, `extend_seq_lens`.
Mode `per_pass`: the same without ids, with `global_physical_count` [F, physical experts]. Modes `stat` and
`stat_approx`: `logical_count` [steps, F, E]. Ids are those of physical experts; `last_physical_to_logical_map` [F, P]
tells which expert each of them is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trace_capture.errors import TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.importers.assemble import RoutedSequence, to_trace
from trace_capture.importers.count_tables import counted
from trace_capture.importers.formats import ImportOptions, provenance
from trace_capture.importers.routed_rows import routed_rows
from trace_capture.trace import Trace

_IDS, _MAP = "topk_ids_of_layer", "last_physical_to_logical_map"
_MEND = "the file is of another version of SGLang, or was edited; record it again"


class _Part(NamedTuple):
    """Tokens of one request in one forward pass; ids [n, F, slots]."""

    ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    start: int
    is_prompt: bool


def from_records(content: Mapping[str, Any], path: Path, options: ImportOptions) -> Trace | ExpertCounts:
    """A trace from a dump with ids of every token, else counts.

    Requests are told apart by positions: a part that begins where one request has ended goes on with it. Passes of
    requests that were batched together are laid out one after another.

    Args:
        content: the dump, tensors as numpy arrays.
        path: its file, for messages and provenance.
        options: the model.

    Raises:
        TraceError: it holds neither, requests cannot be told apart, or the routing is impossible.
    """
    shape = options.require_shape(path)
    logical = content.get(_MAP)
    if "logical_count" in content:
        return counted(content["logical_count"], shape, "sglang-recorder", path)
    records = content.get("records")
    if not isinstance(records, Sequence) or not records or not isinstance(records[0], Mapping):
        raise TraceError(f"{path} holds neither 'records' nor 'logical_count'; {_MEND}")
    if _IDS not in records[0]:
        tables = [record.get("global_physical_count") for record in records]
        if any(table is None for table in tables):
            raise TraceError(f"{path}: its records hold neither '{_IDS}' nor 'global_physical_count'; {_MEND}")
        return counted(np.sum(tables, axis=0), shape, "sglang-recorder", path, logical)
    return _trace(records, logical, path, options)


def _trace(records: Sequence[Mapping[str, Any]], logical: Any, path: Path, options: ImportOptions) -> Trace:
    notes: list[str] = []
    if len({record.get("rank", 0) for record in records}) > 1:
        raise TraceError(f"{path} holds records of several ranks; import the file of one rank")
    requests = _requests([part for record in records for part in _parts(record, path)], path, notes)
    together = np.concatenate([part.ids for parts in requests for part in parts])
    rows = routed_rows(_logical(together, logical, path, notes), options.require_shape(path), str(path))
    if rows.dropped:
        raise TraceError(
            f"{path} begins with {rows.dropped} equal tokens, as a warm-up pass does; start the recorder behind the "
            "server's warm-up"
        )
    sequences, first = [], 0
    for parts in requests:
        prefill = tuple(len(part.ids) for part in parts if part.is_prompt)
        count = sum(len(part.ids) for part in parts)
        tokens = np.concatenate([part.tokens for part in parts]).astype(np.int32)
        experts = rows.experts[first : first + count]
        sequences.append(RoutedSequence(experts, prefill, tokens, first_position=parts[0].start))
        first += count
    return to_trace(rows.shape, sequences, "sglang-recorder", provenance(path, [*notes, *rows.notes]), str(path))


def _parts(record: Mapping[str, Any], path: Path) -> list[_Part]:
    """The requests of one forward pass."""
    where = f"{path}: forward pass {record.get('forward_pass_id')}"
    try:
        ids = np.asarray(record[_IDS], dtype=np.int64).swapaxes(0, 1)
        positions = np.asarray(record["positions"], dtype=np.int64)
        tokens = np.asarray(record.get("input_ids", np.full(len(positions), -1)), dtype=np.int64)
    except (KeyError, ValueError, TypeError) as error:
        raise TraceError(f"{where} lacks ids or positions of its tokens ({error}); {_MEND}") from error
    lengths = record.get("extend_seq_lens")
    sizes = [1] * len(positions) if lengths is None or not len(lengths) else [int(size) for size in lengths]
    if ids.ndim != 3 or not len(ids) == len(positions) == len(tokens) == sum(sizes):
        raise TraceError(
            f"{where} has ids of {len(ids)} tokens, {len(positions)} positions and requests of {sizes} tokens; {_MEND}"
        )
    is_prompt = lengths is not None and len(lengths) > 0
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    parts = []
    for start, size in zip(starts, sizes, strict=True):
        span = slice(start, start + size)
        if (np.diff(positions[span]) != 1).any():
            raise TraceError(f"{where} has positions that do not follow each other in one request; {_MEND}")
        parts.append(_Part(ids[span], tokens[span], int(positions[start]), is_prompt))
    return parts


def _requests(parts: Sequence[_Part], path: Path, notes: list[str]) -> list[list[_Part]]:
    """Parts of the same request, in order."""
    requests: list[list[_Part]] = []
    ends: list[int] = []
    is_cached = False
    for part in parts:
        fitting = [
            number
            for number, end in enumerate(ends)
            if end == part.start and (requests[number][-1].is_prompt or not part.is_prompt)
        ]
        if part.start == 0 or (part.is_prompt and not fitting):
            is_cached |= part.start > 0
            fitting = [len(requests)]
            requests.append([])
            ends.append(0)
        if len(fitting) != 1:
            raise TraceError(
                f"{path}: a token at position {part.start} could belong to {len(fitting)} requests; record with one "
                "request at a time (--max-running-requests 1), from before its first token on"
            )
        requests[fitting[0]].append(part)
        ends[fitting[0]] = part.start + len(part.ids)
    if is_cached:
        notes.append("a prompt begins behind position 0: the tokens before it came from the prefix cache")
    return requests


def _logical(ids: npt.NDArray[np.int64], logical: Any, path: Path, notes: list[str]) -> npt.NDArray[np.int64]:
    """Ids of experts in place of those of their replicas."""
    if logical is None:
        return ids
    table = np.asarray(logical, dtype=np.int64)
    if table.ndim != 2 or len(table) != ids.shape[1]:
        raise TraceError(f"{path}: its map of physical to logical experts has shape {table.shape}; {_MEND}")
    if (table == np.arange(table.shape[1])).all():
        return ids
    if ids.max() >= table.shape[1]:
        raise TraceError(f"{path} has expert {ids.max()} beyond its map of {table.shape[1]} physical experts; {_MEND}")
    notes.append("physical ids of replicated experts are replaced by the recorded map")
    layers = np.arange(len(table))[None, :, None]
    return np.where(ids < 0, -1, table[layers, np.maximum(ids, 0)])
