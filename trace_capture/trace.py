"""The routing trace: which experts every token was sent to, in every Mixture-of-Experts layer.

Shape legend, used in the whole project: **T** tokens, **L** MoE layers, **E** experts, **K** top-k,
**P** predicted experts, **H** hidden size, **G** draft length (gamma).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from trace_capture.errors import TraceError
from trace_capture.model_shape import ModelShape

SCHEMA_VERSION = 1
NO_EXPERT = 65535
"""Expert id of a row that a layer did not route: the last layer of a prefill that only needs its last token, or
the first layer in a `predicted` column."""

Ids = npt.NDArray[np.uint16]
_ROWS_AT_ONCE = 1024


class Phase(IntEnum):
    """What kind of forward pass a token was computed in."""

    PREFILL = 0
    DECODE = 1
    VERIFY = 2


class DraftSettings(BaseModel):
    """How the verified tokens of a speculative capture were drafted."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: str
    gamma: int = Field(gt=0)
    weight_bytes: int = Field(default=0, ge=0)
    """Of the draft model, read for every draft; 0 for prompt look-up, or where it is not known."""


class TraceInfo(BaseModel):
    """Everything about a trace that is not a row: the model, where the trace came from, how it was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    shape: ModelShape
    source: str
    """`capture`, `import:<format>` or `synthetic`."""
    tokenizer: str = ""
    prompts_digest: str = ""
    draft: DraftSettings | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    complete: bool = True
    """False for what was recovered from a capture that did not end."""


class Pass(NamedTuple):
    """One forward pass: consecutive rows `start:stop` of the trace that were computed together."""

    pass_id: int
    phase: Phase
    sequence: int
    start: int
    stop: int


@dataclass(frozen=True)
class Trace:
    """Routing of T tokens through L layers with top-k K. Rows of one forward pass are adjacent, passes in order.

    Attributes:
        info: model shape and provenance.
        sequence: prompt number of each token, int32 [T].
        pass_id: forward pass of each token, int32 [T], never falling; all tokens verified together share one.
        phase: a `Phase` per token, uint8 [T].
        position: position in the sequence, int32 [T].
        token_id: input token, int32 [T]; -1 where unknown.
        accepted: for verify rows, whether the token was kept; True elsewhere; bool [T].
        experts: routed expert ids in the router's order, uint16 [T, L, K]; `NO_EXPERT` where not routed.
        weights: router weights of those experts, float16 [T, L, K].
        predicted: per predictor, the ids predicted for the *same* layer, uint16 [T, L, P].
    """

    info: TraceInfo
    sequence: npt.NDArray[np.int32]
    pass_id: npt.NDArray[np.int32]
    phase: npt.NDArray[np.uint8]
    position: npt.NDArray[np.int32]
    token_id: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.bool_]
    experts: Ids
    weights: npt.NDArray[np.float16]
    predicted: dict[str, Ids] = field(default_factory=dict)

    @property
    def shape(self) -> ModelShape:
        """The model's counts and bytes."""
        return self.info.shape

    @property
    def num_tokens(self) -> int:
        """T, the number of rows."""
        return int(self.sequence.shape[0])

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The forward passes in order."""
        if self.num_tokens == 0:
            return ()
        starts = np.flatnonzero(np.diff(self.pass_id, prepend=self.pass_id[0] - 1))
        stops = [*starts[1:].tolist(), self.num_tokens]
        return tuple(
            Pass(int(self.pass_id[i]), Phase(int(self.phase[i])), int(self.sequence[i]), i, j)
            for i, j in zip(starts.tolist(), stops, strict=True)
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over shape and rows, as `sha256:<hex>`: equal for equal content however it was stored."""
        digest = hashlib.sha256(self.info.shape.model_dump_json().encode())
        for name in COLUMNS:
            digest.update(_bytes_of(getattr(self, name)))
        for name in sorted(self.predicted):
            digest.update(name.encode())
            digest.update(_bytes_of(self.predicted[name]))
        return f"sha256:{digest.hexdigest()}"

    def output_tokens(self, item: Pass) -> int:
        """Tokens that a pass adds to the output: one, or in a verify pass one per accepted row. Its first row is the
        token that was certain; each accepted row, that one included, gives the token after it."""
        return int(self.accepted[item.start : item.stop].sum()) if item.phase == Phase.VERIFY else 1

    def active_experts(self, start: int, stop: int, layer: int, source: str | None = None) -> list[int]:
        """Distinct experts of rows `start:stop` in one layer, in order of first appearance.

        Args:
            start, stop: row range, normally a pass.
            layer: MoE layer index.
            source: None for the routed experts, else the name of a predictor.
        """
        ids = self.experts if source is None else self.predictions(source)
        flat = ids[start:stop, layer].ravel().tolist()
        return [expert for expert in dict.fromkeys(flat) if expert != NO_EXPERT]

    def predictions(self, source: str) -> Ids:
        """The ids that predictor `source` gave, uint16 [T, L, P].

        Raises:
            TraceError: the trace has no such column.
        """
        if source not in self.predicted:
            known = ", ".join(sorted(self.predicted)) or "none"
            raise TraceError(
                f"the trace has no predictions of '{source}' (it has: {known}); capture it with --predict {source}"
            )
        return self.predicted[source]

    def rows(self, mask: npt.NDArray[np.bool_]) -> Trace:
        """The trace of the rows where `mask` [T] is true; passes keep their ids."""
        columns = {name: getattr(self, name)[mask] for name in COLUMNS}
        return replace(self, **columns, predicted={name: ids[mask] for name, ids in self.predicted.items()})

    def sequences(self) -> list[int]:
        """The sequence numbers in order of appearance."""
        return list(dict.fromkeys(self.sequence.tolist()))

    def iter_layers(self, item: Pass) -> Iterator[tuple[int, list[int]]]:
        """Layers of a pass with the distinct experts of each."""
        yield from enumerate(self.pass_experts(item))

    def searched_layers(self, source: str | None = None) -> tuple[int, ...]:
        """Layers where a row may name an expert twice or `NO_EXPERT`, so that reading it takes a search. Remembered.

        Args:
            source: None for the routed experts, else the name of a predictor.
        """
        if source not in self._searched_layers:
            ids = self.experts if source is None else self.predictions(source)
            self._searched_layers[source] = _layers_to_search(ids)
        return self._searched_layers[source]

    @cached_property
    def _searched_layers(self) -> dict[str | None, tuple[int, ...]]:
        return {}

    def pass_experts(self, item: Pass, source: str | None = None) -> list[list[int]]:
        """Distinct experts of a pass in every layer: `active_experts` of all L layers in one sweep.

        Args:
            item: the pass.
            source: None for the routed experts, else the name of a predictor.
        """
        ids = self.experts if source is None else self.predictions(source)
        rows: list[list[int]] = ids[item.start : item.stop].swapaxes(0, 1).reshape(ids.shape[1], -1).tolist()
        return [
            [expert for expert in dict.fromkeys(row) if expert != NO_EXPERT]
            if NO_EXPERT in row
            else list(dict.fromkeys(row))
            for row in rows
        ]

    def pass_counts(self, item: Pass, source: str | None = None) -> list[dict[int, int]]:
        """As `pass_experts`, with the number of tokens of the pass that go to each expert."""
        ids = self.experts if source is None else self.predictions(source)
        rows: list[list[int]] = ids[item.start : item.stop].swapaxes(0, 1).reshape(ids.shape[1], -1).tolist()
        counts: list[dict[int, int]] = []
        for row in rows:
            once = dict.fromkeys(row, 1)  # which is all there is to count where one token was routed
            counts.append(once if len(once) == len(row) else Counter(row))
        for layer in counts:
            layer.pop(NO_EXPERT, None)
        return counts

    def save(self, path: Path) -> None:
        """Write the trace as Parquet; see `trace_capture.trace_store.write_trace`."""
        from trace_capture.trace_store import write_trace

        write_trace(self, path)

    @staticmethod
    def load(path: Path) -> Trace:
        """Read and check a trace; see `trace_capture.trace_store.read_trace`."""
        from trace_capture.trace_store import read_trace

        return read_trace(path)


COLUMNS = ("sequence", "pass_id", "phase", "position", "token_id", "accepted", "experts", "weights")


def _layers_to_search(ids: Ids) -> tuple[int, ...]:
    """Layers of ids [T, L, K] with a row in which an id stands twice or is none."""
    found = np.zeros(ids.shape[1], dtype=np.bool_)
    for start in range(0, len(ids), _ROWS_AT_ONCE):
        ranked = np.sort(ids[start : start + _ROWS_AT_ONCE], axis=2)
        found |= (ranked[:, :, -1:] == NO_EXPERT).any(axis=(0, 2))
        found |= (ranked[:, :, 1:] == ranked[:, :, :-1]).any(axis=(0, 2))
    return tuple(np.flatnonzero(found).tolist())


def _bytes_of(column: npt.NDArray[Any]) -> memoryview:
    """The bytes of a column, not copied."""
    return np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
