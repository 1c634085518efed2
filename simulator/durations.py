"""The cost model as a replay asks it: the same questions in every layer of every pass, so answers are remembered."""

from __future__ import annotations

from functools import lru_cache

from simulator.cost_model import CostModel


class Durations:
    """Whole nanoseconds by what they depend on; see the methods of `CostModel` and `ComputeCosts` of these names."""

    def __init__(self, costs: CostModel) -> None:
        compute = costs.compute
        self.dense_ns = compute.dense_ns
        self.dense_parts_ns = costs.dense_parts_ns
        self.overhead_ns = compute.overhead_ns
        self.sharing = costs.sharing
        self.plan_ns = costs.plan_ns
        self.decide_utility_ns = costs.decide_utility_ns
        self.verify_overhead_ns = costs.verify_overhead_ns
        self.wakeup_ns = costs.wakeup_ns  # not remembered: there is no end of different stalls
        self.copy_ns = lru_cache(maxsize=None)(costs.copy_ns)
        self.issue_ns = lru_cache(maxsize=None)(costs.load_issue_ns)
        self.decide_ns = lru_cache(maxsize=None)(compute.decide_ns)
        self.submit_ns = lru_cache(maxsize=None)(lambda loads: compute.decide_ns(loads) - compute.decide_ns(0))
        """What planning so many loads adds to a decision."""
        self.predict_ns = lru_cache(maxsize=None)(compute.predict_ns)
        self.experts_ns = lru_cache(maxsize=None)(compute.experts_ns)
        self.cpu_experts_ns = lru_cache(maxsize=None)(compute.cpu_experts_ns)
        self.contention = lru_cache(maxsize=None)(costs.contention)
        self.drafting_ns = lru_cache(maxsize=None)(costs.drafting_ns)
