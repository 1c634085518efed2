"""Which experts a replay runs: the routed ones, or those that were committed to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from simulator.pass_reader import PassReader
from simulator.policies.cache import Key
from simulator.policies.config import OffloadConfig
from simulator.policies.prefetch import make_prefetch_policy
from simulator.predictions import predictions_of
from trace_capture.trace import Trace


class Routing(NamedTuple):
    """Experts that every layer of every pass runs [passes][L], and a name that tells equal ones of a trace."""

    experts: list[list[list[int]]]
    digest: tuple[object, ...]

    def lookups(self) -> Iterator[Key]:
        """All look-ups in order."""
        return (
            (layer, expert) for layers in self.experts for layer, experts in enumerate(layers) for expert in experts
        )


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
    policy = make_prefetch_policy(config.prefetch.source, config.prefetch.setting)
    routed = PassReader(trace)
    if policy.prediction is None or "commit" not in modes:
        return Routing(list(map(routed, trace.passes)), ())
    predict = predictions_of(trace, policy)
    experts = [executed_experts(routed(item), predict(item), modes) for item in trace.passes]
    return Routing(experts, (policy.prediction, config.prefetch.setting, *modes))
