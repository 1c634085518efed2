"""Routing that llama.cpp's `moe-trace` tools write as CSV, in three dialects.

- upstream (pull request 28544): `layer,expert`, one row per routed activation, without token or pass;
- thecodacus: `pos,layer,id0,id1,...` without a header; rows of the prompt have a negative `pos`;
- a fork of the first: `phase,token,layer,rank,expert`.

All write layer by layer as the layers run, all tokens of a batch together; layers are decoder layers. So a new pass
begins where the layers start over. The last layer of a prompt may hold its last token alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trace_capture.errors import TraceError
from trace_capture.importers.assemble import RoutedSequence, to_trace
from trace_capture.importers.formats import FileHead, ImportOptions, provenance, read_text
from trace_capture.importers.routed_rows import routed_rows
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Trace

_NUMBERS = re.compile(r"-?\d+(,-?\d+)+")
_WITH_PHASE = "phase,token,layer,rank,expert"
_PLAIN = "layer,expert"
_MEND = "the file was cut or edited; record it again"


class _Block(NamedTuple):
    """Rows of one layer in one pass: ids of each token, and whether they are of a prompt, where the file says."""

    layer: int
    tokens: list[list[int]]
    is_prompt: bool | None
    line: int


class _Pass(NamedTuple):
    """One forward pass: ids [n, L, K], -1 where the last layer routed only the last tokens."""

    ids: npt.NDArray[np.int64]
    is_prompt: bool | None


def is_moe_trace(head: FileHead) -> bool:
    """Whether a file is in one of the dialects."""
    return head.line in (_WITH_PHASE, _PLAIN) or bool(_NUMBERS.fullmatch(head.line))


def read_moe_trace(path: Path, options: ImportOptions) -> Trace:
    """Read any of the dialects. A prompt after a generated token begins another sequence.

    In the upstream dialect tokens are groups of the model's top-k rows, which must hold distinct experts, and passes of
    one token are taken for decode, unless the prompt's length is given.

    Raises:
        TraceError: not numeric, cut within a pass, or not of this model; the message names the line or the pass.
    """
    shape = options.require_shape(path)
    notes: list[str] = []
    blocks = _blocks(path, shape, notes)
    passes = _passes(blocks, shape, path)
    sizes = [len(one.ids) for one in passes]
    rows = routed_rows(np.concatenate([one.ids for one in passes]), shape, str(path))
    if rows.dropped:
        raise TraceError(f"{path} begins with a warm-up pass of {rows.dropped} equal tokens; record without warm-up")
    sequences, first = [], 0
    for prefill, decode in _sequences(sizes, _prompt_passes(passes, options.prompt_tokens, path, notes)):
        count = sum(prefill) + decode
        sequences.append(RoutedSequence(rows.experts[first : first + count], prefill))
        first += count
    return to_trace(rows.shape, sequences, "moe-trace", provenance(path, [*notes, *rows.notes]), str(path))


def _blocks(path: Path, shape: ModelShape, notes: list[str]) -> list[_Block]:
    lines = read_text(path).splitlines()
    if not read_text(path).endswith("\n"):
        raise TraceError(f"{path}: line {len(lines)} ends without a line break, so it was cut off; record it again")
    header = lines[0].strip()
    if header == _WITH_PHASE:
        return list(_with_phase(lines, path))
    start = 1 if header == _PLAIN else 0
    rows = [_integers(line, number, path) for number, line in enumerate(lines[start:], start + 1) if line.strip()]
    if not rows:
        raise TraceError(f"{path} has no routing rows; record the trace again")
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise TraceError(f"{path} has rows of {sorted(widths)} cells; {_MEND}")
    return _plain(rows, shape, path, notes) if widths == {2} else list(_with_positions(rows))


def _integers(line: str, number: int, path: Path) -> list[int]:
    try:
        return [int(cell) for cell in line.split(",")]
    except ValueError as error:
        raise TraceError(f"{path}: line {number} holds something that is no number ({error}); {_MEND}") from error


def _with_positions(rows: Sequence[list[int]]) -> Iterator[_Block]:
    """`pos,layer,ids`: a block goes on as long as the layer stays; in decode each row is one."""
    block: _Block | None = None
    last = 0
    for number, (position, layer, *ids) in enumerate(rows, start=1):
        is_prompt = position < 0
        goes_on = block is not None and (block.layer, block.is_prompt) == (layer, True)
        if block is not None and goes_on and last < position < 0:
            block.tokens.append(ids)
        else:
            if block is not None:
                yield block
            block = _Block(layer, [ids], is_prompt, number)
        last = position
    if block is not None:
        yield block


def _with_phase(lines: Sequence[str], path: Path) -> Iterator[_Block]:
    """`phase,token,layer,rank,expert`: one row per activation."""
    block: _Block | None = None
    last = -1
    for number, line in enumerate(lines[1:], start=2):
        phase, _, rest = line.partition(",")
        cells = _integers(rest, number, path)
        if phase not in ("prefill", "decode") or len(cells) != 4:
            raise TraceError(f"{path}: line {number} is no row of {_WITH_PHASE}; {_MEND}")
        token, layer, rank, expert = cells
        is_prompt = phase == "prefill"
        goes_on = block is not None and (block.layer, block.is_prompt) == (layer, is_prompt)
        if block is not None and goes_on and token == last and rank == len(block.tokens[-1]):
            block.tokens[-1].append(expert)
        elif block is not None and goes_on and is_prompt and token == last + 1 and rank == 0:
            block.tokens.append([expert])
        elif rank == 0:
            if block is not None:
                yield block
            block = _Block(layer, [[expert]], is_prompt, number)
        else:
            raise TraceError(f"{path}: line {number} has rank {rank} where another comes next; {_MEND}")
        last = token
    if block is not None:
        yield block


def _plain(rows: Sequence[list[int]], shape: ModelShape, path: Path, notes: list[str]) -> list[_Block]:
    """`layer,expert`: tokens are not marked, so they are groups of top-k rows."""
    if shape.num_moe_layers == 1:
        raise TraceError(f"{path} has one layer and no token index, so its passes cannot be told apart")
    layers = np.array([layer for layer, _ in rows])
    starts = np.flatnonzero(np.diff(layers, prepend=layers[0] - 1))
    sizes = np.diff(starts, append=len(rows))
    top_k = _rows_per_token(sizes, shape, path)
    notes.append(
        f"the file marks neither tokens nor passes: tokens are groups of {top_k} rows, all of distinct experts, and "
        "a pass ends where the layers start over"
    )
    blocks = []
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        experts = [expert for _, expert in rows[start : start + size]]
        groups = [experts[place : place + top_k] for place in range(0, size, top_k)]
        if any(len(set(group)) < top_k for group in groups):
            raise TraceError(
                f"{path}: rows from number {start + 1} on do not make tokens of {top_k} distinct experts: rows are "
                "missing, or it was recorded with another top-k or model"
            )
        blocks.append(_Block(int(layers[start]), groups, None, start + 1))
    return blocks


def _rows_per_token(sizes: npt.NDArray[np.int64], shape: ModelShape, path: Path) -> int:
    """Top-k: the model's, or what the smallest block shows where that is less."""
    smallest = int(sizes.min())
    top_k = shape.top_k if smallest >= shape.top_k else smallest
    if (sizes % top_k).any():
        place = int(np.argmax(sizes % top_k != 0))
        raise TraceError(
            f"{path}: a layer has {int(sizes[place])} rows, not a multiple of top-{top_k} of {shape.name}: the file "
            "was cut, or it was recorded with another top-k or model"
        )
    return top_k


