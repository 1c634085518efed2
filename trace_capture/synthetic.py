"""Made-up routing with chosen statistics, for models that nobody has captured yet.

Each token keeps a share of the experts that the token before it used in the same layer and draws the rest anew,
with a Zipf-like preference that differs from layer to layer and, with a memory, for experts that the sequence used
before: what a text is about stays the same for a while. A "quasi-hidden" prediction names the true experts with a
chosen recall. Real routing has more structure (prompts, layers that follow each other), so a result on a synthetic
trace is a what-if, and every report says so. `trace_capture.synthetic_fit` finds the settings that fit a trace.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_capture.errors import ConfigError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.model_shape import ModelShape
from trace_capture.trace import NO_EXPERT, Phase, Trace, TraceInfo
from trace_capture.trace_checks import check_trace
from trace_capture.versions import software_versions

PREDICTOR = "quasi-hidden"
_WEIGHT_SPREAD = 1.0
"""Standard deviation of the router logits behind the made-up weights."""
_FADING = 0.97
"""What a use of an expert counts one token later, for the memory."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Options:
    """What was asked for; kept in the trace's options."""

    num_prompts: int
    prompt_tokens: int
    decode_tokens: int
    reuse_ratio: float
    skew: float
    predictor_recall: float
    memory: float
    seed: int
    popularity: str | None
    """Digest of the counts that experts were drawn by, in place of the Zipf law."""


def synthetic_trace(
    shape: ModelShape,
    num_prompts: int,
    prompt_tokens: int,
    decode_tokens: int,
    *,
    reuse_ratio: float,
    skew: float,
    predictor_recall: float,
    memory: float = 0.0,
    seed: int,
    popularity: ExpertCounts | None = None,
) -> Trace:
    """Draw a trace; equal arguments give equal traces.

    Args:
        shape: counts of the model.
        num_prompts: sequences, each with its own first token.
        prompt_tokens: tokens of each prefill pass.
        decode_tokens: decode passes after each prefill.
        reuse_ratio: share of a token's top-k that the token before it also used, in the mean over tokens. Cannot
            be less than (2K - E) / K, which top-k of few experts shares anyway.
        skew: exponent of the Zipf law that new experts are drawn by; 0 is even. The load that results is flatter
            than that law, because an expert that was just used is kept or left, but not drawn.
        predictor_recall: share of the true top-k that the prediction names, likewise in the mean; the first MoE
            layer has no prediction.
        memory: exponent by which past uses in the same sequence, fading by 3 % a token, raise an expert's chance to be
            drawn; 0 for none.
        seed: of the random generator.
        popularity: counts of experts to draw new ones by, in place of the Zipf law; the load that results is flatter
            than they are, for the same reason, and because a token takes an expert at most once.

    Raises:
        ConfigError: a count is not positive, a ratio is not in 0..1, skew or memory is negative, or the popularity is
            of a model of another size or given beside a skew.
    """
    options = _Options(
        num_prompts,
        prompt_tokens,
        decode_tokens,
        reuse_ratio,
        skew,
        predictor_recall,
        memory,
        seed,
        popularity.digest if popularity else None,
    )
    _check(options)
    random = np.random.default_rng(seed)
    preference = _preference(random, shape, skew) if popularity is None else _counted_preference(shape, popularity)
    experts, predicted = _draw_rows(random, preference, shape, options)
    trace = Trace(
        info=TraceInfo(shape=shape, source="synthetic", options=asdict(options), versions=software_versions("numpy")),
        token_id=np.full(len(experts), -1, dtype=np.int32),
        accepted=np.ones(len(experts), dtype=np.bool_),
        experts=experts.astype(np.uint16),
        weights=_weights(random, experts.shape),
        predicted={PREDICTOR: predicted.astype(np.uint16)},
        **_row_columns(options),
    )
    check_trace(trace, where="synthetic trace")
    return trace


def _draw_rows(
    random: np.random.Generator, preference: npt.NDArray[np.float64], shape: ModelShape, options: _Options
) -> tuple[Ids, Ids]:
    """Routed and predicted ids of all tokens, both [T, L, K]."""
    length = options.prompt_tokens + options.decode_tokens
    experts = np.empty((options.num_prompts * length, shape.num_moe_layers, shape.top_k), dtype=np.int64)
    predicted = np.empty_like(experts)
    used = np.zeros_like(preference)
    for row in range(len(experts)):
        before = experts[row - 1] if row % length else None
        if before is None:
            used[:] = 0
        liking = preference + options.memory * np.log1p(used) if options.memory else preference
        experts[row] = _draw(random, liking, shape.top_k, before, options.reuse_ratio)
        used *= _FADING
        np.put_along_axis(used, experts[row], np.take_along_axis(used, experts[row], axis=1) + 1, axis=1)
        predicted[row] = _draw(random, preference, shape.top_k, experts[row], options.predictor_recall)
    predicted[:, 0] = NO_EXPERT
    return experts, predicted


