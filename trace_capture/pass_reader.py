"""Reading the experts of passes that are asked for in order, as a replay does."""

from __future__ import annotations

import numpy as np

from trace_capture.trace import NO_EXPERT, Ids, Pass, Trace

_BLOCK = 64


class PassReader:
    """Gives `Trace.pass_experts` of one pass after the other, a block of rows converted at a time.

    Whether a layer of a block has to be searched for repeated or absent experts is found for the block as a whole.

    Args:
        trace: whose passes.
        source: None for the routed experts, else the name of a predictor.

    Raises:
        TraceError: the trace has no such predictor.
    """

    def __init__(self, trace: Trace, source: str | None = None) -> None:
        self._trace = trace
        self._source = source
        self._ids = trace.experts if source is None else trace.predictions(source)
        self._start = 0
        self._rows: list[list[list[int]]] = []

    def __call__(self, item: Pass) -> list[list[int]]:
        """Distinct experts of a pass in every layer [L], in order of first appearance; not to be changed."""
        if item.stop - item.start != 1:
            return self._trace.pass_experts(item, self._source)
        place = item.start - self._start
        if not 0 <= place < len(self._rows):
            self._start, place = item.start, 0
            self._rows = _distinct(self._ids[item.start : item.start + _BLOCK])
        return self._rows[place]


def _distinct(ids: Ids) -> list[list[list[int]]]:
    """Distinct experts [T][L][up to K] of ids [T, L, K]."""
    rows: list[list[list[int]]] = ids.tolist()
    ranked = np.sort(ids.swapaxes(0, 1), axis=2)
    searched = (ranked[:, :, -1] == NO_EXPERT).any(axis=1)
    searched |= (ranked[:, :, 1:] == ranked[:, :, :-1]).reshape(len(ranked), -1).any(axis=1)
    for layer in np.flatnonzero(searched).tolist():
        for row in rows:
            row[layer] = [expert for expert in dict.fromkeys(row[layer]) if expert != NO_EXPERT]
    return rows
