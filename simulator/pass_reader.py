"""Reading the experts of passes that are asked for in order, as a replay does."""

from __future__ import annotations

from trace_capture.trace import NO_EXPERT, Pass, Trace

_BLOCK = 64


class PassReader:
    """Gives `Trace.pass_experts` of one pass after the other, a block of rows converted at a time.

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
        _, self._layers, self._width = self._ids.shape
        self._searched = trace.searched_layers(source)
        self._start = self._stop = 0
        self._block: list[int] = []
        """Ids of the rows from `_start` to `_stop`, one after the other: a list of lists would keep the garbage
        collector busy."""

    def __call__(self, item: Pass) -> list[list[int]]:
        """See `read`."""
        return self.read(item)

    def read(self, item: Pass) -> list[list[int]]:
        """Distinct experts of a pass in every layer [L], in order of first appearance; not to be changed."""
        start = item.start
        if item.stop - start != 1:
            return self._trace.pass_experts(item, self._source)
        if not self._start <= start < self._stop:
            self._start, self._stop = start, start + _BLOCK
            self._block = self._ids[self._start : self._stop].ravel().tolist()
        block, place = self._block, (start - self._start) * self._layers * self._width
        rows: list[list[int]] = []
        for _ in range(self._layers):
            rows.append(block[place : place + self._width])
            place += self._width
        for layer in self._searched:
            rows[layer] = [expert for expert in dict.fromkeys(rows[layer]) if expert != NO_EXPERT]
        return rows
