"""What a trace says about routing, before any machine is assumed: load, locality, reuse, predictability.

Pure numpy on a `Trace`; every function gives one value or one array per MoE layer. Layers for which there is
nothing to count give `nan`, never 0, so that an average over layers does not mix up "none" and "never measured".
Shapes: T tokens, L MoE layers, E experts, K top-k, P predicted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trace_capture.trace import NO_EXPERT, Phase, Trace

Counts = npt.NDArray[np.int64]
Ratios = npt.NDArray[np.float64]

GENERATING = (Phase.DECODE, Phase.VERIFY)
"""Phases of the passes that generate text, one token or one draft at a time."""


class Lookups(NamedTuple):
    """The experts that one layer asks for, in order: pass after pass, in a pass each distinct expert once, in order
    of first appearance. So a prefill of many tokens is one set, as an engine treats it.

    Attributes:
        experts: expert ids, int64 [N].
        phases: phase of the pass each look-up belongs to, uint8 [N].
    """

    experts: Counts
    phases: npt.NDArray[np.uint8]


def expert_load(trace: Trace, phases: Collection[Phase] = tuple(Phase)) -> Counts:
    """How many tokens of the given phases each expert got, int64 [L, E]."""
    shape = trace.shape
    experts = trace.experts[np.isin(trace.phase, list(phases))]
    load = np.zeros((shape.num_moe_layers, shape.num_experts), dtype=np.int64)
    for layer in range(shape.num_moe_layers):
        ids = experts[:, layer].ravel()
        load[layer] = np.bincount(ids[ids != NO_EXPERT], minlength=shape.num_experts)
    return load


def load_entropy_ratio(load: Counts) -> Ratios:
    """Entropy of each layer's load over that of a perfectly even one, 0..1, float64 [L].

    1 means that all experts are asked for equally often, 0 that one gets everything, nan that nothing was routed.

    Args:
        load: tokens per expert [L, E], of `expert_load`.
    """
    total = load.sum(axis=1, keepdims=True)
    share = np.divide(load, total, out=np.zeros(load.shape), where=total > 0)
    entropy = -(share * np.log(share, out=np.zeros_like(share), where=share > 0)).sum(axis=1)
    even = np.log(load.shape[1])
    ratio = entropy / even if even > 0 else np.ones_like(entropy)
    return np.where(total[:, 0] > 0, ratio, np.nan)


def consecutive_overlap(trace: Trace) -> Ratios:
    """Share of a token's experts that the token before it also used, mean over generated tokens, float64 [L].

    Pairs are neighbours in one sequence of which the later one was generated (decoded, or verified and accepted);
    rejected draft tokens are left out.
    """
    kept = trace.rows(trace.accepted)
    later = np.flatnonzero((np.diff(kept.sequence) == 0) & np.isin(kept.phase[1:], GENERATING)) + 1
    overlap = np.full(trace.shape.num_moe_layers, np.nan)
    for layer in range(trace.shape.num_moe_layers):
        now, before = kept.experts[later, layer], kept.experts[later - 1, layer]
        routed = (now[:, 0] != NO_EXPERT) & (before[:, 0] != NO_EXPERT)
        if routed.any():
            overlap[layer] = _shared(now[routed], before[routed]).mean()
    return overlap


def predictor_recall(trace: Trace) -> dict[str, Ratios]:
    """Share of the true top-k that each predictor named, mean over generated tokens; name -> float64 [L].

    Rows without a prediction are left out, and a layer without any (such as the first) is nan.
    """
    rows = trace.rows(np.isin(trace.phase, GENERATING))
    recall = {}
    for name, predicted in sorted(rows.predicted.items()):
        recall[name] = np.full(trace.shape.num_moe_layers, np.nan)
        for layer in range(trace.shape.num_moe_layers):
            true, guess = rows.experts[:, layer], predicted[:, layer]
            known = (true[:, 0] != NO_EXPERT) & (guess != NO_EXPERT).any(axis=1)
            if known.any():
                recall[name][layer] = _shared(true[known], guess[known]).mean()
    return recall


def coactivation(trace: Trace, layer: int) -> Counts:
    """How many tokens used experts i and j together in MoE layer `layer`, int64 [E, E]; the diagonal is the load."""
    ids = trace.experts[:, layer]
    routed = ids[ids[:, 0] != NO_EXPERT].astype(np.int64)
    used = np.zeros((len(routed), trace.shape.num_experts), dtype=np.float32)
    np.put_along_axis(used, routed, 1.0, axis=1)
    return np.rint(used.T.astype(np.float64) @ used).astype(np.int64)


def layer_lookups(trace: Trace, layer: int) -> Lookups:
    """The stream of experts that MoE layer `layer` asks for; see `Lookups`."""
    experts: list[int] = []
    phases: list[int] = []
    for item in trace.passes:
        active = trace.active_experts(item.start, item.stop, layer)
        experts += active
        phases += [item.phase] * len(active)
    return Lookups(np.array(experts, dtype=np.int64), np.array(phases, dtype=np.uint8))


def stack_distances(experts: Counts, num_experts: int) -> Counts:
    """LRU stack distance of each look-up: how many *other* experts were asked for since its last time.

    A look-up hits in an LRU cache of c slots exactly when its distance is below c (Mattson's stack algorithm), so
    one walk answers for every capacity. Look-ups are taken one by one in order: an expert of a pass may push out
    one that the same pass asks for later, as in a plain LRU. An engine that pins a layer's active set while it is
    loaded does slightly better than this, most visibly when the slots are fewer than two active sets.

    Args:
        experts: look-ups in order [N].
        num_experts: E, also the distance given to a first look-up, which hits at no capacity up to E.

    Returns:
        int64 [N], each 0..E-1, or E for a first look-up.
    """
    stack: list[int] = []
    """Experts by recency, the latest last."""
    seen: set[int] = set()
    distances = np.empty(len(experts), dtype=np.int64)
    for place, expert in enumerate(experts.tolist()):
        if expert in seen:
            depth = stack.index(expert)
            distances[place] = len(stack) - 1 - depth
            del stack[depth]
        else:
            seen.add(expert)
            distances[place] = num_experts
        stack.append(expert)
    return distances


def reuse_distances(trace: Trace, phases: Collection[Phase] = GENERATING) -> tuple[Counts, ...]:
    """Stack distances of the look-ups of the given phases, one int64 array per MoE layer.

    All passes move the stack, so a decode look-up may hit on what the prefill used; E marks a first look-up.
    """
    result = []
    for layer in range(trace.shape.num_moe_layers):
        lookups = layer_lookups(trace, layer)
        distances = stack_distances(lookups.experts, trace.shape.num_experts)
        result.append(distances[np.isin(lookups.phases, list(phases))])
    return tuple(result)


def lru_hit_curve(trace: Trace, phases: Collection[Phase] = tuple(Phase)) -> Counts:
    """Hits of a private LRU cache per layer at every capacity, int64 [L, E + 1].

    Entry [l, c] is the number of look-ups of the given phases (default: all) that hit when layer l has c slots;
    see `Lookups` for what a look-up is and `stack_distances` for the order within a pass. Column 0 is 0, column E
    is all look-ups but the first of each expert.
    """
    num_experts = trace.shape.num_experts
    curve = np.zeros((trace.shape.num_moe_layers, num_experts + 1), dtype=np.int64)
    for layer, distances in enumerate(reuse_distances(trace, phases)):
        curve[layer] = hit_curve(distances, num_experts)
    return curve


def perfect_distances(experts: Counts, num_experts: int) -> Counts:
    """Stack distance of each look-up under perfect eviction: it hits in c slots exactly when its distance is below c.

    Perfect eviction, which drops the expert whose next use is farthest (Belady 1966), is a stack algorithm like LRU
    (Mattson, Gecsei, Slutz, Traiger 1970, section "OPT"), so one walk answers for every capacity. Experts are known by
    the time of their next use: the one that is asked for now goes on top, and of the stack above its old place each
    entry becomes the sooner one of itself and of the latest above it. Look-ups are taken one by one, as in
    `stack_distances`, and what is asked for is always loaded.

    Args:
        experts: look-ups in order [N].
        num_experts: E, also the distance given to a first look-up.

    Returns:
        int64 [N], each 0..E-1, or E for a first look-up.
    """
    following = _next_uses(experts)
    stack = np.empty(num_experts, dtype=np.int64)  # times of next use, of the smallest cache's content first
    size = 0
    distances = np.empty(len(experts), dtype=np.int64)
    seen: set[int] = set()
    for now, expert in enumerate(experts.tolist()):
        if expert in seen:
            depth = int(np.argmax(stack[:size] == now))
            distances[now] = depth
        else:
            seen.add(expert)
            depth = size
            size += 1
            distances[now] = num_experts
        if depth:
            latest = np.maximum.accumulate(stack[:depth])
            stack[1:depth] = np.minimum(stack[1:depth], latest[:-1])
            stack[depth] = latest[-1]
        stack[0] = following[now]
    return distances


def hit_curve(distances: Counts, num_experts: int) -> Counts:
    """Hits at every capacity from 0 to E, int64 [E + 1], of stack distances."""
    counts = np.bincount(distances, minlength=num_experts + 1)[:num_experts]
    return np.concatenate([[0], np.cumsum(counts)])


def num_lookups(trace: Trace, phases: Collection[Phase] = tuple(Phase)) -> Counts:
    """Look-ups of the given phases per MoE layer, int64 [L]: the denominator of hit rates."""
    lookups = (layer_lookups(trace, layer) for layer in range(trace.shape.num_moe_layers))
    return np.array([int(np.isin(one.phases, list(phases)).sum()) for one in lookups], dtype=np.int64)


def _next_uses(experts: Counts) -> Counts:
    """For each look-up the place of the next one of the same expert; beyond the end, each another, where none is."""
    order = np.argsort(experts, kind="stable")
    same = experts[order[1:]] == experts[order[:-1]]
    following = len(experts) + np.arange(len(experts), dtype=np.int64)
    following[order[:-1][same]] = order[1:][same]
    return following


def _shared(ids: npt.NDArray[np.uint16], others: npt.NDArray[np.uint16]) -> Ratios:
    """Share of each row of `ids` [N, K] that occurs in the same row of `others` [N, P], float64 [N]."""
    return np.asarray((ids[:, :, None] == others[:, None, :]).any(axis=2).mean(axis=1))
