"""Whether the routing of today's prompts is unlike that of the trace that a configuration was tuned on.

Two figures are compared, both means over generated tokens and layers, so that their expectation does not depend on how
many tokens there are:

popularity: the trace's share of load of the experts that a token uses, over an even share. It falls when other experts
are asked for than those that were hot in the trace. For the trace itself each part (a sequence, or a piece of one where
there are fewer than four) is held against the load of all other parts.
overlap: the share of a token's experts that the token before it used, which a cache lives on.

The measured means over m prompts are unlike those over S parts of the trace when they are farther apart than
t * s * sqrt(1/m + 1/S) * sqrt(max(1, tokens per part / tokens per prompt)): s is the standard deviation between parts,
t Student's quantile at 99.5 % with S - 1 degrees of freedom, and the last factor allows for prompts shorter than the
parts, whose means vary more. So each figure gives a false alarm in about 1 % of cases where parts are independent and
about normal; pieces of one sequence are not independent, and alarm more often.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from simulator.policies.routing_reference import PARTS, RoutingReference
from trace_capture.statistics import GENERATING
from trace_capture.trace import NO_EXPERT, Trace

_FEWEST_PARTS = 4
_STUDENT_995 = ((1, 63.66), (2, 9.925), (3, 5.841), (4, 4.604), (5, 4.032), (6, 3.707), (7, 3.499), (8, 3.355)) + (
    (9, 3.250), (10, 3.169), (15, 2.947), (20, 2.845), (30, 2.750), (60, 2.660), (10**9, 2.576),
)  # fmt: skip
"""Degrees of freedom and the quantile at 99.5 %; between them that of the fewer."""


def routing_reference(trace: Trace) -> RoutingReference | None:
    """The reference of a trace; None where it generated too few tokens for at least two parts."""
    rows = trace.rows(trace.accepted & np.isin(trace.phase, list(GENERATING)))
    parts = _parts(rows)
    if len(parts) < 2:
        return None
    shape = trace.shape
    counts = np.zeros((len(parts), shape.num_moe_layers, shape.num_experts))
    for number, places in enumerate(parts):
        for layer in range(shape.num_moe_layers):
            ids = rows.experts[places, layer].ravel()
            counts[number, layer] = np.bincount(ids[ids != NO_EXPERT], minlength=shape.num_experts)
    total = counts.sum(axis=0)
    popularity = []
    for mine in counts:
        others = total - mine
        shares = others * shape.num_experts / np.maximum(1, others.sum(axis=1, keepdims=True))
        popularity.append(float((shares * mine).sum() / max(1, mine.sum())))
    overlap = [_overlap(rows, places) for places in parts]
    load = np.rint(total * PARTS / np.maximum(1, total.sum(axis=1, keepdims=True))).astype(int)
    return RoutingReference(
        load=tuple(" ".join(map(str, layer)) for layer in load.tolist()),
        parts=len(parts),
        part_tokens=fmean(len(places) for places in parts),
        popularity=fmean(popularity),
        popularity_deviation=stdev(popularity),
        overlap=fmean(overlap),
        overlap_deviation=stdev(overlap),
    )


def _parts(rows: Trace) -> list[np.ndarray]:
    """Places of rows by sequence, cut into pieces where there are few sequences; of two tokens at least."""
    sequences = rows.sequences()
    pieces = -(-_FEWEST_PARTS // max(1, len(sequences)))
    places = [np.flatnonzero(rows.sequence == sequence) for sequence in sequences]
    return [piece for one in places for piece in np.array_split(one, pieces) if len(piece) >= 2]


def _overlap(rows: Trace, places: np.ndarray) -> float:
    """Mean over neighbouring tokens and layers."""
    now, before = rows.experts[places[1:]], rows.experts[places[:-1]]
    both = (now != NO_EXPERT) & (before != NO_EXPERT).any(axis=2, keepdims=True)
    same = (now[..., :, None] == before[..., None, :]).any(axis=-1) & both
    return float(same.sum() / max(1, both.sum()))


class RoutingWatch:
    """Sums up the routing of a live run, prompt by prompt; cheap enough for every layer of every token.

    Args:
        reference: of the tuning trace.
    """

    def __init__(self, reference: RoutingReference) -> None:
        self.reference = reference
        self._shares = reference.shares()
        self._last: list[frozenset[int]] = [frozenset()] * len(self._shares)
        self._sums: list[list[float]] = []
        """Per prompt: popularity, experts counted, experts shared with the token before, experts compared, tokens."""

    def begin_prompt(self) -> None:
        """Another prompt is about to be read."""
        self._last = [frozenset()] * len(self._shares)
        self._sums.append([0.0, 0.0, 0.0, 0.0, 0.0])

    def routed(self, layer: int, experts: Sequence[int], is_next: bool) -> None:
        """One generated token was routed.

        Args:
            layer: MoE layer index.
            experts: the router's choice; ids beyond the layer's experts are left out.
            is_next: whether it follows the token seen before; not so in verify passes, whose drafts may be rejected.
        """
        shares = self._shares[layer]
        known = frozenset(expert for expert in experts if expert < len(shares))
        sums = self._sums[-1]
        sums[0] += sum(shares[expert] for expert in known)
        sums[1] += len(known)
        if is_next and self._last[layer]:
            sums[2] += len(known & self._last[layer])
            sums[3] += len(known)
        self._last[layer] = known if is_next else frozenset()
        if layer == 0:
            sums[4] += 1

    def drift(self) -> RoutingDrift | None:
        """What was seen beside the reference; None where no token was generated."""
        sums = [one for one in self._sums if one[1]]
        if not sums:
            return None
        compared = [one for one in sums if one[3]]
        return RoutingDrift(
            reference=self.reference,
            prompts=len(sums),
            prompt_tokens=fmean(one[4] for one in sums),
            popularity=fmean(one[0] / one[1] for one in sums),
            overlap=fmean(one[2] / one[3] for one in compared) if compared else None,
        )


@dataclass(frozen=True)
class RoutingDrift:
    """Routing of a run beside that of the tuning trace.

    Attributes:
        reference: of the trace.
        prompts: m, those that generated.
        prompt_tokens: generated tokens each, mean.
        popularity, overlap: see the module; overlap None where every pass verified drafts.
    """

    reference: RoutingReference
    prompts: int
    prompt_tokens: float
    popularity: float
    overlap: float | None

    @property
    def popularity_margin(self) -> float:
        """How far `popularity` may be from the trace's."""
        return self._margin(self.reference.popularity_deviation)

    @property
    def overlap_margin(self) -> float:
        """How far `overlap` may be from the trace's."""
        return self._margin(self.reference.overlap_deviation)

    @property
    def is_unlike(self) -> bool:
        """Whether a figure is farther from the trace's than the trace's own variation explains."""
        reference = self.reference
        far = abs(self.popularity - reference.popularity) > self.popularity_margin
        return far or (self.overlap is not None and abs(self.overlap - reference.overlap) > self.overlap_margin)

    def text(self) -> str:
        """One sentence with the numbers."""
        reference = self.reference
        verb = "is unlike" if self.is_unlike else "is like"
        popular = f"popularity of the experts used {self.popularity:.2f} (there {reference.popularity:.2f} +- "
        popular += f"{self.popularity_margin:.2f})"
        overlap = ""
        if self.overlap is not None:
            there = f"there {100 * reference.overlap:.1f} % +- {100 * self.overlap_margin:.1f}"
            overlap = f", overlap of neighbouring tokens {100 * self.overlap:.1f} % ({there})"
        return f"routing of these prompts {verb} that of the tuning trace: {popular}{overlap}"

    def as_json(self) -> dict[str, float | bool | None]:
        """For programs."""
        reference = self.reference
        return {
            "is_unlike": self.is_unlike,
            "popularity": self.popularity,
            "trace_popularity": reference.popularity,
            "popularity_margin": self.popularity_margin,
            "overlap": self.overlap,
            "trace_overlap": reference.overlap,
            "overlap_margin": self.overlap_margin,
        }

    def _margin(self, deviation: float) -> float:
        parts = self.reference.parts
        degrees = [known for known, _ in _STUDENT_995]
        quantile = _STUDENT_995[max(0, bisect_right(degrees, parts - 1) - 1)][1]
        shorter = max(1.0, self.reference.part_tokens / self.prompt_tokens)
        return quantile * deviation * math.sqrt((1 / self.prompts + 1 / parts) * shorter)
