"""Checks that a trace says nothing impossible, each with a message that names the row and the mend."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trace_capture.errors import TraceError
from trace_capture.trace import COLUMNS, NO_EXPERT, Ids, Phase, Trace

_MEND = "the file was edited or its writer is at fault; capture or import it again"


def check_trace(trace: Trace, where: str = "trace") -> None:
    """Check lengths, ranges, order and duplicates of every column.

    Args:
        trace: what to check.
        where: how messages call it, normally the file's path.

    Raises:
        TraceError: naming the first column and row that is wrong.
    """
    shape = trace.shape
    num_tokens, layers, top_k = trace.num_tokens, shape.num_moe_layers, shape.top_k
    for name in COLUMNS:
        if len(getattr(trace, name)) != num_tokens:
            raise TraceError(f"{where}: column '{name}' has {len(getattr(trace, name))} rows of {num_tokens}; {_MEND}")
    if trace.experts.shape != (num_tokens, layers, top_k) or trace.weights.shape != trace.experts.shape:
        raise TraceError(
            f"{where}: experts {trace.experts.shape} and weights {trace.weights.shape} do not fit "
            f"{layers} layers x top-{top_k}; {_MEND}"
        )
    _check_ids(trace.experts, "experts", shape.num_experts, where)
    for name, ids in trace.predicted.items():
        if ids.shape[:2] != (num_tokens, layers):
            raise TraceError(f"{where}: predictions '{name}' have shape {ids.shape}; {_MEND}")
        _check_ids(ids, f"predicted '{name}'", shape.num_experts, where)
    _first_bad(np.asarray(~np.isfinite(trace.weights).all(axis=(1, 2))), where, "a weight that is not a finite number")
    _first_bad(trace.phase > max(Phase), where, "an unknown phase")
    _first_bad(trace.position < 0, where, "a negative position")
    _first_bad(~trace.accepted & (trace.phase != Phase.VERIFY), where, "a rejected token outside a verify pass")
    _check_passes(trace, where)


def _check_ids(ids: Ids, name: str, num_experts: int, where: str) -> None:
    """Ids in range; a row-layer is routed wholly or not at all; no expert twice in a row-layer."""
    absent = ids == NO_EXPERT
    _first_bad(((ids >= num_experts) & ~absent).any(axis=(1, 2)), where, f"{name} beyond {num_experts - 1}")
    partly = absent.any(axis=2) & ~absent.all(axis=2)
    _first_bad(partly.any(axis=1), where, f"{name} missing for a part of the top-k")
    ordered = np.sort(ids, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != NO_EXPERT)
    _first_bad(twice.any(axis=(1, 2)), where, f"{name} with the same expert twice in one layer")


def _check_passes(trace: Trace, where: str) -> None:
    """Pass ids never fall; all rows of a pass share phase and sequence; decode passes have one row."""
    step = np.diff(trace.pass_id)
    _first_bad(np.concatenate([[False], step < 0]), where, "a pass_id lower than the row before")
    same = step == 0
    for name in ("phase", "sequence"):
        changed = same & (np.diff(getattr(trace, name)) != 0)
        _first_bad(np.concatenate([[False], changed]), where, f"another {name} than the row before in the same pass")
    decode = same & (trace.phase[1:] == Phase.DECODE)
    _first_bad(np.concatenate([[False], decode]), where, "a second token in one decode pass")


def _first_bad(bad: npt.NDArray[np.bool_], where: str, what: str) -> None:
    if len(bad) and bad.any():
        raise TraceError(f"{where}: row {int(np.argmax(bad))} has {what}; {_MEND}")
