"""BigMoeOnEdge `route_trace v1`: one CSV row per token, layer and selected expert, written by llama.cpp on a phone.

What the files look like: comment lines give the model and the bytes of each layer; a header line names the
columns, to which later versions may append; then come rows, prefill layer by layer (all tokens of a layer
together), decode token by token. `step` counts the tokens of a turn, prefill first; `slot` is the router's rank.
The last layer of a prefill holds only the tokens whose output was needed, normally the last one.

Column `residency` (was the expert in the recorder's own cache) is left out: it belongs to that run, not to the
routing. Times are not in the file, and must not be taken from traced runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from trace_capture.errors import TraceError
from trace_capture.importers.formats import NO_OPTIONS, FileHead, ImportOptions, provenance, read_text
from trace_capture.model_shape import ModelShape
from trace_capture.trace import NO_EXPERT, Phase, Trace, TraceInfo
from trace_capture.trace_checks import check_trace

_MAGIC = "# route_trace"
_SUPPORTED_VERSION = "v1"
_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight")
_MODEL_LINE = re.compile(r"#\s*model=(?P<model>.*?)\s+arch=(?P<arch>\S+)\s+(?P<counts>n_layer=.*)")
_NUMBER = re.compile(r"(\w+)=(-?\d+)\b")
_QUANT = re.compile(r"[-_.]((?:UD-)?I?Q\d\w*|MXFP4\w*|BF16|F16|F32)$", re.IGNORECASE)
_MAX_INT32 = np.iinfo(np.int32).max
_MEND = "the file was cut or edited; record it again"

Ints = npt.NDArray[np.int64]


class _Rows(NamedTuple):
    """The rows as columns [N], with the line of each."""

    line: Ints
    turn: Ints
    phase: Ints
    step: Ints
    layer: Ints
    slot: Ints
    expert: Ints
    weight: npt.NDArray[np.float64]


def is_route_trace(head: FileHead) -> bool:
    """Whether a file is a route trace, of whatever version."""
    return head.line.startswith(_MAGIC)


def read_route_trace(path: Path, options: ImportOptions = NO_OPTIONS) -> Trace:
    """Read a `route_trace v1` CSV.

    Each turn becomes a sequence; its prefill is one pass and each decode step another. Positions are the recorded
    steps; token ids are not recorded (-1). The file says what model it was, so options are not needed.

    Raises:
        TraceError: missing, empty, of another version, cut off, not numeric, or impossible (an expert twice in a
            layer, missing slots or steps, a layer or expert out of range); the message names the line or the step.
    """
    path = Path(path)
    lines = _read_lines(path)
    comments = [line for line in lines if line.startswith("#")]
    shape, moe_layers = _shape(comments, path)
    rows = _parse_rows(lines, path)
    _check_ranges(rows, shape, moe_layers, path)
    info = TraceInfo(shape=shape, source="import:route-trace", options=provenance(path))
    trace = _assemble(rows, info, moe_layers, path)
    check_trace(trace, where=str(path))
    return trace


def _read_lines(path: Path) -> list[str]:
    text = read_text(path)
    if not text.strip():
        raise TraceError(f"{path} is empty; record the trace again")
    lines = text.splitlines()
    if not lines[0].startswith(_MAGIC):
        raise TraceError(f"{path} does not begin with '{_MAGIC} {_SUPPORTED_VERSION}'; it is not a route trace")
    version = lines[0].removeprefix(_MAGIC).strip() or "none"
    if version != _SUPPORTED_VERSION:
        raise TraceError(f"{path} is route_trace version {version}, this program reads {_SUPPORTED_VERSION}")
    if not text.endswith("\n"):
        raise TraceError(f"{path}: line {len(lines)} ends without a line break, so it was cut off; record it again")
    return lines


def _shape(comments: list[str], path: Path) -> tuple[ModelShape, tuple[int, ...]]:
    """The model's shape, and the decoder layers that have experts."""
    model = next((match for match in map(_MODEL_LINE.match, comments) if match), None)
    if model is None:
        raise TraceError(f"{path} has no '# model= arch= n_layer= n_expert= n_expert_used=' line; record it again")
    counts = {key: int(value) for key, value in _NUMBER.findall(model["counts"])}
    missing = [key for key in ("n_layer", "n_expert", "n_expert_used") if key not in counts]
    if missing:
        raise TraceError(f"{path}: the '# model=' line lacks {', '.join(missing)}; {_MEND}")
    layer_bytes = [dict(_NUMBER.findall(line)) for line in comments if line.lstrip("# ").startswith("layer=")]
    moe_layers, expert_bytes, dense_bytes = _layer_bytes(layer_bytes, path)
    name = model["model"].rsplit("/", 1)[-1].removesuffix(".gguf")
    quant = _QUANT.search(name)
    try:
        shape = ModelShape(
            name=name,
            architecture=model["arch"],
            num_layers=counts["n_layer"],
            moe_layer_ids=moe_layers,
            num_experts=counts["n_expert"],
            top_k=counts["n_expert_used"],
            weight_dtype=quant[1] if quant else "unknown",
            expert_bytes=expert_bytes,
            dense_bytes=dense_bytes,
        )
    except ValidationError as error:
        what = error.errors()[0]["msg"]
        raise TraceError(f"{path}: its comment lines do not fit together: {what}; {_MEND}") from error
    return shape, moe_layers


