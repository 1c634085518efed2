"""What becomes of the times of passes: the figures of a run, of which a pass leaves no more than its length behind."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from simulator.cost_model import TERMS
from simulator.policies.plans import Counters
from simulator.stalls import STALL_PARTS
from trace_capture.errors import TraceError
from trace_capture.run import Metrics, RunPass
from trace_capture.trace import Phase


@dataclass
class PassTimes:
    """Duration of one pass and its parts, by `TERMS`."""

    phase: Phase
    sequence: int
    tokens: int
    output_tokens: int
    """Tokens that it adds to the output; see `Trace.output_tokens`."""
    terms_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TERMS, 0))
    stall_ns: dict[str, int] = field(default_factory=dict)
    """Parts of the term `stall` by `STALL_PARTS`, where they were asked for."""
    dense_ns: dict[str, int] = field(default_factory=dict)
    """Parts of the term `dense`, where they were asked for and the costs know them."""

    @property
    def total_ns(self) -> int:
        """The pass from its start to its end."""
        return sum(self.terms_ns.values())


class PassSummary:
    """Adds passes up as they end.

    Args:
        warmup_passes: so many decode passes at the start are left out of all figures.
        passes: to begin with.
    """

    def __init__(self, warmup_passes: int = 0, passes: Iterable[PassTimes] = ()) -> None:
        self._warmup_passes = warmup_passes
        self._prefill_ns = 0
        self._decode_ns = array("q")
        self._outputs = array("q")
        """Output tokens of the passes in `_decode_ns`."""
        self._terms_ns: dict[str, int] = dict.fromkeys(TERMS, 0)
        self._stall_ns: dict[str, int] = {}
        self._dense_ns: dict[str, int] = {}
        self._num_decode = 0
        self._passes: list[RunPass] = []
        for times in passes:
            self.add(times)

    def add(self, times: PassTimes) -> None:
        """The next pass."""
        self._passes.append(RunPass(int(times.phase), times.tokens, times.sequence, times.output_tokens))
        if times.phase == Phase.PREFILL:
            self._prefill_ns += times.total_ns
            return
        self._num_decode += 1
        if self._num_decode <= self._warmup_passes:
            return
        self._decode_ns.append(times.total_ns)
        self._outputs.append(times.output_tokens)
        for sums, parts in (
            (self._terms_ns, times.terms_ns),
            (self._stall_ns, times.stall_ns),
            (self._dense_ns, times.dense_ns),
        ):
            for name, value in parts.items():
                sums[name] = sums.get(name, 0) + value

    @property
    def decode_ns(self) -> npt.NDArray[np.int64]:
        """Times of the decode passes behind the warm-up."""
        return np.array(self._decode_ns, dtype=np.int64)

    @property
    def passes(self) -> tuple[RunPass, ...]:
        """All passes, the warm-up among them."""
        return tuple(self._passes)

    def metrics(self, prefill: Counters, decode: Counters, link_busy_ns: float = 0.0) -> Metrics:
        """The figures of the run.

        Args:
            prefill, decode: what its core counted, the warm-up not among it.
            link_busy_ns: time of the copies of the counted decode passes.

        Raises:
            TraceError: the warm-up leaves no decode pass.
        """
        if self._warmup_passes and self._warmup_passes >= self._num_decode:
            raise TraceError(
                f"a warm-up of {self._warmup_passes} passes leaves nothing of {self._num_decode} decode passes; make "
                "it shorter"
            )
        first = [item for item in self._passes if item.phase == Phase.PREFILL]
        later = [item for item in self._passes if item.phase != Phase.PREFILL][self._warmup_passes :]
        verify = [item for item in later if item.phase == Phase.VERIFY]
        decode_ns, outputs = self.decode_ns, np.array(self._outputs, dtype=np.int64)
        tokens, total_ns = int(outputs.sum()), int(decode_ns.sum())
        per_token_ns = np.repeat(decode_ns / outputs, outputs)
        lookups = prefill.lookups + decode.lookups
        hits = prefill.hits + decode.hits
        return Metrics(
            prefill_tokens=sum(item.tokens for item in first),
            decode_tokens=tokens,
            drafted_tokens=sum(item.tokens - 1 for item in verify),
            accepted_drafts=sum(item.output_tokens - 1 for item in verify),
            ttft_ms=self._prefill_ns / len({item.sequence for item in first}) / 1e6 if first else 0.0,
            tpot_ms=total_ns / tokens / 1e6 if tokens else 0.0,
            tpot_p90_ms=float(np.percentile(per_token_ns, 90)) / 1e6 if tokens else 0.0,
            tpot_terms_ms={name: self._terms_ns[name] / tokens / 1e6 if tokens else 0.0 for name in TERMS},
            stall_parts_ms=_parts_ms(self._stall_ns, STALL_PARTS, tokens),
            dense_parts_ms=_parts_ms(self._dense_ns, (), tokens),
            link_busy_ms=link_busy_ns / tokens / 1e6 if tokens else 0.0,
            tokens_per_s=tokens / total_ns * 1e9 if total_ns else 0.0,
            lookups=lookups,
            hits=hits,
            late_prefetches=prefill.late + decode.late,
            hit_rate=hits / lookups if lookups else 0.0,
            decode_hit_rate=decode.hits / decode.lookups if decode.lookups else 0.0,
            loads=prefill.loads + decode.loads,
            demand_loads=prefill.demand_loads + decode.demand_loads,
            prefetch_loads=prefill.prefetch_loads + decode.prefetch_loads,
            prefetch_used=prefill.prefetch_used + decode.prefetch_used,
            cpu_runs=prefill.cpu_runs + decode.cpu_runs,
            admission_loads=prefill.admission_loads + decode.admission_loads,
            evictions=prefill.evictions + decode.evictions,
            bytes_loaded=prefill.bytes_loaded + decode.bytes_loaded,
            bytes_per_token=decode.bytes_loaded / tokens if tokens else 0.0,
        )


def _parts_ms(sums_ns: dict[str, int], names: Sequence[str], tokens: int) -> dict[str, float]:
    """Parts of a term per token, those of `names` also where there are none of them; empty where the term was not
    told apart."""
    if not sums_ns:
        return {}
    return {name: sums_ns.get(name, 0) / tokens / 1e6 for name in dict.fromkeys([*names, *sums_ns])}
