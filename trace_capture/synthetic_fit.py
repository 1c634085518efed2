"""Settings of synthetic traces that look like a captured one, or like what is published of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from trace_capture.errors import ConfigError, TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.model_shape import ModelShape
from trace_capture.statistics import GENERATING, consecutive_overlap, lru_hit_curve, num_lookups, predictor_recall
from trace_capture.synthetic import synthetic_trace
from trace_capture.trace import Trace

SHARES = (1 / 8, 1 / 4, 1 / 2)
"""Cache sizes, as shares of the experts, at which LRU hit rates are matched."""
_SKEWS = (0.0, 0.3, 0.6, 0.9, 1.2)
_MEMORY_LIMIT = 4.0
_HALVINGS = 6
_MAX_LAYERS = 12
"""Layers that are drawn while fitting; statistics are means over layers, which are drawn alike."""
TYPICAL_RECALL = 0.85


@dataclass(frozen=True)
class RoutingStatistics:
    """What synthetic traces are fitted to.

    Attributes:
        reuse_ratio: share of a token's experts that the token before it used.
        hit_ratios: hit rate of LRU with room for each of `SHARES` of the experts, in decode.
        recall: of the predictor; None where there is none.
        source: where they come from.
    """

    reuse_ratio: float
    hit_ratios: tuple[float, ...]
    recall: float | None
    source: str


@dataclass(frozen=True)
class SyntheticSettings:
    """Arguments of `synthetic_trace` that statistics decide."""

    reuse_ratio: float
    skew: float
    memory: float
    predictor_recall: float


PUBLISHED: dict[str, RoutingStatistics] = {
    "qwen3-30b-a3b": RoutingStatistics(
        4.13 / 8,
        (0.586, 0.800, 0.912),
        TYPICAL_RECALL,
        "reuse of 4.07 to 4.18 of 8 experts (nano-vllm-moe on WikiText-2); LRU hit rates with 16, 32 and 64 of 128 "
        "slots on the public trace of BigMoeOnEdge, which was recorded with 6 experts per token instead of 8",
    ),
}
"""Statistics of models of which only figures are public, by name of `known_shape`."""


def statistics_of(trace: Trace) -> RoutingStatistics:
    """What `synthetic_trace` is to reproduce of a trace.

    Raises:
        TraceError: the trace has too few decoded tokens to have any statistics.
    """
    reuse = consecutive_overlap(trace)
    if not np.isfinite(reuse).any():
        raise TraceError("the trace has no two decoded tokens in a row, so nothing can be fitted; capture more tokens")
    recalls = [float(np.nanmean(recall)) for recall in predictor_recall(trace).values() if np.isfinite(recall).any()]
    best = max(recalls, default=None)
    return RoutingStatistics(float(np.nanmean(reuse)), hit_ratios(trace), best, f"fitted to {trace.digest[:19]}")


def hit_ratios(trace: Trace) -> tuple[float, ...]:
    """LRU hit rates in decode with room for `SHARES` of the experts of each layer."""
    curve = lru_hit_curve(trace, GENERATING).sum(axis=0)
    lookups = max(1, int(num_lookups(trace, GENERATING).sum()))
    return tuple(float(curve[round(share * trace.shape.num_experts)]) / lookups for share in SHARES)


def fit_settings(
    wanted: RoutingStatistics,
    shape: ModelShape,
    prompt_tokens: int,
    decode_tokens: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SyntheticSettings:
    """Skew and memory whose traces have the wanted LRU hit rates; reuse and recall are taken as they are.

    For each of a few skews the memory is halved in on the hit rate with a quarter of the experts, which rises with it;
    the pair whose whole curve is nearest wins. Equal arguments give equal settings.

    Args:
        wanted: of `statistics_of`, or of `PUBLISHED`.
        shape: the model; up to twelve of its layers are drawn.
        prompt_tokens, decode_tokens: of the sequences, on which hit rates depend.
        seed: of the random generator.
        progress: called with (draws done, draws in all).
    """
    layers = min(_MAX_LAYERS, shape.num_moe_layers)
    small = _few_layers(shape, layers)
    total = len(_SKEWS) * _HALVINGS
    done = 0

    def hits(skew: float, memory: float) -> tuple[float, ...]:
        nonlocal done
        trace = synthetic_trace(
            small,
            1,
            prompt_tokens,
            decode_tokens,
            reuse_ratio=wanted.reuse_ratio,
            skew=skew,
            memory=memory,
            predictor_recall=1.0,
            seed=seed,
        )
        done += 1
        if progress is not None:
            progress(done, total)
        return hit_ratios(trace)

    found: list[tuple[float, float, float]] = []
    for skew in _SKEWS:
        low, high = 0.0, _MEMORY_LIMIT
        for _ in range(_HALVINGS):
            memory = (low + high) / 2
            now = hits(skew, memory)
            error = sum((a - b) ** 2 for a, b in zip(now, wanted.hit_ratios, strict=True))
            found.append((error, skew, memory))
            low, high = (memory, high) if now[1] < wanted.hit_ratios[1] else (low, memory)
    _, skew, memory = min(found)
    recall = TYPICAL_RECALL if wanted.recall is None else wanted.recall
    return SyntheticSettings(wanted.reuse_ratio, skew, memory, recall)


def fitted_trace(
    shape: ModelShape,
    settings: SyntheticSettings,
    num_prompts: int,
    prompt_tokens: int,
    decode_tokens: int,
    seed: int = 0,
    popularity: ExpertCounts | None = None,
) -> Trace:
    """A synthetic trace with fitted settings, by counts of experts where there are some."""
    given = asdict(settings) | {"seed": seed, "popularity": popularity}
    return synthetic_trace(shape, num_prompts, prompt_tokens, decode_tokens, **given)


def published_statistics(model: str) -> RoutingStatistics:
    """What is published of a model's routing.

    Raises:
        ConfigError: nothing that this project knows of.
    """
    if model not in PUBLISHED:
        raise ConfigError(
            f"no published routing statistics of '{model}' are known (only of {', '.join(PUBLISHED)}); give a trace to "
            "be like with --like, or --reuse, --skew and --memory"
        )
    return PUBLISHED[model]


def _few_layers(shape: ModelShape, layers: int) -> ModelShape:
    """The same model with its first MoE layers only."""
    return ModelShape(
        name=shape.name,
        architecture=shape.architecture,
        num_layers=shape.moe_layer_ids[layers - 1] + 1,
        moe_layer_ids=shape.moe_layer_ids[:layers],
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        expert_bytes=shape.expert_bytes[:layers],
        dense_bytes=shape.dense_bytes[:layers],
    )
