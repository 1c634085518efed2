"""How useful each expert will be to the next pass, learned from what the present one verified.

In speculative decoding one pass verifies G drafts and the token before them, so a layer does not only show whether an
expert is used (0 or 1, as decoding does) but by how many of G + 1 tokens: 0..G+1 (MoE-SpAc, arXiv 2603.09983). From
this activation frequency a small integer utility per (layer, expert) is kept.

Stated by the paper: the frequency as signal, discrete states, the inertial transition (a state moves only when the
fluctuation crosses a threshold), thresholds that follow the workload. Stated by its released code: states 0 to 5, a
step up at a fluctuation of 5, down at 1, both fixed, at 8 drafts. Ours, because the paper's equations are not public:
the fluctuation is frequency minus state, a state moves by one per pass, how thresholds scale with G, and both rules of
calibration. A new signal is one class here and one line in `UTILITY_SIGNALS`; a rule likewise in `BOUNDARY_RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.policies.errors import unknown_name
from trace_capture.errors import ConfigError

Ids = npt.NDArray[np.integer]
"""Routed experts of one layer in one pass [T, K]."""
States = npt.NDArray[np.int64]

TOP_STATE = 5


class Boundaries(NamedTuple):
    """Fluctuations from which on a state goes up or down by one; both at least 1."""

    up: int
    down: int


def activation_frequency(ids: Ids, num_experts: int) -> States:
    """By how many tokens of a pass each expert is used, 0..T, int64 [E]; rows that were not routed count nothing."""
    return np.bincount(ids.ravel(), minlength=num_experts)[:num_experts]


def start_boundaries(gamma: int) -> Boundaries:
    """More than half of the tokens to go up, one to go down: (5, 1) at 8 drafts, as released."""
    return Boundaries((gamma + 2) // 2, 1)


class BoundaryRule:
    """Sets a layer's boundaries after each transition; by default they stay.

    Args:
        num_layers: L.
        gamma: drafts per verify pass at most; boundaries stay within 1..gamma+1.
        capacity: experts that each layer has room for [L], for rules that look at it.
        start: the first boundaries; None for `start_boundaries`.
    """

    def __init__(self, num_layers: int, gamma: int, capacity: Sequence[int], start: Boundaries | None = None) -> None:
        self.most = gamma + 1
        self._capacity = tuple(capacity)
        self.boundaries = [start or start_boundaries(gamma)] * num_layers
        """Of each layer [L]."""

    def calibrate(self, layer: int, fluctuation: States, states: States) -> None:
        """Set `boundaries[layer]` for the next pass.

        Args:
            layer: MoE layer index.
            fluctuation: frequency minus the state before the transition [E].
            states: after the transition [E].
        """

    def _clamped(self, value: float) -> int:
        return min(self.most, max(1, round(value)))


class FluctuationRule(BoundaryRule):
    """Boundaries are the usual fluctuation in their direction, so that only an unusual one moves a state.

    Usual is an exponential average, over passes, of the mean positive (negative) fluctuation of a pass.
    """

    rate = 0.1
    """Weight of the latest pass."""

    def __init__(self, num_layers: int, gamma: int, capacity: Sequence[int], start: Boundaries | None = None) -> None:
        super().__init__(num_layers, gamma, capacity, start)
        self._usual = [[float(one.up), float(one.down)] for one in self.boundaries]

    def calibrate(self, layer: int, fluctuation: States, states: States) -> None:
        """See `BoundaryRule`."""
        usual = self._usual[layer]
        total = int(fluctuation.sum())
        rises = np.maximum(fluctuation, 0)
        risen = int(rises.sum())
        counts = int(np.count_nonzero(rises)), int(np.count_nonzero(fluctuation)) - int(np.count_nonzero(rises))
        for way, amount in enumerate((risen, risen - total)):
            if counts[way]:
                usual[way] += self.rate * (amount / counts[way] - usual[way])
        self.boundaries[layer] = Boundaries(self._clamped(usual[0]), self._clamped(usual[1]))


class CapacityRule(BoundaryRule):
    """The boundary upwards moves by one so that as many experts are hot as the layer has room for.

    Hot is a state above 0. Nothing moves while their number is within an eighth of the room.
    """

    tolerance = 1 / 8

    def calibrate(self, layer: int, fluctuation: States, states: States) -> None:
        """See `BoundaryRule`."""
        up, down = self.boundaries[layer]
        room = self._capacity[layer]
        surplus = int(np.count_nonzero(states)) - room
        if abs(surplus) > self.tolerance * room:
            up = self._clamped(up + 1 if surplus > 0 else up - 1)
        self.boundaries[layer] = Boundaries(up, down)


class UtilitySignal:
    """Keeps a utility from 0 to `top` per (layer, expert); it stands for the *next* pass of the same layer."""

    sees_drafts = True
    """False: it looks at one token of a pass alone, the latest that is known to be kept."""

    def __init__(self, num_layers: int, num_experts: int, top: int = TOP_STATE) -> None:
        self.top = top
        self.num_experts = num_experts
        self.states = np.zeros((num_layers, num_experts), dtype=np.int64)
        """Utilities [L, E]."""

    def observe(self, layer: int, ids: Ids) -> None:
        """`layer` was routed to `ids` [T, K] in a decode or verify pass; its utilities move."""
        self.count(layer, activation_frequency(ids if self.sees_drafts else ids[-1:], self.num_experts))

    def route(self, layer: int, experts: Sequence[int], tokens: Sequence[int]) -> None:
        """As `observe`, from the distinct experts in order of first appearance and the tokens that use each."""
        frequency = np.zeros(self.num_experts, dtype=np.int64)
        frequency[list(experts)] = tokens
        self.count(layer, frequency)

    def count(self, layer: int, frequency: States) -> None:
        """As `observe`, from the tokens that use each expert [E]; of one token where the signal sees no drafts."""
        raise NotImplementedError


class SpeculativeUtility(UtilitySignal):
    """The activation frequency with inertial transition.

    With s the state and n the frequency: n - s >= up moves s up by one, s - n >= down moves it down by one, anything
    between leaves it. A frequency above G + 1, such as a prompt has, counts as G + 1.

    Args:
        num_layers, num_experts: L and E.
        rule: boundaries of each layer and how they follow the workload.
        top: the highest state.
    """

    def __init__(self, num_layers: int, num_experts: int, rule: BoundaryRule, top: int = TOP_STATE) -> None:
        super().__init__(num_layers, num_experts, top)
        self.rule = rule

    def count(self, layer: int, frequency: States) -> None:
        """See `UtilitySignal`."""
        states = self.states[layer]
        fluctuation = np.minimum(frequency, self.rule.most) - states
        up, down = self.rule.boundaries[layer]
        states += fluctuation >= up
        states -= fluctuation <= -down
        np.minimum(states, self.top, out=states)
        np.maximum(states, 0, out=states)
        self.rule.calibrate(layer, fluctuation, states)


class AutoregressiveUtility(UtilitySignal):
    """The ablation: 1 for what the latest token used, as decoding without drafts would show; states are 0 or 1.

    Args:
        num_layers, num_experts: L and E.
        top_k: experts per token. Of a routed pass the first token is the latest that is certain.
    """

    sees_drafts = False

    def __init__(self, num_layers: int, num_experts: int, top_k: int) -> None:
        super().__init__(num_layers, num_experts, top=1)
        self._top_k = top_k

    def route(self, layer: int, experts: Sequence[int], tokens: Sequence[int]) -> None:
        """See `UtilitySignal`."""
        super().route(layer, experts[: self._top_k], [1] * len(experts[: self._top_k]))

    def count(self, layer: int, frequency: States) -> None:
        """See `UtilitySignal`."""
        self.states[layer] = frequency > 0


class RecencyUtility(UtilitySignal):
    """The ablation: least recently used in the space of utilities. The top for what this pass used, one less for
    every pass since."""

    def count(self, layer: int, frequency: States) -> None:
        """See `UtilitySignal`."""
        states = self.states[layer]
        np.maximum(states - 1, 0, out=states)
        states[frequency > 0] = self.top


BOUNDARY_RULES: dict[str, type[BoundaryRule]] = {
    "fixed": BoundaryRule,
    "fluctuation": FluctuationRule,
    "capacity": CapacityRule,
}

UTILITY_SIGNALS: dict[str, Callable[[int, int, int, BoundaryRule], UtilitySignal]] = {
    "speculative": lambda layers, experts, top_k, rule: SpeculativeUtility(layers, experts, rule),
    "autoregressive": lambda layers, experts, top_k, rule: AutoregressiveUtility(layers, experts, top_k),
    "recency": lambda layers, experts, top_k, rule: RecencyUtility(layers, experts),
}


def make_utility_signal(
    signal: str,
    rule: str,
    num_experts: int,
    gamma: int,
    capacity: Sequence[int],
    start: Boundaries | None = None,
    *,
    top_k: int = 1,
) -> UtilitySignal:
    """A fresh signal by its registered name.

    Args:
        signal: of `UTILITY_SIGNALS`.
        rule: of `BOUNDARY_RULES`; only the speculative signal has boundaries.
        num_experts: E.
        gamma: drafts per verify pass at most.
        capacity: experts that each MoE layer has room for [L].
        start: the first boundaries; None for `start_boundaries`.
        top_k: experts per token, which `AutoregressiveUtility.route` needs.

    Raises:
        ConfigError: a name is not registered, gamma is negative, or a boundary is below 1.
    """
    if signal not in UTILITY_SIGNALS:
        raise unknown_name("utility signal", signal, UTILITY_SIGNALS)
    if rule not in BOUNDARY_RULES:
        raise unknown_name("boundary rule", rule, BOUNDARY_RULES)
    if gamma < 0:
        raise ConfigError(f"gamma is {gamma}; give the drafts per verify pass, 0 for decoding without any")
    if start is not None and min(start) < 1:
        raise ConfigError(f"utility boundaries are {tuple(start)}; both must be at least 1")
    boundaries = BOUNDARY_RULES[rule](len(capacity), gamma, capacity, start)
    return UTILITY_SIGNALS[signal](len(capacity), num_experts, top_k, boundaries)
