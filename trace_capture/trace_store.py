"""Traces as files: Parquet when complete, an Arrow stream while a capture runs.

A writer appends one record batch per forward pass to `<name>.partial`, an Arrow IPC stream whose every batch is
complete in itself. `finish` turns it into Parquet by way of a temporary file. A capture that is killed leaves
the stream, and the reader takes what is whole in it, marked `complete = False`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ValidationError

from trace_capture.errors import TraceError
from trace_capture.files import atomic_path, make_folder
from trace_capture.trace import COLUMNS, SCHEMA_VERSION, Trace, TraceInfo
from trace_capture.trace_checks import check_trace

_MEND = "the file was edited or damaged; capture or import the trace again"
METADATA_KEY = b"moe_studio.trace"
PREDICTED_PREFIX = "predicted:"
PARTIAL_SUFFIX = ".partial"

_SCALAR_TYPES = {
    "sequence": pa.int32(),
    "pass_id": pa.int32(),
    "phase": pa.uint8(),
    "position": pa.int32(),
    "token_id": pa.int32(),
    "accepted": pa.bool_(),
}


def partial_path(path: Path) -> Path:
    """Where an unfinished capture of `path` keeps its rows."""
    return Path(path).with_name(Path(path).name + PARTIAL_SUFFIX)


def write_trace(trace: Trace, path: Path) -> None:
    """Check a trace and write it as one Parquet file, atomically.

    Raises:
        TraceError: the trace says something impossible.
        StudioError: the place cannot be written to.
    """
    check_trace(trace, where=str(path))
    table = _to_table(trace)
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_trace(path: Path) -> Trace:
    """Read and check a trace: a finished Parquet file, or the stream of a capture that did not end.

    Raises:
        TraceError: missing, truncated, not a trace, another schema version, or impossible content.
    """
    path = Path(path)
    stream = path if path.name.endswith(PARTIAL_SUFFIX) else partial_path(path)
    if path.is_file() and path != stream:
        table, complete = _read_parquet(path), True
    elif stream.is_file():
        table, complete = _read_stream(stream), False
    else:
        raise TraceError(f"no trace at {path}; make one with 'moe-studio capture --out {path}' or 'moe-studio import'")
    trace = _from_table(table, path, complete)
    check_trace(trace, where=str(path))
    return trace


class TraceWriter:
    """Append-only writer for a running capture. Use as a context manager; leaving it by an exception keeps the
    stream, leaving it well finishes the Parquet file.

    Args:
        path: the Parquet file to make.
        info: what is known at the start; `complete` is set by `finish`.
        predictors: name -> P of the predicted columns.

    Raises:
        StudioError: the folder cannot be written to.
    """

    def __init__(self, path: Path, info: TraceInfo, predictors: dict[str, int] | None = None) -> None:
        self.path = Path(path)
        self.info = info
        self.num_rows = 0
        make_folder(self.path.parent)
        self._schema = _schema(info, predictors or {})
        self._file: IO[bytes] = partial_path(self.path).open("wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        self._file.flush()

    def append(self, rows: dict[str, Any]) -> None:
        """Write the rows of one pass: `COLUMNS` by name, and `predicted:<name>` for each predictor, as arrays
        whose first axis is the token."""
        arrays = [_to_arrow(np.asarray(rows[name]), self._schema.field(name).type) for name in self._schema.names]
        self._stream.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._file.flush()
        self.num_rows += len(arrays[0])

    def finish(self) -> Trace:
        """Close the stream, write the Parquet file, remove the stream, and give the checked trace."""
        self.close()
        stream = partial_path(self.path)
        trace = _from_table(_read_stream(stream), self.path, complete=True)
        write_trace(trace, self.path)
        stream.unlink()
        return trace

    def close(self) -> None:
        """End the stream and keep it: `read_trace` takes what is whole in it."""
        if not self._file.closed:
            self._stream.close()
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()
        elif not self._file.closed:
            self.finish()


def _schema(info: TraceInfo, predictors: dict[str, int]) -> pa.Schema:
    cells = info.shape.num_moe_layers * info.shape.top_k
    fields = [pa.field(name, kind, nullable=False) for name, kind in _SCALAR_TYPES.items()]
    fields += [pa.field("experts", pa.list_(pa.uint16(), cells)), pa.field("weights", pa.list_(pa.float16(), cells))]
    for name in sorted(predictors):
        kind = pa.list_(pa.uint16(), info.shape.num_moe_layers * predictors[name])
        fields.append(pa.field(PREDICTED_PREFIX + name, kind))
    return pa.schema(fields, metadata={METADATA_KEY: info.model_dump_json().encode()})


def _to_arrow(values: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        flat = np.ascontiguousarray(values).reshape(-1).astype(kind.value_type.to_pandas_dtype(), copy=False)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat, type=kind.value_type), kind.list_size)
    return pa.array(values, type=kind)


def _to_table(trace: Trace) -> pa.Table:
    schema = _schema(trace.info, {name: ids.shape[2] for name, ids in trace.predicted.items()})
    rows = {name: getattr(trace, name) for name in COLUMNS}
    rows |= {PREDICTED_PREFIX + name: ids for name, ids in trace.predicted.items()}
    return pa.table([_to_arrow(rows[name], schema.field(name).type) for name in schema.names], schema=schema)


def _from_table(table: pa.Table, path: Path, complete: bool) -> Trace:
    info = _read_info(table.schema.metadata or {}, path)
    layers = info.shape.num_moe_layers

    def column(name: str, kind: Any) -> np.ndarray[Any, Any]:
        if name not in table.schema.names:
            raise TraceError(f"{path}: column '{name}' is missing; {_MEND}")
        values = table.column(name).combine_chunks()
        if values.null_count:
            raise TraceError(f"{path}: column '{name}' has empty cells; {_MEND}")
        if pa.types.is_list(values.type) or pa.types.is_fixed_size_list(values.type):
            flat = values.flatten().to_numpy(zero_copy_only=False)
            lengths = pc.list_value_length(values).unique().to_pylist()
            if len(lengths) > 1 or any(length % layers for length in lengths):
                raise TraceError(f"{path}: column '{name}' has rows of {lengths} ids for {layers} layers; {_MEND}")
            width = lengths[0] // layers if lengths else info.shape.top_k
            return _cast(flat.reshape(len(values), layers, width), kind, f"{path}: column '{name}'")
        return _cast(values.to_numpy(zero_copy_only=False), kind, f"{path}: column '{name}'")

    names = [name.removeprefix(PREDICTED_PREFIX) for name in table.schema.names if name.startswith(PREDICTED_PREFIX)]
    try:
        return Trace(
            info=info.model_copy(update={"complete": complete and info.complete}),
            sequence=column("sequence", np.int32),
            pass_id=column("pass_id", np.int32),
            phase=column("phase", np.uint8),
            position=column("position", np.int32),
            token_id=column("token_id", np.int32),
            accepted=column("accepted", np.bool_),
            experts=column("experts", np.uint16),
            weights=column("weights", np.float16),
            predicted={name: column(PREDICTED_PREFIX + name, np.uint16) for name in names},
        )
    except (pa.ArrowInvalid, TypeError) as error:
        raise TraceError(f"{path}: {error}; capture or import the trace again") from error


def _cast(values: np.ndarray[Any, Any], kind: Any, where: str) -> np.ndarray[Any, Any]:
    """`values` as numpy type `kind`; refuses what would not survive, where numpy would wrap around."""
    wanted = np.dtype(kind)
    if wanted.kind != "f" and values.dtype.kind not in "iub" or wanted.kind == "f" and values.dtype.kind != "f":
        raise TraceError(f"{where} holds {values.dtype}, wanted {wanted}; {_MEND}")
    if wanted.kind in "iu" and values.size:
        limits = np.iinfo(wanted)
        low, high = int(values.min()), int(values.max())
        if low < limits.min or high > limits.max:
            raise TraceError(f"{where} holds {low if low < limits.min else high}, beyond {wanted}; {_MEND}")
    return values.astype(wanted, copy=False)


def _read_info(metadata: dict[bytes, bytes], path: Path) -> TraceInfo:
    if METADATA_KEY not in metadata:
        raise TraceError(f"{path} is Parquet but not a routing trace (no '{METADATA_KEY.decode()}' in its metadata)")
    try:
        raw = json.loads(metadata[METADATA_KEY])
        version = raw.get("schema_version")
        if version != SCHEMA_VERSION:
            raise TraceError(
                f"{path} has trace schema version {version}, this program reads {SCHEMA_VERSION}; capture it again"
            )
        return TraceInfo.model_validate(raw)
    except (json.JSONDecodeError, AttributeError) as error:
        raise TraceError(f"{path}: its metadata is not JSON ({error}); capture or import the trace again") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "metadata"
        raise TraceError(f"{path}: {place}: {first['msg']}; capture or import the trace again") from error


def _read_parquet(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise TraceError(f"{path} cannot be read as Parquet ({reason}); it is truncated or not a trace") from error


def _read_stream(path: Path) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            schema = stream.schema
            try:
                while True:
                    batches.append(stream.read_next_batch())
            except (StopIteration, pa.ArrowInvalid, OSError):
                pass  # the end, or a last batch that the killed writer had not finished
            return pa.Table.from_batches(batches, schema=schema).combine_chunks()
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{path} was cut off before its first row ({error}); capture it again") from error
