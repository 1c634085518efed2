"""The cost model as a replay asks it: the same questions in every layer of every pass, so answers are remembered."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from simulator.cost_model import CostModel
from trace_capture.model_shape import ModelShape

Question = TypeVar("Question")


class Remembered(dict[Question, int]):
    """Answers of a cost function by its one argument. A look-up takes a quarter of a call to `lru_cache`.

    Args:
        work_out: the function.
    """

    def __init__(self, work_out: Callable[[Question], int]) -> None:
        super().__init__()
        self._work_out = work_out

    def __missing__(self, asked: Question) -> int:
        self[asked] = answer = self._work_out(asked)
        return answer


class Durations:
    """Whole nanoseconds by what they depend on; see the methods of `CostModel` and `ComputeCosts` of these names.

    Attributes:
        copy_ns, issue_ns: of one expert, by its bytes.
        decide_ns: by the number of loads.
        submit_ns: what planning so many loads adds to a decision.
        experts_ns: by (layer, tokens, experts, active).
    """

    def __init__(self, costs: CostModel, shape: ModelShape) -> None:
        compute = costs.compute
        sizes = set(shape.expert_bytes)
        self._layers = range(shape.num_moe_layers)
        self._predict_ns = compute.predict_ns
        self.dense_of_layers_ns = compute.dense_of_layers_ns
        self.dense_parts_ns = costs.dense_parts_ns
        self.overhead_ns = compute.overhead_ns
        self.sharing = costs.sharing
        self.plan_ns = costs.plan_ns
        self.decide_utility_ns = costs.decide_utility_ns
        self.verify_overhead_ns = costs.verify_overhead_ns
        self.wakeup_ns = costs.wakeup_ns  # not remembered: there is no end of different stalls
        self.copy_ns = {size: costs.copy_ns(size) for size in sizes}
        self.issue_ns = {size: costs.load_issue_ns(size) for size in sizes}
        self.decide_ns = Remembered(compute.decide_ns)
        self.submit_ns = Remembered[int](lambda loads: compute.decide_ns(loads) - compute.decide_ns(0))
        self.experts_ns = Remembered[tuple[int, int, int, int]](lambda asked: compute.experts_ns(*asked))
        self.cpu_experts_ns = lru_cache(maxsize=None)(compute.cpu_experts_ns)
        self.contention = lru_cache(maxsize=None)(costs.contention)
        self.drafting_ns = lru_cache(maxsize=None)(costs.drafting_ns)

    def predict_ns(self, source: str) -> list[int]:
        """Predicting the experts of the layer after each [L], by a prefetch source."""
        return [self._predict_ns(layer, source) for layer in self._layers]
