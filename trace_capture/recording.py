"""What a recorder knows of the passes of a generation, without any framework: phases, positions, what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_capture.trace import NO_EXPERT, Phase

RowSink = Callable[[dict[str, Any]], None]
Columns = Mapping[int, npt.NDArray[Any]]
"""By MoE layer index, the ids or weights [T, K] of one pass; layers that were not routed are absent."""


class PassRecording:
    """Turns the passes of one generation after another into trace rows.

    In speculative decoding it is a listener of the drafting: a pass that verifies drafts is held back until it is
    known how many were accepted. The first row of such a pass is the token that was certain already; each accepted row
    gave one output token.

    Args:
        num_layers: L.
        sink: called with the rows of each pass, keyed like `TraceWriter.append`.
    """

    def __init__(self, num_layers: int, sink: RowSink) -> None:
        self._num_layers = num_layers
        self._sink = sink
        self._sequence = -1
        self._pass_id = -1
        self._position = 0
        self._drafted = 0
        self._held: dict[str, Any] | None = None

    def begin_sequence(self, sequence: int) -> None:
        """The next pass is the prefill of prompt number `sequence`."""
        self._release(0)
        self._sequence = sequence
        self._position = 0
        self._drafted = 0

    def drafting_begins(self, reads_prompt: bool) -> None:
        """Draft tokens are about to be made; nothing of that is recorded."""

    def verify_begins(self, drafted: int) -> None:
        """The next pass verifies `drafted` tokens."""
        self._drafted = drafted

    def drafts_judged(self, accepted: int) -> None:
        """So many of the drafted tokens were kept."""
        self._release(accepted)

    def end_pass(
        self, token_ids: npt.NDArray[np.int32], experts: Columns, weights: Columns, predicted: Mapping[str, Columns]
    ) -> None:
        """A forward pass over tokens [T] has ended."""
        tokens = len(token_ids)
        self._pass_id += 1
        phase = self._phase(tokens)
        rows = {
            "sequence": np.full(tokens, self._sequence, dtype=np.int32),
            "pass_id": np.full(tokens, self._pass_id, dtype=np.int32),
            "phase": np.full(tokens, phase, dtype=np.uint8),
            "position": np.arange(self._position, self._position + tokens, dtype=np.int32),
            "token_id": token_ids,
            "accepted": np.ones(tokens, dtype=np.bool_),
            "experts": self._stack(experts, np.uint16, NO_EXPERT),
            "weights": self._stack(weights, np.float16, 0),
        }
        for name, columns in predicted.items():
            rows[f"predicted:{name}"] = self._stack(columns, np.uint16, NO_EXPERT)
        self._drafted = 0
        if phase == Phase.VERIFY:
            self._held = rows
        else:
            self._position += tokens
            self._sink(rows)

    def _phase(self, tokens: int) -> Phase:
        if self._position == 0:
            return Phase.PREFILL
        return Phase.VERIFY if self._drafted and tokens > 1 else Phase.DECODE

    def _release(self, accepted: int) -> None:
        """Hand on the pass that was held, if one is."""
        if self._held is not None:
            rows, self._held = self._held, None
            rows["accepted"] = np.arange(len(rows["accepted"])) <= accepted
            self._position += accepted + 1
            self._sink(rows)

    def _stack(self, by_layer: Columns, kind: Any, missing: int) -> npt.NDArray[Any]:
        """[T, L, K] from one [T, K] array per layer; layers without one are filled with `missing`."""
        some = next(iter(by_layer.values()))
        stacked = np.full((some.shape[0], self._num_layers, some.shape[1]), missing, dtype=kind)
        for layer, values in by_layer.items():
            stacked[:, layer] = values.astype(kind)
        return stacked
