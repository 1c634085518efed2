"""Sequences of routed rows, put together into a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trace_capture.errors import TraceError
from trace_capture.model_shape import ModelShape
from trace_capture.trace import NO_EXPERT, Ids, Phase, Trace, TraceInfo
from trace_capture.trace_checks import check_trace


class RoutedSequence(NamedTuple):
    """One prompt and its continuation.

    Attributes:
        experts: uint16 [T, L, K].
        prefill: tokens of each prefill pass in front; every token behind them is a decode pass of its own.
        token_ids: int32 [T]; None where not recorded.
        weights: float16 [T, L, K]; None where not recorded.
        first_position: of the first row in its sequence.
    """

    experts: Ids
    prefill: tuple[int, ...]
    token_ids: npt.NDArray[np.int32] | None = None
    weights: npt.NDArray[np.float16] | None = None
    first_position: int = 0


def split_at_prompt(experts: Ids, prompt_tokens: int, where: str) -> RoutedSequence:
    """A sequence whose prompt was one pass.

    Raises:
        TraceError: the prompt is longer than the rows, or a generated token has no routing.
    """
    if not 0 <= prompt_tokens <= len(experts):
        raise TraceError(f"{where} has {len(experts)} rows, fewer than the prompt of {prompt_tokens} tokens")
    lost = np.flatnonzero((experts[prompt_tokens:] == NO_EXPERT).all(axis=2).any(axis=1))
    if len(lost):
        raise TraceError(
            f"{where}: row {prompt_tokens + int(lost[0])} is of a generated token and lacks routing; the engine lost "
            "it: record it again with the prefix cache off"
        )
    return RoutedSequence(experts, (prompt_tokens,) if prompt_tokens else ())


def sequence_passes(one: RoutedSequence, sequence: int, first_pass: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """The rows of each pass of a sequence, keyed like `TraceWriter.append`.

    Args:
        one: the sequence.
        sequence: its number.
        first_pass: number of its first pass.
    """
    rows = len(one.experts)
    decode = [1] * (rows - sum(one.prefill))
    phases = [Phase.PREFILL] * len(one.prefill) + [Phase.DECODE] * len(decode)
    tokens = one.token_ids if one.token_ids is not None else np.full(rows, -1, dtype=np.int32)
    weights = one.weights if one.weights is not None else np.zeros(one.experts.shape, dtype=np.float16)
    start = 0
    for number, (size, phase) in enumerate(zip([*one.prefill, *decode], phases, strict=True)):
        part = slice(start, start + size)
        yield {
            "sequence": np.full(size, sequence, dtype=np.int32),
            "pass_id": np.full(size, first_pass + number, dtype=np.int32),
            "phase": np.full(size, phase, dtype=np.uint8),
            "position": np.arange(start, start + size, dtype=np.int32) + np.int32(one.first_position),
            "token_id": tokens[part],
            "accepted": np.ones(size, dtype=np.bool_),
            "experts": one.experts[part],
            "weights": weights[part],
        }
        start += size


def to_trace(
    shape: ModelShape, sequences: Sequence[RoutedSequence], source: str, options: Mapping[str, Any], where: str
) -> Trace:
    """The checked trace of some sequences, one after another.

    Args:
        shape: the model, with the top-k of the rows.
        sequences: at least one.
        source: name of the format.
        options: provenance; that weights are missing is added.
        where: how messages call it.

    Raises:
        TraceError: there is no row, or one is impossible.
    """
    passes: list[dict[str, npt.NDArray[Any]]] = []
    for number, one in enumerate(sequences):
        passes += sequence_passes(one, number, len(passes))
    if not passes:
        raise TraceError(f"{where} holds no routing; record it again")
    missing = {} if all(one.weights is not None for one in sequences) else {"weights": "not recorded"}
    columns: dict[str, Any] = {name: np.concatenate([rows[name] for rows in passes]) for name in passes[0]}
    trace = Trace(
        info=TraceInfo(shape=shape, source=f"import:{source}", options=dict(options) | missing),
        **columns,
    )
    check_trace(trace, where=where)
    return trace
