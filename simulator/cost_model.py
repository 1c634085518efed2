"""How long each piece of a pass takes, in whole nanoseconds, from a hardware profile and a model shape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from simulator.costs.device import DeviceCosts
from simulator.costs.drafting import drafting_ns
from simulator.costs.host import ALONE, Contention, HostCosts
from simulator.costs.link import LinkCosts
from simulator.costs.rates import value_or
from trace_capture.hardware import DraftCosts, HardwareProfile, MeasuredCosts
from trace_capture.model_shape import ModelShape
from trace_capture.trace import DraftSettings

TERMS = ("dense", "experts", "cpu_experts", "decide", "issue", "predict", "stall", "overhead", "drafting")
"""Parts of a pass's time; they add up to it.

dense: attention, norms, router and shared experts of all layers. experts: routed experts on the device. cpu_experts:
routed experts on the CPU, as far as the device had nothing left to do but wait for them. decide: bookkeeping of the
engine. issue: submitting copies. predict: predicting the next layer's experts. stall: waiting for the link. overhead:
embedding, head, sampling, generation loop. drafting: making the drafts of a verify pass.
"""


class ComputeCosts(Protocol):
    """Time of the parts that do not depend on the link."""

    def dense_ns(self, layer: int, tokens: int, context: int) -> int:
        """One layer beside its routed experts, for `tokens` in the pass and `context` tokens in the cache."""

    def dense_of_layers_ns(self, tokens: int, context: int) -> list[int]:
        """`dense_ns` of every layer [L]."""

    def experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """`experts` of the `active` experts of a layer on the device, in one group of kernels."""

    def cpu_experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """`experts` of the `active` experts of a layer on the CPU, memory to themselves; 0 for none.

        Raises:
            ProfileError: the profile knows no host.
        """

    def overhead_ns(self, tokens: int) -> int:
        """Per pass beside its layers."""

    def decide_ns(self, loads: int) -> int:
        """Engine bookkeeping for one layer with `loads` planned loads."""

    def predict_ns(self, layer: int, source: str = "") -> int:
        """Predicting the experts of the layer after `layer`, by a prefetch source; by that layer's router if none is
        named."""


class MeasuredCompute:
    """Compute times from a calibration on this machine."""

    def __init__(self, costs: MeasuredCosts, num_layers: int) -> None:
        self._costs = costs
        self._num_layers = num_layers

    def dense_ns(self, layer: int, tokens: int, context: int) -> int:
        """See `ComputeCosts`."""
        return interpolate_ns(self._costs.tokens, self._costs.dense_ns, tokens)

    def dense_of_layers_ns(self, tokens: int, context: int) -> list[int]:
        """See `ComputeCosts`."""
        return [self.dense_ns(0, tokens, context)] * self._num_layers

    def experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """See `ComputeCosts`. A layer run in waves is charged by the share of experts in the wave, but never
        less than a one-token call."""
        whole = interpolate_ns(self._costs.tokens, self._costs.experts_ns, tokens)
        if experts == active:
            return whole
        return max(round(whole * experts / active), interpolate_ns(self._costs.tokens, self._costs.experts_ns, 1))

    def cpu_experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """See `ComputeCosts`. The table's time by the share of experts, beside what a layer costs in any case."""
        if not experts:
            return 0
        whole = interpolate_ns(self._costs.tokens, self._costs.cpu_experts_ns, tokens)
        fixed_ns = min(self._costs.cpu_layer_ns, whole)
        return max(round(fixed_ns + (whole - fixed_ns) * experts / active), round(experts * self._costs.cpu_paced_ns))

    def overhead_ns(self, tokens: int) -> int:
        """See `ComputeCosts`."""
        return interpolate_ns(self._costs.tokens, self._costs.pass_overhead_ns, tokens)

    def decide_ns(self, loads: int) -> int:
        """See `ComputeCosts`."""
        costs = self._costs
        return round(costs.decide_ns + (costs.decide_first_load_ns if loads else 0) + loads * costs.decide_per_load_ns)

    def predict_ns(self, layer: int, source: str = "") -> int:
        """See `ComputeCosts`."""
        return round(self._costs.predict_by_source_ns.get(source, self._costs.predict_ns))


