"""Verify passes made out of a trace that was decoded token by token: what would speculative decoding have looked like?

The tokens of each sequence stay what they are and are grouped as a draft model with a given acceptance rate would have
them verified. What a plain trace cannot know is where a *rejected* draft would have been routed. The assumption, which
every report on such a trace repeats: it is routed like another token of the trace, picked at random, with the locality
of that token carried over. Where the donor shares an expert with the token before it, the rejected draft shares the
expert of the same rank with the token before *it*; the donor's other experts are taken as they are. So load and overlap
of neighbours are those of the trace, layer by layer, and nothing of the tokens to come leaks into a rejected draft.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trace_capture.errors import ConfigError, TraceError
from trace_capture.trace import COLUMNS, NO_EXPERT, DraftSettings, Phase, Trace
from trace_capture.trace_checks import check_trace

KIND = "rewindow"
"""`DraftSettings.kind` of such a trace."""

Ids = npt.NDArray[np.int64]
Rows = dict[str, npt.NDArray[Any]]


def rewindow(trace: Trace, gamma: int, acceptance_ratio: float, seed: int = 0, draft_bytes: int = 0) -> Trace:
    """The same tokens, verified up to gamma drafts at a time.

    A pass holds the token that is certain and min(gamma, tokens left) drafts. Each draft is accepted with probability
    `acceptance_ratio` as long as all before it were (Leviathan et al., arXiv 2211.17192), so a pass emits one to
    gamma + 1 tokens. Rejected drafts have token id -1. Prefill passes stay. Equal arguments give equal traces.

    Args:
        trace: decode passes, or verify passes, of which the accepted rows are taken.
        gamma: drafts per pass; 0 gives decode passes.
        acceptance_ratio: of single drafts, 0..1.
        seed: of the random generator.
        draft_bytes: weights of the draft model, which the time of drafting follows from; 0 for none.

    Raises:
        ConfigError: gamma is negative or the ratio is not in 0..1.
        TraceError: no sequence has two generated tokens that all layers routed.
    """
    if gamma < 0:
        raise ConfigError(f"gamma is {gamma}; give the drafts per verify pass, 0 for none")
    if not 0 <= acceptance_ratio <= 1:
        raise ConfigError(f"the acceptance ratio is {acceptance_ratio}; give a share from 0 to 1")
    kept = trace.rows(trace.accepted)
    donors = _Donors(kept, np.random.default_rng([seed, 1]))
    random = np.random.default_rng([seed, 0])
    passes: list[tuple[Phase, Rows]] = []
    for sequence in kept.sequences():
        mine = kept.sequence == sequence
        for item in kept.rows(mine & (kept.phase == Phase.PREFILL)).passes:
            rows = _columns(kept.rows(mine & (kept.phase == Phase.PREFILL)), item.start, item.stop)
            passes.append((Phase.PREFILL, rows))
        stream = kept.rows(mine & (kept.phase != Phase.PREFILL))
        passes += _verify_passes(stream, gamma, acceptance_ratio, random, donors)
    result = _joined(trace, passes, {"gamma": gamma, "acceptance_ratio": acceptance_ratio, "seed": seed}, draft_bytes)
    check_trace(result, where="re-windowed trace")
    return result


def _verify_passes(
    stream: Trace, gamma: int, acceptance_ratio: float, random: np.random.Generator, donors: _Donors
) -> list[tuple[Phase, Rows]]:
    """The generated tokens of one sequence in passes."""
    passes = []
    start = 0
    while start < stream.num_tokens:
        drafts = min(gamma, stream.num_tokens - start - 1)
        refused = np.flatnonzero(random.random(drafts) >= acceptance_ratio)
        accepted = int(refused[0]) if len(refused) else drafts
        rows = _columns(stream, start, start + accepted + 1)
        if accepted < drafts:
            rows = donors.add_rejected(rows, drafts - accepted)
        passes.append((Phase.VERIFY if drafts else Phase.DECODE, rows))
        start += accepted + 1
    return passes


class _Donors:
    """Tokens of the trace that lend their routing to rejected drafts."""

    def __init__(self, kept: Trace, random: np.random.Generator) -> None:
        self._kept = kept
        self._random = random
        later = np.flatnonzero((np.diff(kept.sequence) == 0) & (kept.phase[1:] != Phase.PREFILL)) + 1
        routed = (kept.experts != NO_EXPERT).all(axis=(1, 2))
        self._places = later[routed[later] & routed[later - 1]]
        if not len(self._places):
            raise TraceError(
                "the trace has no generated token that follows another and that all layers routed; verify passes "
                "cannot be made of it"
            )

    def add_rejected(self, rows: Rows, count: int) -> Rows:
        """`rows` of a pass with `count` rejected drafts behind them."""
        made: list[Rows] = [rows]
        for place in self._random.choice(self._places, size=count):
            before = made[-1]["experts"][-1].astype(np.int64)
            made.append(self._row(int(place), before, made[-1]))
        return {name: np.concatenate([one[name] for one in made]) for name in rows}

    def _row(self, place: int, before: Ids, last: Rows) -> Rows:
        """One rejected draft, routed like the token at `place` of the trace."""
        kept = self._kept
        donor, donor_before = (kept.experts[at].astype(np.int64) for at in (place, place - 1))
        experts = self._carried_over(donor, donor_before, before)
        rows = _columns(kept, place, place + 1)
        rows["experts"] = experts[None].astype(np.uint16)
        for name in kept.predicted:
            guessed = kept.predicted[name][place].astype(np.int64)
            rows[_PREDICTED + name] = self._renamed(guessed, donor, experts)[None].astype(np.uint16)
        rows["sequence"] = last["sequence"][-1:]
        rows["position"] = last["position"][-1:] + 1
        rows["token_id"] = np.full(1, -1, dtype=np.int32)
        rows["accepted"] = np.zeros(1, dtype=np.bool_)
        return rows

    def _carried_over(self, donor: Ids, donor_before: Ids, before: Ids) -> Ids:
        """The donor's experts [L, K]; those it shares with its predecessor become those of equal rank in `before`."""
        same = donor[:, :, None] == donor_before[:, None, :]
        shared = same.any(axis=2)
        experts = np.where(shared, np.take_along_axis(before, same.argmax(axis=2), axis=1), donor)
        clash = ~shared & (donor[:, :, None] == before[:, None, :]).any(axis=2)
        for layer, rank in np.argwhere(clash).tolist():
            experts[layer, rank] = self._other(layer, {*experts[layer].tolist()}, {*before[layer].tolist()})
        return experts

    def _renamed(self, guessed: Ids, donor: Ids, experts: Ids) -> Ids:
        """The donor's prediction [L, P] with the same ids right and wrong as the donor's were."""
        same = guessed[:, :, None] == donor[:, None, :]
        right = same.any(axis=2)
        renamed = np.where(right, np.take_along_axis(experts, same.argmax(axis=2), axis=1), guessed)
        wrong = ~right & (guessed != NO_EXPERT) & (guessed[:, :, None] == experts[:, None, :]).any(axis=2)
        for layer, rank in np.argwhere(wrong).tolist():
            renamed[layer, rank] = self._other(layer, {*renamed[layer].tolist()}, {*experts[layer].tolist()})
        return renamed

    def _other(self, layer: int, taken: set[int], avoided: set[int]) -> int:
        """An expert of a random token in this layer that is not taken, and not avoided where that can be had."""
        ids = self._kept.experts[self._random.choice(self._places, size=8), layer].ravel().tolist()
        everyone = self._random.permutation(self._kept.shape.num_experts).tolist()
        free = [expert for expert in ids + everyone if expert not in taken]
        return int(next((expert for expert in free if expert not in avoided), free[0] if free else everyone[0]))


