"""The split of a routed layer that keeps device and CPU busy equally long."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.policies.balancer import ExpertTimes, Objective
from simulator.policies.placement import Asked, PlacementPolicy, PlacementSettings
from simulator.policies.plans import LANDED
from simulator.policies.utility import UtilitySignal
from trace_capture.errors import ConfigError


class Balanced(PlacementPolicy):
    """What has not landed runs on the CPU, and with it those of the landed experts whose utility is below tau.

    After MoE-SpAc (arXiv 2603.09983), where misses always run on the CPU and a threshold on the utility splits the rest
    so that both sides take equally long. Ours: tau is chosen anew for each layer once its router has spoken, from the
    tokens that really go to each expert and from what really has landed. Of equal thresholds the smallest is taken,
    which leaves most on the device. (What to load and evict is decided before, by `balancer`, from forecasts.) Of a
    prompt everything runs on the device: there each expert serves many tokens, and the cache fills.

    Also ours, with `loads_misses`: a verify pass misses more experts of a layer than the CPU runs in the time of a few
    copies, so as many of them are loaded and awaited instead, the most useful first, as let the layer end sooner.

    Args:
        signal: utilities, which somebody else keeps up to date.
        times: what experts cost on either side; a layer's last column stands for all larger token counts.
        objective: see `balancer.ThresholdTable.cost_ns`.
        fixed_tau: instead of choosing; the ablation.
        hot_from: utilities of each layer [L] from which on a miss is loaded and awaited instead; None: no miss is.
        loads_misses: balance the link against the CPU, too; without effect where tau is fixed.
        max_admissions: see `PlacementPolicy`.
    """

    needs_token_counts = True

    def __init__(
        self,
        signal: UtilitySignal,
        times: ExpertTimes,
        objective: Objective = "longest",
        fixed_tau: int | None = None,
        hot_from: Sequence[int] | None = None,
        max_admissions: int = 0,
        loads_misses: bool = False,
    ) -> None:
        self._signal = signal
        self._device_ns: list[list[int]] = times.device_ns.tolist()
        self._cpu_ns: list[list[int]] = times.cpu_ns.tolist()
        self._device_base_ns: list[int] = times.device_base_ns.tolist()
        self._cpu_base_ns: list[int] = times.cpu_base_ns.tolist()
        self._copy_ns: list[int] = times.copy_ns.tolist()
        self._is_longest = objective == "longest"
        # with utilities from which on every miss is awaited none is left to weigh
        self._loads_misses = loads_misses and fixed_tau is None and hot_from is None
        self._fixed_tau = fixed_tau
        self._hot_from = hot_from
        self._is_prefill = False
        self.max_admissions = max_admissions

    def begin_pass(self, is_prefill: bool) -> None:
        """See `PlacementPolicy`."""
        self._is_prefill = is_prefill

    def cpu_part(self, asked: Asked) -> Sequence[int]:
        """See `PlacementPolicy`."""
        if self._is_prefill:
            return ()
        experts, levels, fixed = asked.experts, self._levels(asked), self._fixed_tau
        tau = self._threshold(asked, levels) if fixed is None else fixed
        part: list[int] = []
        moves = False
        for index in range(len(levels)):
            if levels[index] < tau:
                part.append(experts[index])
                if levels[index] >= 0:
                    moves = True
        if self._loads_misses and not moves:
            loaded = self._worth_loading(asked, levels)
            if loaded:
                part = [one for one in part if one not in loaded]
        return part

    def _levels(self, asked: Asked) -> list[int]:
        """Of each asked expert the utility, or -1 where it is not on the device and is not to be loaded and awaited."""
        cells, first, places = self._signal.cells, asked.layer * self._signal.num_experts, asked.places
        hot_from = self._signal.top + 1 if self._hot_from is None else self._hot_from[asked.layer]
        landed_place = LANDED
        levels: list[int] = []
        for expert in asked.experts:
            level = cells[first + expert]
            if places[expert] != landed_place and level < hot_from:
                level = -1
            levels.append(level)
        return levels

    def _threshold(self, asked: Asked, levels: Sequence[int]) -> int:
        """The tau 0..top+1 at which the layer ends soonest, or both sides are nearest."""
        layer, tokens = asked.layer, asked.tokens
        device_ns, cpu_ns = self._device_ns[layer], self._cpu_ns[layer]
        most, count = len(device_ns) - 1, len(levels)
        device = cpu = on_device = 0
        for index in range(count):
            served = min(tokens[index], most)
            if levels[index] < 0:
                cpu += cpu_ns[served]
            else:
                device += device_ns[served]
                on_device += 1
        best, best_ns = 0, self._cost_ns(layer, device, on_device, cpu, count - on_device)
        tau = 0
        while on_device:
            before = on_device
            for index in range(count):
                if levels[index] == tau:
                    served = min(tokens[index], most)
                    device -= device_ns[served]
                    cpu += cpu_ns[served]
                    on_device -= 1
            tau += 1
            if on_device != before:
                cost_ns = self._cost_ns(layer, device, on_device, cpu, count - on_device)
                if cost_ns < best_ns:
                    best, best_ns = tau, cost_ns
        return best

    def _worth_loading(self, asked: Asked, levels: Sequence[int]) -> frozenset[int]:
        """Experts without a place that are loaded rather than run on the CPU. What is on its way is none of them: how
        long that still takes is not known to a decision."""
        layer, experts, tokens, places = asked.layer, asked.experts, asked.tokens, asked.places
        cells, first = self._signal.cells, layer * self._signal.num_experts
        device_ns, cpu_ns = self._device_ns[layer], self._cpu_ns[layer]
        most, count = len(device_ns) - 1, len(levels)
        device = cpu = on_device = 0
        absent: list[tuple[int, int, int]] = []
        for index in range(count):
            served, expert = min(tokens[index], most), experts[index]
            if levels[index] >= 0:
                device += device_ns[served]
                on_device += 1
                continue
            cpu += cpu_ns[served]
            if not places[expert]:
                absent.append((-cells[first + expert], -served, index))
        absent.sort()
        best_ns = self._cost_ns(layer, device, on_device, cpu, count - on_device)
        loaded: list[int] = []
        for _, less, index in absent:
            device += self._copy_ns[layer] + device_ns[-less]
            cpu -= cpu_ns[-less]
            on_device += 1
            cost_ns = self._cost_ns(layer, device, on_device, cpu, count - on_device)
            if cost_ns >= best_ns:
                break
            loaded.append(experts[index])
            best_ns = cost_ns
        return frozenset(loaded)

    def _cost_ns(self, layer: int, device_ns: int, on_device: int, cpu_ns: int, on_cpu: int) -> int:
        """Of so much time of so many experts on either side."""
        if on_device:
            device_ns += self._device_base_ns[layer]
        if on_cpu:
            cpu_ns += self._cpu_base_ns[layer]
        longest_ns = max(device_ns, cpu_ns)
        return longest_ns if self._is_longest else longest_ns - min(device_ns, cpu_ns)


def make_balanced(settings: PlacementSettings) -> Balanced:
    """The policy of a configuration.

    Raises:
        ConfigError: there are no utilities or times.
    """
    if settings.signal is None or settings.times is None:
        raise ConfigError(
            "cpu.policy = 'balanced' splits by utility and by what experts cost: it needs cache.policy = 'utility', "
            "and a core made with times"
        )
    return Balanced(
        settings.signal,
        settings.times,
        settings.objective,
        settings.fixed_tau,
        settings.hot_from,
        settings.max_admissions,
        settings.loads_misses,
    )