class RooflineCompute:
    """Compute times from the numbers of a profile: `simulator.costs.device` and `simulator.costs.host`."""

    def __init__(self, profile: HardwareProfile, shape: ModelShape, cpu_threads: int | None = None) -> None:
        self.device = DeviceCosts(profile, shape)
        self._cpu_threads = cpu_threads
        self._profile = profile
        self._shape = shape
        host = profile.host
        self._decide_ns = value_or(host.decide_ns if host else None, self.device.launch_ns)
        self._decide_per_load_ns = value_or(host.decide_per_load_ns if host else None, 0.0)

    def dense_ns(self, layer: int, tokens: int, context: int) -> int:
        """See `ComputeCosts`."""
        return self.device.dense_ns(layer, tokens, context)

    def dense_of_layers_ns(self, tokens: int, context: int) -> list[int]:
        """See `ComputeCosts`."""
        return self.device.dense_of_layers_ns(tokens, context)

    def experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """See `ComputeCosts`."""
        return self.device.experts_ns(layer, experts, tokens * self._shape.top_k / active)

    def cpu_experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """See `ComputeCosts`."""
        if not experts:
            return 0
        rows_per_expert = tokens * self._shape.top_k / active
        expert_bytes = self._shape.expert_bytes[layer]
        return self.host.experts_ns(experts, expert_bytes, rows_per_expert, self._shape.bytes_per_weight)

    @cached_property
    def host(self) -> HostCosts:
        """The host's part.

        Raises:
            ProfileError: the profile knows no host.
        """
        return HostCosts(self._profile, self._cpu_threads)

    def overhead_ns(self, tokens: int) -> int:
        """See `ComputeCosts`. The head runs for the last token alone."""
        return self.device.head_ns(1)

    def decide_ns(self, loads: int) -> int:
        """See `ComputeCosts`. As much as a launch where the host does not say."""
        return round(self._decide_ns + loads * self._decide_per_load_ns)

    def predict_ns(self, layer: int, source: str = "") -> int:
        """See `ComputeCosts`. A router is small: charged as one launch."""
        return self.device.launch_ns


class Sharing(NamedTuple):
    """Further times of a layer that device and CPU share; known of calibrated machines alone."""

    start_ns: int
    """Handing experts to the CPU."""
    device_ns: int
    """The device's part while another runs on the CPU."""
    cpu_ns: int
    """The CPU's part while another runs on the device."""


