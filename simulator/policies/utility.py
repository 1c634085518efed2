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
from typing import TYPE_CHECKING, NamedTuple

from simulator.policies.errors import unknown_name
from trace_capture.errors import ConfigError

if TYPE_CHECKING:  # else imported where it is used: the names of policies must be there at once
    import numpy as np
    import numpy.typing as npt

    Ids = npt.NDArray[np.integer]
    """Routed experts of one layer in one pass [T, K]."""
    States = npt.NDArray[np.int64]

TOP_STATE = 5


class Boundaries(NamedTuple):
    """Fluctuations from which on a state goes up or down by one; both at least 1."""

    up: int
    down: int


class Fluctuations:
    """What the fluctuations of a layer in one pass came to: frequency minus the state before.

    Attributes:
        risen, fallen: sums of the positive ones, and of the negative ones without their sign.
        num_risen, num_fallen: how many of either.
        num_hot: states above 0 afterwards.
    """

    __slots__ = ("fallen", "num_fallen", "num_hot", "num_risen", "risen")

    def __init__(self) -> None:
        self.risen = self.num_risen = self.fallen = self.num_fallen = self.num_hot = 0


def activation_frequency(ids: Ids, num_experts: int) -> States:
    """By how many tokens of a pass each expert is used, 0..T, int64 [E]; rows that were not routed count nothing."""
    import numpy as np

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

    def calibrate(self, layer: int, seen: Fluctuations) -> None:
        """Set the boundaries of a layer for its next pass, after what was `seen` in this one."""

    def _set(self, layer: int, up: int, down: int) -> None:
        """New boundaries, which most often are the old ones."""
        old_up, old_down = self.boundaries[layer]
        if up != old_up or down != old_down:
            self.boundaries[layer] = Boundaries(up, down)

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
        self._usual_rise = [float(one.up) for one in self.boundaries]
        self._usual_fall = [float(one.down) for one in self.boundaries]

    def calibrate(self, layer: int, seen: Fluctuations) -> None:
        """See `BoundaryRule`."""
        rise, fall, rate = self._usual_rise[layer], self._usual_fall[layer], self.rate
        if seen.num_risen:
            rise += rate * (seen.risen / seen.num_risen - rise)
            self._usual_rise[layer] = rise
        if seen.num_fallen:
            fall += rate * (seen.fallen / seen.num_fallen - fall)
            self._usual_fall[layer] = fall
        self._set(layer, self._clamped(rise), self._clamped(fall))


class CapacityRule(BoundaryRule):
    """The boundary upwards moves by one so that as many experts are hot as the layer has room for.

    Hot is a state above 0. Nothing moves while their number is within an eighth of the room.
    """

    tolerance = 1 / 8

    def calibrate(self, layer: int, seen: Fluctuations) -> None:
        """See `BoundaryRule`."""
        up, down = self.boundaries[layer]
        room = self._capacity[layer]
        surplus = seen.num_hot - room
        if abs(surplus) > self.tolerance * room:
            self._set(layer, self._clamped(up + 1 if surplus > 0 else up - 1), down)


