"""Verify passes made out of a trace that was decoded token by token: what would speculative decoding have looked like?

The tokens of each sequence stay what they are and are grouped as a draft model with a given acceptance rate would have
them verified. What a plain trace cannot know is where *rejected* drafts would have been routed. The assumption, which
every report on such a trace repeats: they are routed like a stretch of earlier tokens of the same sequence. Of some
stretches picked at random that one is taken whose first token shares with the token before the rejected drafts most
nearly as many experts as neighbours share on average. So neighbours and the tokens of one sequence are as alike as they
are in the trace, and nothing of the tokens to come leaks into a rejected draft.
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
CANDIDATES = 32
"""Stretches that are looked at for each pass with rejected drafts."""

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
            rows = donors.add_rejected(rows, drafts - accepted, gamma)
        passes.append((Phase.VERIFY if drafts else Phase.DECODE, rows))
        start += accepted + 1
    return passes


class _Donors:
    """Stretches of the trace that lend their routing to rejected drafts."""

    def __init__(self, kept: Trace, random: np.random.Generator) -> None:
        self._kept = kept
        self._random = random
        usable = (kept.phase != Phase.PREFILL) & (kept.experts != NO_EXPERT).all(axis=(1, 2))
        follows = usable[1:] & usable[:-1] & (np.diff(kept.sequence) == 0)
        later = np.flatnonzero(follows) + 1
        if not len(later):
            raise TraceError(
                "the trace has no generated token that follows another and that all layers routed; verify passes "
                "cannot be made of it"
            )
        self._overlap = float(np.mean(_shared_ratio(kept.experts[later], kept.experts[later - 1])))
        """Share of experts that neighbours have in common, mean over the trace."""
        ends = np.append(np.flatnonzero(~follows), len(usable) - 1)
        rows = np.arange(len(usable))
        self._reach = np.where(usable, ends[np.searchsorted(ends, rows)] - rows + 1, 0)
        """How many usable tokens in a row begin at each row."""

    def add_rejected(self, rows: Rows, count: int, gamma: int) -> Rows:
        """`rows` of a pass with `count` rejected drafts behind them."""
        places = self._places(int(rows["sequence"][0]), int(rows["position"][0]), count, gamma)
        candidates = self._random.choice(places, size=CANDIDATES)
        overlap = _shared_ratio(self._kept.experts[candidates], rows["experts"][-1])
        start = int(candidates[np.argmin(np.abs(overlap - self._overlap))])
        drafts = _columns(self._kept, start, start + count)
        drafts["sequence"] = np.full(count, rows["sequence"][-1], dtype=np.int32)
        drafts["position"] = rows["position"][-1] + np.arange(1, count + 1, dtype=np.int32)
        drafts["token_id"] = np.full(count, -1, dtype=np.int32)
        drafts["accepted"] = np.zeros(count, dtype=np.bool_)
        return {name: np.concatenate([rows[name], drafts[name]]) for name in rows}

    def _places(self, sequence: int, position: int, count: int, gamma: int) -> npt.NDArray[np.int64]:
        """Where stretches of `count` tokens begin that lie before a position of a sequence; where these are few,
        anywhere but in the pass that begins there; in a trace of a few tokens, wherever there are any."""
        kept, long_enough = self._kept, self._reach >= count
        same = kept.sequence == sequence
        earlier = np.flatnonzero(long_enough & same & (kept.position + count <= position))
        if len(earlier) >= CANDIDATES:
            return earlier
        beside = (kept.position + count <= position) | (kept.position > position + gamma)
        elsewhere = np.flatnonzero(long_enough & (~same | beside))
        return elsewhere if len(elsewhere) else np.flatnonzero(long_enough)


def _shared_ratio(ids: npt.NDArray[np.uint16], others: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
    """Share of `ids` [N, L, K] that is among `others` [N, L, K] or [L, K], mean over layers, float64 [N]."""
    return np.asarray((ids[..., :, None] == others[..., None, :]).any(axis=-1).mean(axis=(-2, -1)))


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
