"""Which experts a replay runs: the routed ones, or those that were committed to."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.pass_reader import PassReader
from simulator.policies.config import OffloadConfig
from simulator.policies.eviction import Key
from simulator.policies.prefetch import make_prefetch_policy
from simulator.predictions import predictions_of
from trace_capture.trace import Trace


class Routing(NamedTuple):
    """Experts that every layer of every pass runs, one look-up after the other."""

    experts: npt.NDArray[np.uint16]
    """Of each look-up."""
    lengths: npt.NDArray[np.int64]
    """Look-ups of each layer of each pass [passes, L]."""
    digest: tuple[object, ...]
    """Tells equal routing of one trace."""

    def layers(self) -> npt.NDArray[np.int64]:
        """MoE layer of each look-up."""
        passes, layers = self.lengths.shape
        return np.repeat(np.tile(np.arange(layers), passes), self.lengths.ravel())

    def ids(self, num_experts: int) -> npt.NDArray[np.int64]:
        """One number for each look-up: layer times E plus expert."""
        return self.layers() * num_experts + self.experts

    def lookups(self) -> Iterator[Key]:
        """All look-ups in order."""
        return zip(self.layers().tolist(), self.experts.tolist(), strict=True)


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
        return _flattened(map(routed.read, trace.passes), trace.shape.num_moe_layers, ())
    predict = predictions_of(trace, policy)
    executed = (executed_experts(routed.read(item), predict(item), modes) for item in trace.passes)
    digest = policy.prediction, config.prefetch.setting, *modes
    return _flattened(executed, trace.shape.num_moe_layers, digest)


def _flattened(passes: Iterable[list[list[int]]], layers: int, digest: tuple[object, ...]) -> Routing:
    experts, lengths = array("H"), array("q")
    for one_pass in passes:
        experts.extend(chain.from_iterable(one_pass))
        lengths.extend(map(len, one_pass))
    return Routing(np.array(experts, dtype=np.uint16), np.array(lengths, dtype=np.int64).reshape(-1, layers), digest)
