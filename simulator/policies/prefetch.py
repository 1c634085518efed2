"""Which experts of the next layer to load before its router has spoken.

A new policy is one class here and one line in `PREFETCH_POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from simulator.policies.errors import unknown_name
from simulator.policies.popularity import HotLists, check_hot_experts
from trace_capture.errors import ConfigError

if TYPE_CHECKING:
    from trace_capture.model_shape import ModelShape


class PrefetchSetting(NamedTuple):
    """What a policy may be told: see the fields of `PrefetchConfig`."""

    hot_experts: HotLists | None = None
    recall: float = 1.0
    seed: int = 0


DEFAULT_SETTING = PrefetchSetting()


class PrefetchPolicy:
    """Chooses experts of the next MoE layer while the current one is about to run.

    The core calls `observe` when a layer has been routed and `select` once per layer of decode and verify passes,
    for the layer after it. Ids come back in the order in which they are worth having.
    """

    prediction: str | None = None
    """Name of the predictor whose ids `select` needs, or None: a column of the trace in the simulator, a live
    predictor in the engine."""
    needs_future = False
    """Predicts from look-ups to come, so that only a replay can use it."""
    needs_hot_experts = False
    """Chooses by a profile, which must be in the configuration."""

    def check(self, shape: ModelShape, knows_future: bool) -> None:
        """Refuse to work for a model without what the policy needs; by default it needs nothing.

        Raises:
            ConfigError: it is not there.
        """

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


class Popularity(PrefetchPolicy):
    """The experts that a profile found hot, the same for every token: the guess that needs no context."""

    needs_hot_experts = True

    def __init__(self, setting: PrefetchSetting) -> None:
        self._hot_experts = setting.hot_experts

    def check(self, shape: ModelShape, knows_future: bool) -> None:
        """See `PrefetchPolicy`."""
        if self._hot_experts is None:
            raise ConfigError(
                "prefetch.source = 'popularity' needs prefetch.hot_experts, the experts of each layer to have; "
                "'moe-studio simulate TRACE --prefetch popularity --save-config FILE' makes a configuration with them"
            )
        check_hot_experts(self._hot_experts, shape)

    def select(self, layer: int, predicted: Sequence[int]) -> Sequence[int]:
        """See `PrefetchPolicy`."""
        return self._hot_experts[layer] if self._hot_experts else ()


class Predicted(PrefetchPolicy):
    """The experts that a predictor names, in its order (Speculating Experts, arXiv 2603.19289, used as a hint)."""

    def __init__(self, prediction: str) -> None:
        self.prediction = prediction

    def select(self, layer: int, predicted: Sequence[int]) -> Sequence[int]:
        """See `PrefetchPolicy`."""
        return predicted


class Oracle(Predicted):
    """A predictor of a chosen recall: what a better one would be worth. Right recall-often, else a wrong expert."""

    needs_future = True

    def __init__(self, setting: PrefetchSetting) -> None:
        super().__init__("oracle")
        self.recall = setting.recall
        self.seed = setting.seed

    def check(self, shape: ModelShape, knows_future: bool) -> None:
        """See `PrefetchPolicy`."""
        if not knows_future:
            raise ConfigError(
                "prefetch.source = 'oracle' needs to know the future, and only a replay does: use it with "
                "'moe-studio simulate', and quasi-hidden or another source in the live engine"
            )


PREFETCH_POLICIES: dict[str, Callable[[PrefetchSetting], PrefetchPolicy]] = {
    "none": lambda _: NoPrefetch(),
    "previous-token": lambda _: PreviousToken(),
    "popularity": Popularity,
    "quasi-hidden": lambda _: Predicted("quasi-hidden"),
    "estimator": lambda _: Predicted("estimator"),
    "hybrid": lambda _: Predicted("hybrid"),
    "oracle": Oracle,
}


def make_prefetch_policy(name: str, setting: PrefetchSetting = DEFAULT_SETTING) -> PrefetchPolicy:
    """A fresh prefetch policy by its registered name.

    Raises:
        ConfigError: the name is not registered.
    """
    if name not in PREFETCH_POLICIES:
        raise unknown_name("prefetch source", name, PREFETCH_POLICIES)
    return PREFETCH_POLICIES[name](setting)
