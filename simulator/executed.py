"""Which experts a replay runs: the routed ones, or those that were committed to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simulator.policies.config import OffloadConfig
from simulator.policies.prefetch import make_prefetch_policy
from trace_capture.trace import Phase, Trace


class Routing(NamedTuple):
    """Experts that every layer of every pass runs [passes][L], and a name that tells equal ones of a trace."""

    experts: list[list[list[int]]]
    digest: tuple[str, ...]


def executed_experts(routed: list[list[int]], predicted: Sequence[list[int]], modes: Sequence[str]) -> list[list[int]]:
    """Experts that each layer of a pass runs: the routed ones, or in mode `commit` those predicted for it.

    The trace's predictions were made on exact routing; live, the errors of committed layers compound.
    """
    if not predicted or "commit" not in modes:
        return routed
    chosen = zip(routed, predicted, modes, strict=True)
    return [guess if mode == "commit" and guess else truth for truth, guess, mode in chosen]


def executed_routing(trace: Trace, config: OffloadConfig) -> Routing:
    """What a replay of `trace` under `config` runs."""
    modes = config.prefetch.modes(trace.shape.num_moe_layers)
    source = make_prefetch_policy(config.prefetch.source).prediction
    if source is None or "commit" not in modes:
        return Routing([trace.pass_experts(item) for item in trace.passes], ())
    experts = []
    for item in trace.passes:
        predicted = [] if item.phase == Phase.PREFILL else trace.pass_experts(item, source)
        experts.append(executed_experts(trace.pass_experts(item), predicted, modes))
    return Routing(experts, (source, *modes))