class UtilitySignal:
    """Keeps a utility from 0 to `top` per (layer, expert); it stands for the *next* pass of the same layer.

    Attributes:
        cells: utilities, a byte each, layer by layer [L * E].
    """

    sees_drafts = True
    """False: it looks at one token of a pass alone, the latest that is known to be kept."""

    def __init__(self, num_layers: int, num_experts: int, top: int = TOP_STATE) -> None:
        self.top = top
        self.num_experts = num_experts
        self.cells = bytearray(num_layers * num_experts)
        self._warm: list[list[int]] = [[] for _ in range(num_layers)]
        """Per layer its experts above 0, in any order: they are few, and where nothing is used others cannot move."""

    @property
    def states(self) -> npt.NDArray[np.int8]:
        """Utilities, a view of `cells` [L, E]."""
        import numpy as np

        return np.frombuffer(self.cells, dtype=np.int8).reshape(-1, self.num_experts)

    def state(self, layer: int, expert: int) -> int:
        """The utility of one expert."""
        return self.cells[layer * self.num_experts + expert]

    def observe(self, layer: int, ids: Ids) -> None:
        """`layer` was routed to `ids` [T, K] in a decode or verify pass; its utilities move."""
        frequency = activation_frequency(ids if self.sees_drafts else ids[-1:], self.num_experts)
        experts = frequency.nonzero()[0]
        self.count(layer, experts.tolist(), frequency[experts].tolist())

    def route(self, layer: int, experts: Sequence[int], tokens: Sequence[int]) -> None:
        """As `observe`, from the distinct experts in order of first appearance and the tokens that use each."""
        self.count(layer, experts, tokens)

    def count(self, layer: int, experts: Sequence[int], tokens: Sequence[int]) -> None:
        """As `route`, in any order; of one token where the signal sees no drafts."""
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
        self._is_used = bytearray(num_experts)
        """In the pass that is being counted; all 0 between passes."""
        self._seen = Fluctuations()

    def count(self, layer: int, experts: Sequence[int], tokens: Sequence[int]) -> None:
        """See `UtilitySignal`."""
        is_used = self._is_used
        for expert in experts:
            is_used[expert] = 1
        seen = self._seen
        warm = self._cool(layer, seen)
        for expert in experts:
            is_used[expert] = 0
        self._move(layer, experts, tokens, warm, seen)
        seen.num_hot = len(warm)
        self._warm[layer] = warm
        self.rule.calibrate(layer, seen)

    def _cool(self, layer: int, seen: Fluctuations) -> list[int]:
        """Experts that this pass does not use; gives those of them that stay above 0."""
        cells, is_used, first = self.cells, self._is_used, layer * self.num_experts
        _, down = self.rule.boundaries[layer]
        fallen = num_fallen = 0
        warm: list[int] = []
        for expert in self._warm[layer]:
            if not is_used[expert]:
                state = cells[first + expert]
                fallen += state
                num_fallen += 1
                if state >= down:
                    state -= 1
                    cells[first + expert] = state
                if state:
                    warm.append(expert)
        seen.fallen, seen.num_fallen = fallen, num_fallen
        return warm

    def _move(
        self, layer: int, experts: Sequence[int], tokens: Sequence[int], warm: list[int], seen: Fluctuations
    ) -> None:
        """Experts that this pass uses; those above 0 afterwards are added to `warm`."""
        cells, most, top = self.cells, self.rule.most, self.top
        up, down = self.rule.boundaries[layer]
        first = layer * self.num_experts
        risen = num_risen = 0
        for place in range(len(experts)):
            expert, frequency = experts[place], tokens[place]
            state = cells[first + expert]
            if frequency > most:
                frequency = most
            fluctuation = frequency - state
            if fluctuation > 0:
                risen += fluctuation
                num_risen += 1
                if fluctuation >= up and state < top:
                    state += 1
            elif fluctuation < 0:
                seen.fallen -= fluctuation
                seen.num_fallen += 1
                if fluctuation <= -down:
                    state -= 1
            cells[first + expert] = state
            if state:
                warm.append(expert)
        seen.risen, seen.num_risen = risen, num_risen


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
        latest = experts[: self._top_k]
        self.count(layer, latest, [1] * len(latest))

    def count(self, layer: int, experts: Sequence[int], tokens: Sequence[int]) -> None:
        """See `UtilitySignal`."""
        cells, first = self.cells, layer * self.num_experts
        for expert in self._warm[layer]:
            cells[first + expert] = 0
        for expert in experts:
            cells[first + expert] = 1
        self._warm[layer] = list(experts)


class RecencyUtility(UtilitySignal):
    """The ablation: least recently used in the space of utilities. The top for what this pass used, one less for
    every pass since."""

    def count(self, layer: int, experts: Sequence[int], tokens: Sequence[int]) -> None:
        """See `UtilitySignal`."""
        cells, first, top = self.cells, layer * self.num_experts, self.top
        for expert in self._warm[layer]:
            cells[first + expert] -= 1
        used = frozenset(experts)
        warm = [expert for expert in self._warm[layer] if cells[first + expert] and expert not in used]
        for expert in experts:
            cells[first + expert] = top
        self._warm[layer] = warm + list(experts)


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
