"""Which experts of the next layer to load before its router has spoken.

A new policy is one class here and one line in `PREFETCH_POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulator.policies.errors import unknown_name


class PrefetchPolicy:
    """Chooses experts of the next MoE layer while the current one is about to run.

    The core calls `observe` when a layer has been routed and `select` once per layer of decode and verify passes,
    for the layer after it. Ids come back in the order in which they are worth having.
    """

    prediction: str | None = None
    """Name of the predictor whose ids `select` needs, or None: a column of the trace in the simulator, a live
    predictor in the engine."""

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """Layer `layer` was routed to `experts`; by default ignored."""

    def select(self, layer: int, predicted: Sequence[int]) -> Sequence[int]:
        """Experts of `layer` to have resident; `predicted` is empty when `prediction` is None."""
        raise NotImplementedError


class NoPrefetch(PrefetchPolicy):
    """Loads nothing ahead."""

    def select(self, layer: int, predicted: Sequence[int]) -> Sequence[int]:
        """See `PrefetchPolicy`."""
        return ()


class PreviousToken(PrefetchPolicy):
    """The experts that the layer used for the previous pass: the guess that needs no model."""

    def __init__(self) -> None:
        self._last: dict[int, Sequence[int]] = {}

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """See `PrefetchPolicy`."""
        self._last[layer] = tuple(experts)

    def select(self, layer: int, predicted: Sequence[int]) -> Sequence[int]:
        """See `PrefetchPolicy`."""
        return self._last.get(layer, ())


class Predicted(PrefetchPolicy):
    """The experts that a predictor names, in its order (Speculating Experts, arXiv 2603.19289, used as a hint)."""

    def __init__(self, prediction: str) -> None:
        self.prediction = prediction

    def select(self, layer: int, predicted: Sequence[int]) -> Sequence[int]:
        """See `PrefetchPolicy`."""
        return predicted


PREFETCH_POLICIES: dict[str, Callable[[], PrefetchPolicy]] = {
    "none": NoPrefetch,
    "previous-token": PreviousToken,
    "quasi-hidden": lambda: Predicted("quasi-hidden"),
    "estimator": lambda: Predicted("estimator"),
    "hybrid": lambda: Predicted("hybrid"),
}


def make_prefetch_policy(name: str) -> PrefetchPolicy:
    """A fresh prefetch policy by its registered name.

    Raises:
        ConfigError: the name is not registered.
    """
    if name not in PREFETCH_POLICIES:
        raise unknown_name("prefetch source", name, PREFETCH_POLICIES)
    return PREFETCH_POLICIES[name]()