def _layer_bytes(entries: list[dict[str, str]], path: Path) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Decoder layers with experts, bytes per expert, and dense bytes with those of dense layers before each."""
    moe_layers, expert_bytes, dense_bytes, pending = [], [], [], 0
    for entry in entries:
        if "expert_bytes" not in entry or "dense_bytes" not in entry:
            raise TraceError(f"{path}: the comment of layer {entry['layer']} lacks its bytes; {_MEND}")
        pending += int(entry["dense_bytes"])
        if int(entry["expert_bytes"]) > 0:
            moe_layers.append(int(entry["layer"]))
            expert_bytes.append(int(entry["expert_bytes"]))
            dense_bytes.append(pending)
            pending = 0
    if not moe_layers:
        raise TraceError(f"{path} has no '# layer= expert_bytes= dense_bytes=' line with experts; {_MEND}")
    dense_bytes[-1] += pending
    return tuple(moe_layers), tuple(expert_bytes), tuple(dense_bytes)


def _parse_rows(lines: list[str], path: Path) -> _Rows:
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if len(numbered) < 2:
        raise TraceError(f"{path} has no routing rows; record the trace again")
    header = numbered[0][1].split(",")
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise TraceError(f"{path}: line {numbered[0][0]} is not a header with {', '.join(missing)}; {_MEND}")
    places = [header.index(name) for name in _COLUMNS]
    values: list[tuple[int | float, ...]] = []
    for number, line in numbered[1:]:
        cells = line.split(",")
        if len(cells) != len(header):
            raise TraceError(f"{path}: line {number} has {len(cells)} cells for {len(header)} columns; {_MEND}")
        try:
            values.append((number, *(int(cells[place]) for place in places[:-1]), float(cells[places[-1]])))
        except ValueError as error:
            raise TraceError(f"{path}: line {number} holds something that is no number ({error}); {_MEND}") from error
    *integers, weights = zip(*values, strict=True)
    try:
        lines_of, turn, phase, step, layer, slot, expert = (np.array(column, dtype=np.int64) for column in integers)
    except OverflowError as error:
        raise TraceError(f"{path} holds a number beyond 64 bits; {_MEND}") from error
    return _Rows(lines_of, turn, phase, step, layer, slot, expert, np.array(weights, dtype=np.float64))


def _check_ranges(rows: _Rows, shape: ModelShape, moe_layers: tuple[int, ...], path: Path) -> None:
    """Every cell lies in the range that the comment lines give."""
    _first_bad(~np.isin(rows.phase, (0, 1)), rows, path, lambda i: f"phase {rows.phase[i]}, wanted 0 or 1")
    _first_bad(
        ~np.isin(rows.layer, moe_layers), rows, path, lambda i: f"layer {rows.layer[i]}, which has no '# layer=' line"
    )
    _first_bad(
        (rows.expert < 0) | (rows.expert >= shape.num_experts),
        rows,
        path,
        lambda i: f"expert {rows.expert[i]} of {shape.num_experts}",
    )
    _first_bad(
        (rows.slot < 0) | (rows.slot >= shape.top_k), rows, path, lambda i: f"slot {rows.slot[i]} of top-{shape.top_k}"
    )
    for name in ("turn", "step"):
        column: Ints = getattr(rows, name)
        _first_bad((column < 0) | (column > _MAX_INT32), rows, path, lambda i, c=column, n=name: f"{n} {c[i]}")
    _first_bad(~np.isfinite(rows.weight), rows, path, lambda i: f"weight {rows.weight[i]}")


def _first_bad(bad: npt.NDArray[np.bool_], rows: _Rows, path: Path, what: Any) -> None:
    if bad.any():
        place = int(np.argmax(bad))
        raise TraceError(f"{path}: line {rows.line[place]} has {what(place)}; {_MEND}")


def _assemble(rows: _Rows, info: TraceInfo, moe_layers: tuple[int, ...], path: Path) -> Trace:
    """Scatter rows into [T, L, K], tokens in order of turn and step."""
    shape = info.shape
    keys, token_of_row = np.unique(np.stack([rows.turn, rows.step], axis=1), axis=0, return_inverse=True)
    token_of_row = token_of_row.reshape(-1)
    turn, step = keys[:, 0], keys[:, 1]
    num_tokens = len(keys)
    layer_of_row = np.searchsorted(np.asarray(moe_layers), rows.layer)
    size = (num_tokens, len(moe_layers), shape.top_k)
    flat = np.ravel_multi_index((token_of_row, layer_of_row, rows.slot), size)
    again = "step {step}, layer {layer}, slot {slot} a second time"
    _first_bad(_repeats(flat), rows, path, lambda i: again.format(**_row(rows, i)))
    with_expert = np.ravel_multi_index((token_of_row, layer_of_row, rows.expert), (*size[:2], shape.num_experts))
    twice = "expert {expert} a second time in step {step}, layer {layer}"
    _first_bad(_repeats(with_expert), rows, path, lambda i: twice.format(**_row(rows, i)))
    experts = np.full(size, NO_EXPERT, dtype=np.uint16)
    weights = np.zeros(size, dtype=np.float16)
    experts.reshape(-1)[flat] = rows.expert
    weights.reshape(-1)[flat] = rows.weight
    phase = np.zeros(num_tokens, dtype=np.uint8)
    phase[token_of_row[::-1]] = np.where(rows.phase[::-1] == 0, Phase.PREFILL, Phase.DECODE)  # a step's first row wins
    _first_bad(phase[token_of_row] != rows.phase, rows, path, lambda i: "another phase than the rest of its step")
    _check_complete(experts, turn, step, phase, moe_layers, path)
    new_pass = (phase == Phase.DECODE) | (np.diff(turn, prepend=-1) != 0)
    return Trace(
        info=info,
        sequence=turn.astype(np.int32),
        pass_id=(np.cumsum(new_pass) - 1).astype(np.int32),
        phase=phase,
        position=step.astype(np.int32),
        token_id=np.full(num_tokens, -1, dtype=np.int32),
        accepted=np.ones(num_tokens, dtype=np.bool_),
        experts=experts,
        weights=weights,
    )


def _repeats(keys: Ints) -> npt.NDArray[np.bool_]:
    """Which entries equal an earlier one."""
    order = np.argsort(keys, kind="stable")
    again = np.zeros(len(keys), dtype=np.bool_)
    again[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    return again


def _row(rows: _Rows, place: int) -> dict[str, int]:
    """The cells of one row by name."""
    return {name: int(getattr(rows, name)[place]) for name in ("step", "layer", "slot", "expert")}


def _check_complete(
    experts: npt.NDArray[np.uint16],
    turn: npt.NDArray[np.int64],
    step: npt.NDArray[np.int64],
    phase: npt.NDArray[np.uint8],
    moe_layers: tuple[int, ...],
    path: Path,
) -> None:
    """No step, layer or slot is missing, beside prefill tokens in the last layer; no prefill follows decode."""

    def complain(token: int, what: str) -> TraceError:
        return TraceError(f"{path}: turn {turn[token]}, step {step[token]} {what}; {_MEND}")

    same_turn = np.diff(turn) == 0
    gap = np.flatnonzero(same_turn & (np.diff(step) != 1))
    if len(gap):
        raise complain(int(gap[0]) + 1, f"follows step {step[gap[0]]}: steps between them are missing")
    late = np.flatnonzero(same_turn & (np.diff(phase.astype(np.int64)) < 0))
    if len(late):
        raise complain(int(late[0]) + 1, "is prefill after decode in the same turn")
    absent = experts == NO_EXPERT
    partly = absent.any(axis=2) & ~absent.all(axis=2)
    if partly.any():
        token, layer = (int(index) for index in np.argwhere(partly)[0])
        raise complain(
            token, f"lacks {int(absent[token, layer].sum())} of {absent.shape[2]} slots in layer {moe_layers[layer]}"
        )
    unrouted = absent.all(axis=2)
    last_of_prefill = np.append(~same_turn | (phase[1:] == Phase.DECODE), True)
    unrouted[(phase == Phase.PREFILL) & ~last_of_prefill, -1] = False
    if unrouted.any():
        token, layer = (int(index) for index in np.argwhere(unrouted)[0])
        raise complain(token, f"has no rows for layer {moe_layers[layer]}")