def _check(options: _Options) -> None:
    for name in ("num_prompts", "prompt_tokens"):
        if getattr(options, name) < 1:
            raise ConfigError(f"synthetic trace: {name} = {getattr(options, name)}; give at least 1")
    if options.decode_tokens < 0:
        raise ConfigError(f"synthetic trace: decode_tokens = {options.decode_tokens}; give at least 0")
    for name in ("reuse_ratio", "predictor_recall"):
        if not 0 <= getattr(options, name) <= 1:
            raise ConfigError(f"synthetic trace: {name} = {getattr(options, name)}; give a share from 0 to 1")
    for name in ("skew", "memory"):
        if not 0 <= getattr(options, name) < float("inf"):
            raise ConfigError(f"synthetic trace: {name} = {getattr(options, name)}; give an exponent of at least 0")
    if options.popularity and options.skew:
        raise ConfigError("synthetic trace: counts say how popular experts are, so leave the skew out")
    if options.seed < 0:
        raise ConfigError(f"synthetic trace: seed = {options.seed}; give at least 0")


def _row_columns(options: _Options) -> dict[str, Any]:
    """Columns that follow from the counts alone: one prefill pass per prompt, then one pass per decode token."""
    length = options.prompt_tokens + options.decode_tokens
    position = np.tile(np.arange(length), options.num_prompts)
    is_decode = position >= options.prompt_tokens
    return {
        "sequence": np.repeat(np.arange(options.num_prompts), length).astype(np.int32),
        "pass_id": (np.cumsum(is_decode | (position == 0)) - 1).astype(np.int32),
        "phase": np.where(is_decode, Phase.DECODE, Phase.PREFILL).astype(np.uint8),
        "position": position.astype(np.int32),
    }


def _preference(random: np.random.Generator, shape: ModelShape, skew: float) -> npt.NDArray[np.float64]:
    """Logarithm of each expert's Zipf weight, in an order of its own per layer [L, E]."""
    log_weight = -skew * np.log(np.arange(1, shape.num_experts + 1))
    return random.permuted(np.tile(log_weight, (shape.num_moe_layers, 1)), axis=1)


def _counted_preference(shape: ModelShape, popularity: ExpertCounts) -> npt.NDArray[np.float64]:
    """Logarithm of each expert's share of its layer's counts [L, E]; one never seen is as rare as half a count.

    Raises:
        ConfigError: the counts are of a model of another size.
    """
    wanted = (shape.num_moe_layers, shape.num_experts)
    if popularity.counts.shape != wanted:
        have = " x ".join(map(str, popularity.counts.shape))
        raise ConfigError(
            f"synthetic trace: counts of {have} experts do not fit {shape.name} with {wanted[0]} MoE layers x "
            f"{wanted[1]} experts; give counts of the same model"
        )
    share = popularity.counts + 0.5
    return np.asarray(np.log(share / share.sum(axis=1, keepdims=True)))


def _draw(
    random: np.random.Generator,
    preference: npt.NDArray[np.float64],
    top_k: int,
    known: Ids | None,
    keep_ratio: float,
) -> Ids:
    """K distinct experts per layer [L, K], each of which is one of `known` [L, K] with probability `keep_ratio`.

    Drawing without replacement by weight is taking the largest of log weight + Gumbel noise; adding a large bonus
    to some experts of `known`, and taking it from the others, fixes how many of them are among the largest.
    """
    layers, num_experts = preference.shape
    score = preference + random.gumbel(size=preference.shape)
    if known is not None:
        keep = random.binomial(top_k, keep_ratio, size=(layers, 1))
        ours = np.take_along_axis(score, known, axis=1)
        rank = np.argsort(np.argsort(-ours, axis=1), axis=1)
        bonus = np.where(rank < np.maximum(keep, 2 * top_k - num_experts), 1e6, -1e6)
        np.put_along_axis(score, known, ours + bonus, axis=1)
    chosen = np.argsort(-score, axis=1)[:, :top_k]
    return random.permuted(chosen, axis=1)


def _weights(random: np.random.Generator, size: tuple[int, ...]) -> npt.NDArray[np.float16]:
    """Router weights [T, L, K] that fall from the first expert to the last and add up to 1."""
    logits = -np.sort(-random.normal(scale=_WEIGHT_SPREAD, size=size), axis=2)
    weights = np.exp(logits)
    return np.asarray(weights / weights.sum(axis=2, keepdims=True), dtype=np.float16)
