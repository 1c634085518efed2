"""How much the speculative counts of experts tell, beside the yes or no of decoding (MoE-SpAc, arXiv 2603.09983).

The paper claims that the number of a verify pass's tokens that use an expert has higher entropy and a better signal to
noise ratio than the 0 or 1 of a single token. Were tokens independent and experts alike, the counts would be binomial:
the ratio would gain sqrt(gamma + 1) exactly, and at p = 1/16 the entropy would rise from 0.337 to 1.409 bits at 8
drafts. Real tokens are alike, so real gains are smaller; they are measured here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trace_capture.errors import TraceError
from trace_capture.trace import NO_EXPERT, Phase, Trace


class Information(NamedTuple):
    """The counts of experts over gamma + 1 neighbouring tokens; means over MoE layers.

    Attributes:
        gamma: drafts; 0 is decoding.
        windows: stretches of tokens that were counted.
        entropy_bits: of the count of a random expert in a random window.
        signal_to_noise: mean of that count over its standard deviation.
        foresight_bits: what the count tells of whether the token after the window uses the expert (mutual
            information).
        binomial_entropy_bits, binomial_signal_to_noise: were tokens independent and experts alike.
    """

    gamma: int
    windows: int
    entropy_bits: float
    signal_to_noise: float
    foresight_bits: float
    binomial_entropy_bits: float
    binomial_signal_to_noise: float


def speculative_information(trace: Trace, gammas: Sequence[int] = tuple(range(9))) -> list[Information]:
    """The measure for several draft lengths, on the generated tokens of a trace as if every draft had been kept.

    Windows slide by one token and stay within a sequence. Rejected drafts of captured verify passes are left out.

    Args:
        trace: with generated tokens, decoded or verified.
        gammas: draft lengths, each at least 0.

    Raises:
        TraceError: no sequence is long enough for the largest gamma and one token more.
    """
    used = _used(trace)
    result = []
    for gamma in gammas:
        counts, following = _windows(used, gamma + 1)
        if not len(counts):
            raise TraceError(
                f"no sequence of the trace has {gamma + 2} generated tokens in a row, which {gamma} drafts need; "
                "capture more tokens per prompt"
            )
        layers = [_of_layer(counts[:, layer], following[:, layer], gamma + 1) for layer in range(counts.shape[1])]
        entropy_bits, signal_to_noise, foresight_bits = np.mean(layers, axis=0).tolist()
        reference = binomial_information(gamma, trace.shape.top_k / trace.shape.num_experts)
        result.append(Information(gamma, len(counts), entropy_bits, signal_to_noise, foresight_bits, *reference))
    return result


def binomial_information(gamma: int, use_ratio: float) -> tuple[float, float]:
    """Entropy in bits, and mean over standard deviation, of a binomial count of gamma + 1 tokens.

    Args:
        gamma: drafts.
        use_ratio: how often a token uses an expert: top-k over the number of experts.
    """
    tokens = gamma + 1
    shares = [math.comb(tokens, n) * use_ratio**n * (1 - use_ratio) ** (tokens - n) for n in range(tokens + 1)]
    noise = math.sqrt(tokens * use_ratio * (1 - use_ratio))
    return _entropy_bits(np.array(shares)), tokens * use_ratio / noise if noise else math.inf


def _used(trace: Trace) -> list[npt.NDArray[np.uint8]]:
    """Per sequence, which experts each kept generated token used, 0 or 1 [T, L, E]."""
    kept = trace.rows(trace.accepted & (trace.phase != Phase.PREFILL))
    result = []
    for sequence in kept.sequences():
        experts = kept.experts[kept.sequence == sequence]
        experts = experts[(experts != NO_EXPERT).all(axis=(1, 2))].astype(np.int64)
        used = np.zeros((len(experts), experts.shape[1], trace.shape.num_experts), dtype=np.uint8)
        np.put_along_axis(used, experts, 1, axis=2)
        result.append(used)
    return result


def _windows(used: Sequence[npt.NDArray[np.uint8]], tokens: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Counts of every window of `tokens` tokens that has a token behind it, and that token's use, both [N, L, E]."""
    counts, following = [], []
    for one in used:
        total = np.cumsum(one, axis=0, dtype=np.int32)
        total = np.concatenate([np.zeros_like(total[:1]), total])
        counts.append((total[tokens:-1] - total[: -tokens - 1]).astype(np.uint8))
        following.append(one[tokens:])
    if not counts:
        return np.empty((0, 0, 0)), np.empty((0, 0, 0))
    return np.concatenate(counts), np.concatenate(following)


def _of_layer(
    counts: npt.NDArray[np.uint8], following: npt.NDArray[np.uint8], tokens: int
) -> tuple[float, float, float]:
    """Entropy, signal to noise and foresight of one layer's counts [N, E]."""
    pairs = np.bincount((counts.astype(np.int64) * 2 + following).ravel(), minlength=2 * tokens + 2)
    joint = pairs.reshape(tokens + 1, 2) / pairs.sum()
    entropy_bits = _entropy_bits(joint.sum(axis=1))
    foresight_bits = entropy_bits + _entropy_bits(joint.sum(axis=0)) - _entropy_bits(joint.ravel())
    noise = float(counts.std())
    return entropy_bits, float(counts.mean()) / noise if noise else math.inf, foresight_bits


def _entropy_bits(shares: npt.NDArray[np.float64]) -> float:
    present = shares[shares > 0]
    return float(-(present * np.log2(present)).sum()) + 0.0