_PREDICTED = "predicted:"


def _columns(trace: Trace, start: int, stop: int) -> Rows:
    rows: Rows = {name: getattr(trace, name)[start:stop] for name in COLUMNS}
    return rows | {_PREDICTED + name: ids[start:stop] for name, ids in trace.predicted.items()}


def _joined(trace: Trace, passes: list[tuple[Phase, Rows]], options: dict[str, Any], draft_bytes: int) -> Trace:
    """One trace of all passes, numbered from 0."""
    joined = {name: np.concatenate([rows[name] for _, rows in passes]) for name in passes[0][1]}
    lengths = [len(rows["sequence"]) for _, rows in passes]
    joined["pass_id"] = np.repeat(np.arange(len(passes), dtype=np.int32), lengths)
    joined["phase"] = np.repeat(np.array([phase for phase, _ in passes], dtype=np.uint8), lengths)
    draft = DraftSettings(kind=KIND, gamma=options["gamma"], weight_bytes=draft_bytes) if options["gamma"] else None
    info = trace.info.model_copy(update={"draft": draft, "options": trace.info.options | {KIND: options}})
    predicted = {name: joined.pop(_PREDICTED + name) for name in trace.predicted}
    return replace(trace, info=info, predicted=predicted, **joined)


class AcceptanceCounts(NamedTuple):
    """What verify passes came to.

    Attributes:
        passes: verify passes.
        drafted: drafts in them.
        accepted: drafts that were kept.
    """

    passes: int
    drafted: int
    accepted: int

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens per verify pass: the accepted drafts and the token that the pass itself gives."""
        return (self.accepted + self.passes) / self.passes if self.passes else 0.0


def acceptance_counts(trace: Trace) -> AcceptanceCounts:
    """How many drafts the verify passes of a trace had and kept."""
    verify = trace.phase == Phase.VERIFY
    passes = len(np.unique(trace.pass_id[verify]))
    return AcceptanceCounts(passes, int(verify.sum()) - passes, int((verify & trace.accepted).sum()) - passes)
