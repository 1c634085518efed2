"""The statistics of a trace as numbers and sentences for the routing page. Pure: no files, no Dash, no plotly."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dashboard.texts import format_percent, plural
from dashboard.views import NO_TRACE
from trace_capture.statistics import (
    coactivation,
    consecutive_overlap,
    expert_load,
    hit_curve,
    layer_lookups,
    load_entropy_ratio,
    perfect_distances,
    predictor_recall,
    stack_distances,
)
from trace_capture.trace import NO_EXPERT, Trace

MAX_LOOKUPS = 40_000
"""Look-ups that one reuse walk takes at most; it says so where a trace has more."""
MAX_STRIP_COLUMNS = 240
DEFAULT_STRIP_TOKENS = 120
_REMEMBERED = 256
"""Layers whose reuse is kept, so that a change of another control does not walk again."""

Ratios = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayersView:
    """One number per MoE layer, each 0..1 or nan where there is nothing to count.

    Attributes:
        entropy_ratio: entropy of the load over that of an even one [L].
        overlap: share of a token's experts that the token before it used [L].
        recall: predictor -> share of the true experts that it named [L].
    """

    layer_ids: tuple[int, ...] = ()
    entropy_ratio: Ratios | None = None
    overlap: Ratios | None = None
    recall: dict[str, Ratios] = field(default_factory=dict)
    sentence: str = ""
    recall_sentence: str = ""
    empty: str = ""


@dataclass(frozen=True)
class StripView:
    """Which experts a layer used, token by token: share of each column's tokens that used each expert [E, columns].

    Column i holds `tokens_per_column` tokens (the last one perhaps fewer) from token `first` + i * that number on.
    """

    shares: Ratios | None = None
    first: int = 0
    stop: int = 0
    tokens_per_column: int = 1
    layer_id: int = 0
    sentence: str = ""
    empty: str = ""


@dataclass(frozen=True)
class ReuseView:
    """How soon experts of one layer are asked for again, and what caches could make of it.

    Attributes:
        distances: look-ups per LRU stack distance 0..E-1 [E].
        first_lookups: look-ups of an expert for the first time, which no cache can hit.
        lru_hits, perfect_hits: hit rate in a private cache of 0..E slots [E + 1].
        num_lookups: that were walked.
    """

    distances: npt.NDArray[np.int64] | None = None
    first_lookups: int = 0
    lru_hits: Ratios | None = None
    perfect_hits: Ratios | None = None
    num_lookups: int = 0
    layer_id: int = 0
    sentence: str = ""
    empty: str = ""


@dataclass(frozen=True)
class PairsView:
    """Share of a layer's tokens that used two experts together [E, E], nan on the diagonal; and how many times as
    often as if they were independent [E, E]."""

    shares: Ratios | None = None
    lift: Ratios | None = None
    layer_id: int = 0
    sentence: str = ""
    empty: str = ""


def layers_view(trace: Trace | None) -> LayersView:
    """Load entropy, overlap of neighbouring tokens and recall of the captured predictors, per layer."""
    if trace is None:
        return LayersView(empty=NO_TRACE)
    ids = trace.shape.moe_layer_ids
    entropy, overlap = load_entropy_ratio(expert_load(trace)), consecutive_overlap(trace)
    recall = predictor_recall(trace)
    sentence = (
        f"Load: {_mean_text(entropy)} of the entropy of an even load, on average over layers. "
        f"Neighbouring tokens share {_mean_text(overlap)} of their experts."
    )
    means = [f"{name} names {_mean_text(values)} of the true experts" for name, values in recall.items()]
    told = "; ".join(means) + "." if means else (
        "The trace holds no predictions; capture it with --predict quasi-hidden to see how well experts are foreseen."
    )  # fmt: skip
    return LayersView(ids, entropy, overlap, recall, sentence, told)


def strip_view(trace: Trace | None, layer: int, first: int, stop: int) -> StripView:
    """Tokens `first` to `stop` of one layer; a window beyond the trace is moved into it."""
    if trace is None or not trace.num_tokens:
        return StripView(empty=NO_TRACE)
    layer = _inside(layer, trace)
    first = max(0, min(first, trace.num_tokens - 1))
    stop = max(first + 1, min(stop, trace.num_tokens))
    width = -(-(stop - first) // MAX_STRIP_COLUMNS)
    experts = trace.experts[first:stop, layer].astype(np.int64)
    tokens, ranks = np.nonzero(experts != NO_EXPERT)
    columns = -(-(stop - first) // width)
    counts = np.zeros((trace.shape.num_experts, columns))
    np.add.at(counts, (experts[tokens, ranks], tokens // width), 1)
    sizes = np.minimum(width, (stop - first) - width * np.arange(columns))
    used = int((counts.sum(axis=1) > 0).sum())
    sentence = (
        f"Tokens {first} to {stop - 1} of 0 to {trace.num_tokens - 1} used {used} of {trace.shape.num_experts} experts."
        + (f" Each column is {plural(width, 'token')}; choose fewer for single ones." if width > 1 else "")
    )
    layer_id = trace.shape.moe_layer_ids[layer]
    return StripView(counts / sizes, first, stop, width, layer_id, sentence)


def reuse_view(trace: Trace | None, layer: int) -> ReuseView:
    """Reuse distances of one layer, and hit curves of LRU and of perfect eviction, one walk each."""
    if trace is None:
        return ReuseView(empty=NO_TRACE)
    layer = _inside(layer, trace)
    lru, perfect, walked, total = _reuse(_Keyed(trace, layer))
    num_experts = trace.shape.num_experts
    if not walked:
        return ReuseView(empty="The trace has no tokens that this layer routed; choose another layer or trace.")
    counts = np.bincount(lru, minlength=num_experts + 1)
    lru_hits, perfect_hits = hit_curve(lru, num_experts) / walked, hit_curve(perfect, num_experts) / walked
    gap = perfect_hits - lru_hits
    slots = int(np.argmax(gap))
    sentence = (
        f"With {plural(slots, 'slot')} LRU hits {format_percent(float(lru_hits[slots]))} and perfect eviction "
        f"{format_percent(float(perfect_hits[slots]))}: there a better policy could gain most."
        + (f" Of {total:,} look-ups the first {walked:,} are counted." if walked < total else "")
    )
    layer_id = trace.shape.moe_layer_ids[layer]
    return ReuseView(counts[:num_experts], int(counts[num_experts]), lru_hits, perfect_hits, walked, layer_id, sentence)


def pairs_view(trace: Trace | None, layer: int) -> PairsView:
    """Which experts of one layer are used together."""
    if trace is None:
        return PairsView(empty=NO_TRACE)
    layer = _inside(layer, trace)
    if trace.shape.top_k < 2:
        return PairsView(empty="Each token goes to one expert here, so no two are used together.")
    together = coactivation(trace, layer).astype(np.float64)
    load = np.diag(together).copy()
    routed = load.sum() / trace.shape.top_k
    if not routed:
        return PairsView(empty="The trace has no tokens that this layer routed; choose another layer or trace.")
    np.fill_diagonal(together, np.nan)
    expected = np.outer(load, load) / routed
    lift = np.divide(together, expected, out=np.full_like(together, np.nan), where=expected > 0)
    one, other = np.unravel_index(int(np.nanargmax(together)), together.shape)
    sentence = (
        f"Most often together: experts {min(one, other)} and {max(one, other)}, in "
        f"{format_percent(float(together[one, other] / routed))} of tokens, {lift[one, other]:.1f} times as often as "
        "if they were chosen independently."
    )
    return PairsView(together / routed, lift, trace.shape.moe_layer_ids[layer], sentence)


class _Keyed:
    """A layer of a trace as a key of the cache: equal where content is."""

    def __init__(self, trace: Trace, layer: int) -> None:
        self.trace, self.layer = trace, layer
        self._key = (trace.digest, layer)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self._key == other._key


@lru_cache(maxsize=_REMEMBERED)
def _reuse(keyed: _Keyed) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int, int]:
    """LRU and perfect stack distances of a layer, look-ups walked, and all of them."""
    experts = layer_lookups(keyed.trace, keyed.layer).experts
    walked = experts[:MAX_LOOKUPS]
    num_experts = keyed.trace.shape.num_experts
    lru, perfect = stack_distances(walked, num_experts), perfect_distances(walked, num_experts)
    return lru, perfect, len(walked), len(experts)


def _inside(layer: int, trace: Trace) -> int:
    return max(0, min(layer, trace.shape.num_moe_layers - 1))


def _mean_text(values: Ratios) -> str:
    known = values[np.isfinite(values)]
    return format_percent(float(known.mean())) if len(known) else "an unknown share"
