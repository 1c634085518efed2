"""The split of a routed layer that keeps device and CPU busy equally long."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.policies.balancer import ExpertTimes, Objective
from simulator.policies.placement import Asked, PlacementPolicy, PlacementSettings
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
        self._base_ns: list[tuple[int, int]] = list(
            zip(times.device_base_ns.tolist(), times.cpu_base_ns.tolist(), strict=True)
        )
        self._copy_ns: list[int] = times.copy_ns.tolist()
        self._objective = objective
        self._loads_misses = loads_misses and fixed_tau is None
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
        states = self._signal.states[asked.layer].tolist()
        landed = asked.landed
        if self._hot_from is not None:
            hot_from = self._hot_from[asked.layer]
            landed = {one: landed.get(one, False) or states[one] >= hot_from for one in asked.experts}
            asked = asked._replace(landed=landed)
        tau = self._threshold(asked, states) if self._fixed_tau is None else self._fixed_tau
        part = [one for one in asked.experts if not landed.get(one, False) or states[one] < tau]
        if self._loads_misses and not any(landed.get(one, False) for one in part):
            loaded = self._worth_loading(asked, states, len(part))
            part = [one for one in part if one not in loaded]
        return part

    def _worth_loading(self, asked: Asked, states: Sequence[int], on_cpu: int) -> set[int]:
        """Experts without a place that are loaded rather than run on the CPU. What is on its way is none of them: how
        long that still takes is not known to a decision."""
        layer, landed = asked.layer, asked.landed
        device_ns, cpu_ns = self._device_ns[layer], self._cpu_ns[layer]
        most = len(device_ns) - 1
        served = {one: min(tokens, most) for one, tokens in zip(asked.experts, asked.tokens, strict=True)}
        here = [device_ns[tokens] for one, tokens in served.items() if landed.get(one, False)]
        device, cpu = sum(here), sum(cpu_ns[tokens] for one, tokens in served.items() if not landed.get(one, False))
        best_ns = self._cost_ns(layer, (device, len(here)), (cpu, on_cpu))
        absent = [one for one in asked.experts if one not in landed]
        absent.sort(key=lambda one: (-states[one], -served[one]))
        for number, one in enumerate(absent, 1):
            device += self._copy_ns[layer] + device_ns[served[one]]
            cpu -= cpu_ns[served[one]]
            cost_ns = self._cost_ns(layer, (device, len(here) + number), (cpu, on_cpu - number))
            if cost_ns >= best_ns:
                return set(absent[: number - 1])
            best_ns = cost_ns
        return set(absent)

    def _threshold(self, asked: Asked, states: Sequence[int]) -> int:
        """The tau 0..top+1 at which the layer ends soonest, or both sides are nearest."""
        device_ns, cpu_ns = self._device_ns[asked.layer], self._cpu_ns[asked.layer]
        most = len(device_ns) - 1
        levels = self._signal.top + 1
        on_device, moved, counts = [0] * levels, [0] * levels, [0] * levels
        missing_ns = missing = 0
        for expert, tokens in zip(asked.experts, asked.tokens, strict=True):
            served = min(tokens, most)
            if asked.landed.get(expert, False):
                state = states[expert]
                on_device[state] += device_ns[served]
                moved[state] += cpu_ns[served]
                counts[state] += 1
            else:
                missing_ns += cpu_ns[served]
                missing += 1
        best, best_ns = 0, -1
        for tau in range(levels + 1):
            cost_ns = self._cost_ns(
                asked.layer,
                (sum(on_device[tau:]), sum(counts[tau:])),
                (missing_ns + sum(moved[:tau]), missing + sum(counts[:tau])),
            )
            if best_ns < 0 or cost_ns < best_ns:
                best, best_ns = tau, cost_ns
        return best

    def _cost_ns(self, layer: int, device: tuple[int, int], cpu: tuple[int, int]) -> int:
        """Of (time, experts) on the device and on the CPU."""
        device_base_ns, cpu_base_ns = self._base_ns[layer]
        device_ns = device[0] + device_base_ns * (device[1] > 0)
        cpu_ns = cpu[0] + cpu_base_ns * (cpu[1] > 0)
        return max(device_ns, cpu_ns) if self._objective == "longest" else abs(device_ns - cpu_ns)


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