def _passes(blocks: Sequence[_Block], shape: ModelShape, path: Path) -> list[_Pass]:
    """Blocks up to where the layers start over."""
    groups: list[list[_Block]] = []
    for block in blocks:
        if not groups or block.layer <= groups[-1][-1].layer or block.is_prompt != groups[-1][-1].is_prompt:
            groups.append([])
        groups[-1].append(block)
    return [_one_pass(group, number, shape, path) for number, group in enumerate(groups, start=1)]


def _one_pass(blocks: Sequence[_Block], number: int, shape: ModelShape, path: Path) -> _Pass:
    where = f"{path}: pass {number} (from row {blocks[0].line} on)"
    have = [block.layer for block in blocks]
    if have != list(shape.moe_layer_ids):
        missing = sorted(set(shape.moe_layer_ids) - set(have))
        extra = sorted(set(have) - set(shape.moe_layer_ids))
        what = f"lacks layers {missing}" if missing else f"has layers {extra}, which are dense"
        raise TraceError(f"{where} {what} of {shape.name}; the file was cut, or give the right --model")
    counts = [len(block.tokens) for block in blocks]
    widths = {len(ids) for block in blocks for ids in block.tokens}
    if len(set(counts[:-1])) > 1 or counts[-1] > counts[0] or len(widths) > 1:
        raise TraceError(f"{where} has {sorted(set(counts))} tokens of {sorted(widths)} experts per layer; {_MEND}")
    ids = np.full((counts[0], len(blocks), widths.pop()), -1, dtype=np.int64)
    for layer, block in enumerate(blocks):
        ids[counts[0] - len(block.tokens) :, layer] = block.tokens
    return _Pass(ids, blocks[0].is_prompt)


def _prompt_passes(passes: Sequence[_Pass], prompt_tokens: int | None, path: Path, notes: list[str]) -> list[bool]:
    """Which passes are of a prompt: as marked, up to the given length, or else those of several tokens."""
    if all(one.is_prompt is not None for one in passes):
        return [bool(one.is_prompt) for one in passes]
    if prompt_tokens is None:
        notes.append("passes of several tokens are taken for the prompt and those of one token for decode")
        return [len(one.ids) > 1 for one in passes]
    ends = np.cumsum([len(one.ids) for one in passes])
    if prompt_tokens and prompt_tokens not in ends:
        raise TraceError(
            f"{path}: no pass ends after {prompt_tokens} tokens (the first ones end after {ends[:4].tolist()}); "
            "give --prompt-tokens as it was, or leave it out"
        )
    return [bool(end <= prompt_tokens) for end in ends]


def _sequences(sizes: Sequence[int], prompt: Sequence[bool]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Tokens of the prefill passes, and the number of decode passes, of each sequence."""
    prefill: list[int] = []
    decode = 0
    for size, is_prompt in zip(sizes, prompt, strict=True):
        if is_prompt and decode:
            yield tuple(prefill), decode
            prefill, decode = [], 0
        if is_prompt:
            prefill.append(size)
        else:
            decode += size
    yield tuple(prefill), decode
