"""The cost model as a replay asks it: the same questions in every layer of every pass, so answers are remembered."""

from __future__ import annotations

from functools import lru_cache

from simulator.cost_model import CostModel
from trace_capture.model_shape import ModelShape


class Durations:
    """Whole nanoseconds by what they depend on; see the methods of `CostModel` and `ComputeCosts` of these names.

    Args:
        costs: of the machine.
        shape: of the model.

    Attributes:
        copy_ns, issue_ns: of one expert, by its bytes.
    """

    def __init__(self, costs: CostModel, shape: ModelShape) -> None:
        self._model = costs
        self._compute = compute = costs.compute
        sizes = set(shape.expert_bytes)
        self._layers = shape.num_moe_layers
        self._experts = shape.num_experts + 1
        self.dense_of_layers_ns = compute.dense_of_layers_ns
        self.dense_parts_ns = costs.dense_parts_ns
        self.overhead_ns = compute.overhead_ns
        self.sharing = costs.sharing
        self.plan_ns = costs.plan_ns
        self.decide_utility_ns = costs.decide_utility_ns
        self.verify_overhead_ns = costs.verify_overhead_ns
        self.copy_ns = {size: costs.copy_ns(size) for size in sizes}
        self.issue_ns = {size: costs.load_issue_ns(size) for size in sizes}
        self.cpu_experts_ns = lru_cache(maxsize=None)(compute.cpu_experts_ns)
        self.contention = lru_cache(maxsize=None)(costs.contention)
        self.drafting_ns = lru_cache(maxsize=None)(costs.drafting_ns)
        self._constant_wakeup_ns = costs.wakeup_ns(0) if costs.has_constant_wakeup else -1
        self._decide_ns: list[int] = []
        """By the number of loads, as far as it was asked for."""
        self._experts_ns: dict[int, int] = {}
        """By layer, tokens, experts and active ones, in one number."""

    def predict_ns(self, source: str) -> list[int]:
        """Predicting the experts of the layer after each [L], by a prefetch source."""
        return [self._compute.predict_ns(layer, source) for layer in range(self._layers)]

    def wakeup_ns(self, stall_ns: int) -> int:
        """Time lost after a stall; not remembered by its length, since there is no end of different stalls."""
        if self._constant_wakeup_ns >= 0:
            return self._constant_wakeup_ns
        return self._model.wakeup_ns(stall_ns)

    def decide_ns(self, loads: int) -> int:
        """By the number of loads."""
        while len(self._decide_ns) <= loads:
            self._decide_ns.append(self._compute.decide_ns(len(self._decide_ns)))
        return self._decide_ns[loads]

    def submit_ns(self, loads: int) -> int:
        """What planning so many loads adds to a decision."""
        return self.decide_ns(loads) - self.decide_ns(0)

    def experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """`experts` of the `active` ones of a layer on the device."""
        asked = ((tokens * self._experts + active) * self._experts + experts) * self._layers + layer
        known = self._experts_ns.get(asked)
        if known is None:
            self._experts_ns[asked] = known = self._compute.experts_ns(layer, tokens, experts, active)
        return known
