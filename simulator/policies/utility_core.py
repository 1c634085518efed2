"""The offload core that also loads by utility: while a pass is drafted, and behind what a pass needs.

Where nothing is loaded by utility the plain core runs, so that switching this off leaves the rest as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulator.policies.core import OffloadCore
from simulator.policies.eviction import Key
from simulator.policies.plans import BEHIND_PRIORITY, DEMAND_PRIORITY, PREFETCH_PRIORITY, UTILITY, Load
from simulator.policies.utility_cache import UtilityCache
from simulator.policies.utility_loads import UtilityLoads


class UtilityCore(OffloadCore):
    """Joins MoE-SpAc's queue (arXiv 2603.09983) with the rest; experts that a predictor names for the next layer
    (Speculating Experts, arXiv 2603.19289) go through the same queue, above all others.

    Args:
        hot: what is asked for by utility.
        args, options: as `OffloadCore`; all cache policies are `UtilityCache`.
    """

    plans_when_drafting = True

    def __init__(self, hot: UtilityLoads, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hot = hot
        self._pools = [policy for policy in self._cache if isinstance(policy, UtilityCache)]

    def drafting_begins(self, window_ns: int) -> tuple[Load, ...]:
        """See `OffloadCore`: the balancer sets tau for the pass to come, and what reaches it is loaded as far as the
        time goes, the most useful first."""
        if self.log is not None:
            self.log.append(("drafting_begins", window_ns))
        self.tally.begin_drafting()
        left_ns = self.hot.balance(window_ns, sum(self._residency.free_bytes), self._places, self._residency.coming())
        loads = tuple(self.hot.plan(self._load_wanted, left_ns, 0))
        if self.log is not None:
            self.log.append(("prefetch", loads))
        return loads

    def layer_routed(self, layer: int, experts: Sequence[int], tokens: Sequence[int] = ()) -> tuple[Key, ...]:
        """See `OffloadCore`."""
        stale = OffloadCore.layer_routed(self, layer, experts, tokens)
        self.hot.routed(layer, experts, tokens, self._places[layer])
        return stale

    def _plan_ahead(self, target: int, predicted: Sequence[int]) -> list[Load]:
        if self._prefill:
            return OffloadCore._plan_ahead(self, target, predicted)
        wanted = self.prefetch.select(target, predicted)[: self._max_prefetch]
        self._unforeseen.foresee(wanted)
        self.hot.name(target, wanted, self._places[target])
        return []

    def _plan_behind(self, loads: list[Load]) -> None:
        if not self._prefill:
            loads += self.hot.plan(self._load_wanted, None, self._residency.num_behind)
        OffloadCore._plan_behind(self, loads)

    def _load_wanted(self, key: Key, level: int | None) -> Load | None:
        """A load of `key` for which only experts below a level leave; any may (None) for what a predictor named."""
        layer, expert = key
        if self._places[layer][expert]:
            return None
        if level is not None:
            reason, priority = UTILITY, BEHIND_PRIORITY
        else:
            reason, priority = "prefetch", PREFETCH_PRIORITY if self.modes[layer] == "hint" else DEMAND_PRIORITY
        pool = self._pools[self._partition_of_layer[layer]]
        everyone = pool.threshold
        pool.threshold = everyone if level is None else level
        loads = self._load(layer, [expert], reason, priority, self._unforeseen)
        pool.threshold = everyone
        return loads[0] if loads else None
