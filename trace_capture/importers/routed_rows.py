"""Arrays of routed experts as engines write them, checked for what is known to go wrong, in the project's own form.

Engines write [tokens, layers, top-k] integers. Seen in public files: rows of the memory-profiling pass in front;
rows of zeros where a prefix cache spared the computation; the same expert twice in a row, which no top-k gives, after
a draft model wrote over a layer; dense layers as zeros; physical ids of an engine that replicates experts; fewer
experts per token than the model's top-k; a last layer that routed only the prompt's last token.
Shapes: T tokens, F layers in the file, L MoE layers, K top-k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trace_capture.errors import TraceError
from trace_capture.model_shape import ModelShape
from trace_capture.trace import NO_EXPERT, Ids

WARMUP_RUN = 16
"""Equal rows in front, in every layer, from which on they are taken for a warm-up pass."""

Array = npt.NDArray[np.int64]


class RoutedRows(NamedTuple):
    """Checked rows.

    Attributes:
        experts: uint16 [T, L, K].
        shape: the model, with the top-k of the rows.
        notes: what was left out or assumed, a sentence each.
        dropped: rows left out in front.
    """

    experts: Ids
    shape: ModelShape
    notes: tuple[str, ...]
    dropped: int


def routed_rows(values: npt.NDArray[Any], shape: ModelShape, where: str) -> RoutedRows:
    """Check an engine's array and bring it into the project's form.

    Args:
        values: integers [T, F, K]; F is the MoE layers or all decoder layers; -1 where there is nothing.
        shape: the model.
        where: how messages call the array.

    Raises:
        TraceError: the array does not fit the model, or says something impossible; the message names row and layer.
    """
    notes: list[str] = []
    ids = _without_unused_slots(_three_axes(values, where), shape, notes)
    ids = _moe_layers(ids, shape, where, notes)
    shape = with_top_k(shape, ids.shape[2], where, notes)
    ids, dropped = _without_warmup(ids, where, notes)
    _check_range(ids, shape, where)
    ids = _unrouted(ids, shape, where, notes)
    _check_duplicates(ids, shape, where)
    return RoutedRows(np.where(ids < 0, NO_EXPERT, ids).astype(np.uint16), shape, tuple(notes), dropped)


def with_top_k(shape: ModelShape, top_k: int, where: str, notes: list[str]) -> ModelShape:
    """The shape with the experts per token that a file shows.

    Raises:
        TraceError: they are more than the model has.
    """
    if top_k == shape.top_k:
        return shape
    if top_k > shape.top_k:
        raise TraceError(
            f"{where} has {top_k} experts per token and layer, {shape.name} has top-{shape.top_k}; "
            "give the model that was recorded with --model"
        )
    notes.append(
        f"recorded with {top_k} experts per token, lowered from the model's top-{shape.top_k}: "
        "the trace stands for that setting"
    )
    return shape.model_copy(update={"top_k": top_k})


def _three_axes(values: npt.NDArray[Any], where: str) -> Array:
    if values.ndim != 3 or values.dtype.kind not in "iu":
        raise TraceError(
            f"{where} holds {values.dtype} of shape {values.shape}; wanted whole numbers [tokens, layers, top-k]"
        )
    if 0 in values.shape:
        raise TraceError(f"{where} has shape {values.shape} and so no routing; record it again")
    return values.astype(np.int64)


def _without_unused_slots(ids: Array, shape: ModelShape, notes: list[str]) -> Array:
    """Slots at the end that are -1 everywhere are room that the writer did not need."""
    used = int(np.flatnonzero((ids >= 0).any(axis=(0, 1))).max(initial=0)) + 1
    if used < ids.shape[2]:
        notes.append(f"{ids.shape[2] - used} of {ids.shape[2]} slots per layer are -1 everywhere and left out")
    return ids[:, :, :used]


def _moe_layers(ids: Array, shape: ModelShape, where: str, notes: list[str]) -> Array:
    """Leave out dense layers where the file has all decoder layers."""
    layers = ids.shape[1]
    if layers == shape.num_moe_layers:
        return ids
    if layers != shape.num_layers:
        raise TraceError(
            f"{where} has {layers} layers; {shape.name} has {shape.num_layers}, {shape.num_moe_layers} of them with "
            "experts; give the model that was recorded with --model"
        )
    dense = sorted(set(range(layers)) - set(shape.moe_layer_ids))
    for layer in dense:
        if (ids[:, layer] > 0).any():
            raise TraceError(
                f"{where}: decoder layer {layer} has routing, but {shape.name} has no experts there; "
                "give the model that was recorded with --model"
            )
    notes.append(f"{len(dense)} of {layers} layers are dense, hold no routing and are left out")
    return ids[:, list(shape.moe_layer_ids)]


def _without_warmup(ids: Array, where: str, notes: list[str]) -> tuple[Array, int]:
    """Leave out runs of equal rows in front: a warm-up pass repeats one token."""
    total, dropped = len(ids), 0
    while len(ids) - dropped >= WARMUP_RUN:
        rest = ids[dropped:]
        differs = np.flatnonzero((rest != rest[0]).any(axis=(1, 2)))
        run = int(differs[0]) if len(differs) else len(rest)
        is_unrouted = bool((rest[0] <= 0).all() and rest.shape[2] > 1)  # no routing at all, which is another fault
        if run < WARMUP_RUN or is_unrouted:
            break
        dropped += run
    if dropped == total:
        raise TraceError(f"{where} repeats one row {total} times, as a warm-up pass does; record some real prompts")
    if dropped:
        notes.append(
            f"{dropped} of {total} rows in front repeat one row, as a warm-up pass does, and are left out "
            "(record without the engine's memory profiling to be rid of them)"
        )
    return ids[dropped:], dropped


def _check_range(ids: Array, shape: ModelShape, where: str) -> None:
    highest = int(ids.max())
    if highest >= shape.num_experts or ids.min() < -1:
        row, layer, _ = (int(index) for index in np.argwhere((ids >= shape.num_experts) | (ids < -1))[0])
        wrong = int(ids[row, layer].max() if highest >= shape.num_experts else ids[row, layer].min())
        raise TraceError(
            f"{where}: row {row}, MoE layer {layer} has expert {wrong} of {shape.num_experts}: either another "
            "model (give it with --model), or physical ids of an engine that replicates experts (record without "
            "expert-parallel load balancing, or with its map of physical to logical experts)"
        )


def _unrouted(ids: Array, shape: ModelShape, where: str, notes: list[str]) -> Array:
    """Mark rows of zeros as not routed where that can be; refuse them elsewhere."""
    missing = (ids == -1).all(axis=2)
    partly = (ids == -1).any(axis=2) & ~missing
    if partly.any():
        row, layer = (int(index) for index in np.argwhere(partly)[0])
        raise TraceError(f"{where}: row {row}, MoE layer {layer} lacks a part of its {ids.shape[2]} experts (-1)")
    zeros = missing | ((ids == 0).all(axis=2) & (ids.shape[2] > 1))
    whole = zeros.all(axis=1)
    if whole.all():
        raise TraceError(f"{where} holds nothing but zeros: the engine recorded no routing; record it again")
    nowhere = np.flatnonzero(zeros.all(axis=0))
    if len(nowhere):
        raise TraceError(
            f"{where}: MoE layer {int(nowhere[0])} (decoder layer {shape.moe_layer_ids[int(nowhere[0])]}) is zero in "
            "all rows: that layer has no experts (give the right --model), or the engine did not record it"
        )
    if whole.any():
        notes.append(
            f"{int(whole.sum())} of {len(ids)} rows hold zeros in all layers and are taken as not routed: a prefix "
            "cache spared them, or the engine lost them (record with the prefix cache off)"
        )
    spared = whole[:, None] | _spared_last_layer(zeros & ~whole[:, None], missing, notes)
    if (zeros & ~spared).any():
        row, layer = (int(index) for index in np.argwhere(zeros & ~spared)[0])
        raise TraceError(
            f"{where}: row {row}, MoE layer {layer} holds {ids.shape[2]} zeros, which no top-k gives; "
            "the engine lost that row: record it again with the prefix cache off"
        )
    return np.where(spared[:, :, None], -1, ids)


def _spared_last_layer(
    zeros: npt.NDArray[np.bool_], missing: npt.NDArray[np.bool_], notes: list[str]
) -> npt.NDArray[np.bool_]:
    """Where the last layer routed nothing because nobody needed its output [T, L]: where the file says so (-1), or
    where only that layer is zero, and only for tokens in front."""
    spared = np.zeros_like(zeros)
    if zeros[:, :-1].any():
        return spared
    count = int(zeros[:, -1].sum())
    if count and (zeros[:count, -1].all() or (missing[:, -1] >= zeros[:, -1]).all()):
        notes.append(f"the last layer routed none of {count} tokens of prompts, whose output was not needed")
        spared[:, -1] = zeros[:, -1]
    return spared


def _check_duplicates(ids: Array, shape: ModelShape, where: str) -> None:
    ordered = np.sort(ids, axis=2)
    twice = ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any(axis=2)
    if twice.any():
        row, layer = (int(index) for index in np.argwhere(twice)[0])
        raise TraceError(
            f"{where}: row {row}, MoE layer {layer} has the same expert twice ({ids[row, layer].tolist()}), which no "
            f"top-k gives, and so have {int(twice.sum())} rows and layers: another model wrote over it (a draft model "
            "with experts does), or ids were replicated; record without a draft model and without replicas"
        )