class CostModel:
    """All costs of one model on one machine.

    Uses the measured tables where the profile was calibrated with this very model, else the data sheet.

    Args:
        profile: the machine.
        shape: the model.
        cpu_threads: for experts on the CPU; None: as many as the profile counts on (`host.threads`, else all cores; one
            where the machine was calibrated).

    Raises:
        ProfileError: a rate that is needed is zero, or nobody measured so many threads.
    """

    def __init__(self, profile: HardwareProfile, shape: ModelShape, cpu_threads: int | None = None) -> None:
        self._profile = profile
        self._cpu_threads = cpu_threads
        self._shape = shape
        self.link = LinkCosts(profile, shape)
        self.issue_ns = self.link.issue_ns
        measured = profile.measured
        self.is_measured = measured is not None and measured.model == shape.name
        self.compute: ComputeCosts
        self.sharing = Sharing(0, 0, 0)
        if measured is not None and self.is_measured:
            measured = measured.with_cpu_threads(cpu_threads)
            self.compute = MeasuredCompute(measured, shape.num_moe_layers)
            parts = (measured.cpu_start_ns, measured.cpu_split_ns, measured.cpu_beside_ns)
            self.sharing = Sharing(*map(round, parts))
        else:
            self.compute = RooflineCompute(profile, shape, cpu_threads)
        self._wakeup_ns = round(profile.link.wakeup_ns.value)
        self._lost_after: tuple[Sequence[float], Sequence[float]] | None = None
        """Lengths of stalls and what is lost after each, where that was measured with this model."""
        if self.is_measured and measured is not None and measured.stall_ns:
            self._lost_after = (0.0, *measured.stall_ns), (0.0, *measured.wakeup_ns)

    @property
    def has_constant_wakeup(self) -> bool:
        """Whether `wakeup_ns` is the same for all stalls."""
        return self._lost_after is None

    def wakeup_ns(self, stall_ns: int) -> int:
        """Time lost after a stall: by its length where that was measured with this model, else the link's constant.

        In proportion below the shortest stall that was measured, and constant beyond the longest.
        """
        if self._lost_after is None:
            return self._wakeup_ns
        stalls, lost = self._lost_after
        return interpolate_ns(stalls, lost, min(stall_ns, stalls[-1]))

    def copy_ns(self, num_bytes: int) -> int:
        """One load over the link, from its start to its landing, memory to itself."""
        return self.link.copy_ns(num_bytes)

    def load_issue_ns(self, num_bytes: int) -> int:
        """What submitting a load takes of the host's thread."""
        return self.link.load_issue_ns(num_bytes)

    def dense_parts_ns(self, tokens: int, context: int) -> dict[str, int]:
        """What `dense_ns` of all layers consists of: attention, router, shared experts and launches, as far as the
        shape tells them apart; empty where compute was measured, which tells nothing apart."""
        if not isinstance(self.compute, RooflineCompute):
            return {}
        return self.compute.device.pass_parts_ns(tokens, context)

    def drafting_ns(self, draft: DraftSettings | None, drafts: int) -> int:
        """Making `drafts` tokens for one verify pass: as measured, else see `simulator.costs.drafting`."""
        measured = self._draft_costs(draft)
        if measured is not None:
            return interpolate_ns(measured.drafts, measured.drafting_ns, drafts) if drafts else 0
        return drafting_ns(self._profile, draft, drafts)

    def verify_overhead_ns(self, draft: DraftSettings | None, tokens: int) -> int:
        """A verify pass beside its layers and drafting."""
        measured = self._draft_costs(draft)
        if measured is None:
            return self.compute.overhead_ns(tokens)
        return interpolate_ns((0, *measured.drafts), (measured.overhead_ns[0], *measured.overhead_ns), tokens - 1)

    def _draft_costs(self, draft: DraftSettings | None) -> DraftCosts | None:
        """What was measured of a draft model with this model."""
        measured = self._profile.measured
        if draft is None or measured is None or not self.is_measured or measured.draft is None:
            return None
        return measured.draft if measured.draft.kind == draft.kind else None

    @property
    def plan_ns(self) -> int:
        """Choosing what to load while a pass is drafted, once per pass; as much as a layer's bookkeeping where it was
        not measured."""
        measured = self._profile.measured
        if measured is not None and self.is_measured and measured.plan_ns:
            return round(measured.plan_ns)
        return self.compute.decide_ns(0)

    @property
    def decide_utility_ns(self) -> int:
        """Further bookkeeping per layer where utilities are kept."""
        return round(self._profile.measured.decide_utility_ns) if self.is_measured and self._profile.measured else 0

    def contention(self, layer: int) -> Contention:
        """How many times longer CPU experts of a layer, and copies, take for as long as both run.

        (1, 1) where the profile knows no host.
        """
        if self._profile.host is None:
            return ALONE
        expert_bytes = self._shape.expert_bytes[layer]
        return self._host.contention(expert_bytes, self._shape.bytes_per_weight, self.link.bytes_per_s)

    @cached_property
    def _host(self) -> HostCosts:
        return HostCosts(self._profile, None if self.is_measured else self._cpu_threads)


def interpolate_ns(points: Sequence[float], values: Sequence[float], at: float) -> int:
    """Linear interpolation; beyond the last point in proportion to it, below the first its value."""
    if at <= points[0]:
        return round(values[0])
    if at >= points[-1]:
        return round(values[-1] * at / points[-1])
    right = bisect_left(points, at)
    left = right - 1
    share = (at - points[left]) / (points[right] - points[left])
    return round(values[left] + share * (values[right] - values[left]))
