"""Which of a layer's active experts run on the CPU, from host memory, and which on the device.

A new policy is one class here and one line in `PLACEMENT_POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulator.policies.balancer import ExpertTimes, Objective
from simulator.policies.errors import unknown_name
from simulator.policies.plans import LANDED
from simulator.policies.utility import UtilitySignal


class Asked:
    """A routed layer, as a placement policy sees it.

    Attributes:
        layer: MoE layer index.
        experts: distinct experts that the layer runs, in the router's order.
        tokens: how many tokens of the pass go to each of them; empty unless the policy `needs_token_counts`.
        places: of all experts of the layer [E]: ABSENT, COMING or LANDED; not to be changed.
    """

    __slots__ = ("experts", "layer", "places", "tokens")
    layer: int
    experts: Sequence[int]
    tokens: Sequence[int]
    places: bytearray


def make_asked(layer: int, experts: Sequence[int], tokens: Sequence[int], places: bytearray) -> Asked:
    """See `Asked`."""
    asked = Asked.__new__(Asked)
    asked.layer, asked.experts, asked.tokens, asked.places = layer, experts, tokens, places
    return asked


@dataclass(frozen=True)
class PlacementSettings:
    """Numbers that placement policies are made with.

    Attributes:
        max_tokens: of `FewTokensOnCpu`.
        max_admissions: of the policies that send misses to the CPU: at most so many of these experts are on their
            way to the device at once; 0 for none ever.
        signal, times, objective, fixed_tau, hot_from, loads_misses: of `balanced.Balanced`.
    """

    max_tokens: int = 1
    max_admissions: int = 2
    signal: UtilitySignal | None = None
    times: ExpertTimes | None = None
    objective: Objective = "longest"
    fixed_tau: int | None = None
    hot_from: Sequence[int] | None = None
    loads_misses: bool = False


class PlacementPolicy:
    """Splits the active experts of a layer into a device part and a CPU part.

    The core calls `begin_pass`, then `cpu_part` once per routed layer, before anything is loaded for it. Experts of
    the device part are loaded and awaited as ever, and pinned until they have run; those of the CPU part need no
    place on the device. What the policy is shown depends on decisions alone, so live and simulated splits agree.
    """

    needs_token_counts = False
    """Whether `Asked.tokens` must be filled, which costs a little in every layer."""
    cpu_layers: frozenset[int] = frozenset()
    """MoE layers that never run on the device; they have no slots and nothing is loaded for them."""
    max_admissions = 0
    """At most so many experts that ran on the CPU are on their way to the device at once. Each is loaded behind
    everything else that is queued; 0: what runs on the CPU stays where it is."""

    def begin_pass(self, is_prefill: bool) -> None:
        """A forward pass starts; by default ignored."""

    def cpu_part(self, asked: Asked) -> Sequence[int]:
        """Those of `asked.experts` that run on the CPU, in the same order."""
        raise NotImplementedError


class AllOnDevice(PlacementPolicy):
    """What is missing is loaded."""

    def cpu_part(self, asked: Asked) -> Sequence[int]:
        """See `PlacementPolicy`."""
        return ()


class MissesOnCpu(PlacementPolicy):
    """The device runs what has landed and never waits for the link; the CPU runs the rest.

    An expert whose copy is on its way runs on the CPU too: how long the rest of the copy takes is not known to a
    decision, and the copy is of use next time.
    """

    def __init__(self, settings: PlacementSettings) -> None:
        self.max_admissions = settings.max_admissions

    def cpu_part(self, asked: Asked) -> Sequence[int]:
        """See `PlacementPolicy`."""
        places, landed = asked.places, LANDED
        part: list[int] = []
        for expert in asked.experts:
            if places[expert] != landed:
                part.append(expert)
        return part


class FewTokensOnCpu(PlacementPolicy):
    """A fixed threshold: of the experts that have not landed, those that at most `max_tokens` tokens of the pass ask
    for run on the CPU, which reads their weights once per few tokens; the busier ones are worth a copy."""

    needs_token_counts = True

    def __init__(self, settings: PlacementSettings) -> None:
        self.max_admissions = settings.max_admissions
        self._max_tokens = settings.max_tokens

    def cpu_part(self, asked: Asked) -> Sequence[int]:
        """See `PlacementPolicy`."""
        experts, tokens, places, most, landed = asked.experts, asked.tokens, asked.places, self._max_tokens, LANDED
        part: list[int] = []
        for index in range(len(experts)):
            expert = experts[index]
            if tokens[index] <= most and places[expert] != landed:
                part.append(expert)
        return part


class WholeLayers(PlacementPolicy):
    """Some layers run on the CPU altogether (llama.cpp's `--n-cpu-moe`); another policy splits the others."""

    def __init__(self, cpu_layers: frozenset[int], others: PlacementPolicy) -> None:
        self.cpu_layers = cpu_layers
        self.needs_token_counts = others.needs_token_counts
        self.max_admissions = others.max_admissions
        self._others = others

    def begin_pass(self, is_prefill: bool) -> None:
        """See `PlacementPolicy`."""
        self._others.begin_pass(is_prefill)

    def cpu_part(self, asked: Asked) -> Sequence[int]:
        """See `PlacementPolicy`."""
        return asked.experts if asked.layer in self.cpu_layers else self._others.cpu_part(asked)


def _balanced(settings: PlacementSettings) -> PlacementPolicy:
    from simulator.policies.balanced import make_balanced

    return make_balanced(settings)


DEFAULTS = PlacementSettings()
PLACEMENT_POLICIES: dict[str, Callable[[PlacementSettings], PlacementPolicy]] = {
    "none": lambda _: AllOnDevice(),
    "misses": MissesOnCpu,
    "threshold": FewTokensOnCpu,
    "balanced": _balanced,
}


def make_placement_policy(
    name: str, settings: PlacementSettings = DEFAULTS, cpu_layers: frozenset[int] = frozenset()
) -> PlacementPolicy:
    """A fresh placement policy by its registered name, with `cpu_layers` on the CPU altogether.

    Raises:
        ConfigError: the name is not registered, or the policy needs what the settings do not have.
    """
    if name not in PLACEMENT_POLICIES:
        raise unknown_name("CPU policy", name, PLACEMENT_POLICIES)
    policy = PLACEMENT_POLICIES[name](settings)
    return WholeLayers(cpu_layers, policy) if cpu_layers else policy
