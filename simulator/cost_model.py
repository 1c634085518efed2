"""How long each piece of a pass takes, in whole nanoseconds, from a hardware profile and a model shape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from simulator.costs.drafting import drafting_ns
from simulator.costs.host import ALONE, Contention, HostCosts
from simulator.costs.rates import positive, value_or
from trace_capture.hardware import HardwareProfile, MeasuredCosts
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

    def predict_ns(self, layer: int) -> int:
        """Predicting the experts of the layer after `layer`."""


class MeasuredCompute:
    """Compute times from a calibration on this machine."""

    def __init__(self, costs: MeasuredCosts) -> None:
        self._costs = costs

    def dense_ns(self, layer: int, tokens: int, context: int) -> int:
        """See `ComputeCosts`."""
        return interpolate_ns(self._costs.tokens, self._costs.dense_ns, tokens)

    def experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """See `ComputeCosts`. A layer run in waves is charged by the share of experts in the wave, but never
        less than a one-token call."""
        whole = interpolate_ns(self._costs.tokens, self._costs.experts_ns, tokens)
        if experts == active:
            return whole
        return max(round(whole * experts / active), interpolate_ns(self._costs.tokens, self._costs.experts_ns, 1))

    def cpu_experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """See `ComputeCosts`. The table's time by the share of experts."""
        whole = interpolate_ns(self._costs.tokens, self._costs.cpu_experts_ns, tokens)
        return round(whole * experts / active)

    def overhead_ns(self, tokens: int) -> int:
        """See `ComputeCosts`."""
        return interpolate_ns(self._costs.tokens, self._costs.pass_overhead_ns, tokens)

    def decide_ns(self, loads: int) -> int:
        """See `ComputeCosts`."""
        return round(self._costs.decide_ns + loads * self._costs.decide_per_load_ns)

    def predict_ns(self, layer: int) -> int:
        """See `ComputeCosts`."""
        return round(self._costs.predict_ns)


class RooflineCompute:
    """Compute times from a data sheet: the larger of bytes over memory rate and operations over throughput, plus
    a launch. Two operations per weight and token; bookkeeping and prediction are charged as launches."""

    def __init__(self, profile: HardwareProfile, shape: ModelShape) -> None:
        device = profile.device
        read_ratio = value_or(device.read_ratio, 1.0)
        self._bytes_per_s = read_ratio * positive(device.memory_bytes_per_s, "device.memory_bytes_per_s", profile)
        self._flops_per_s = positive(device.flops_per_s, "device.flops_per_s", profile)
        self._profile = profile
        self._launch_ns = device.launch_ns.value
        self._shape = shape
        self._weight_bytes = weight_bytes(shape.weight_dtype)

    def dense_ns(self, layer: int, tokens: int, context: int) -> int:
        """See `ComputeCosts`."""
        cache_bytes = self._shape.kv_bytes_per_token / self._shape.num_layers * context
        return self._roofline(self._shape.dense_bytes[layer], tokens, cache_bytes)

    def experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """See `ComputeCosts`."""
        rows_per_expert = tokens * self._shape.top_k / active
        return self._roofline(experts * self._shape.expert_bytes[layer], rows_per_expert, 0.0)

    def cpu_experts_ns(self, layer: int, tokens: int, experts: int, active: int) -> int:
        """See `ComputeCosts`."""
        if not experts:
            return 0
        rows_per_expert = tokens * self._shape.top_k / active
        return self._host.experts_ns(experts, self._shape.expert_bytes[layer], rows_per_expert, self._weight_bytes)

    @cached_property
    def _host(self) -> HostCosts:
        return HostCosts(self._profile)

    def overhead_ns(self, tokens: int) -> int:
        """See `ComputeCosts`."""
        return self._roofline(self._shape.head_bytes, 1, 0.0)

    def decide_ns(self, loads: int) -> int:
        """See `ComputeCosts`."""
        return round(self._launch_ns)

    def predict_ns(self, layer: int) -> int:
        """See `ComputeCosts`."""
        return round(self._launch_ns)

    def _roofline(self, weight_bytes: float, rows: float, other_bytes: float) -> int:
        flops = 2.0 * rows * weight_bytes / self._weight_bytes
        seconds = max((weight_bytes + other_bytes) / self._bytes_per_s, flops / self._flops_per_s)
        return round(seconds * 1e9 + self._launch_ns)


WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes per weight by dtype; quantised formats not listed are taken as two bytes for operation counts."""


def weight_bytes(dtype: str) -> float:
    """Bytes per weight of a dtype by name, or written as bits per weight, such as `4.84 bits`."""
    number, _, unit = dtype.partition(" ")
    return float(number) / 8 if unit == "bits" else WEIGHT_BYTES.get(dtype, 2.0)


class CostModel:
    """All costs of one model on one machine.

    Uses the measured tables where the profile was calibrated with this very model, else the data sheet.

    Raises:
        ProfileError: a rate that is needed is zero.
    """

    def __init__(self, profile: HardwareProfile, shape: ModelShape) -> None:
        link = profile.link
        self._profile = profile
        self._shape = shape
        self._bytes_per_s = positive(link.h2d_bytes_per_s, "link.h2d_bytes_per_s", profile)
        self._latency_ns = link.latency_ns.value
        self.issue_ns = round(link.issue_ns.value)
        self.wakeup_ns = round(link.wakeup_ns.value)
        measured = profile.measured
        self.is_measured = measured is not None and measured.model == shape.name
        self.compute: ComputeCosts
        if measured is not None and self.is_measured:
            self.compute = MeasuredCompute(measured)
        else:
            self.compute = RooflineCompute(profile, shape)

    def copy_ns(self, num_bytes: int) -> int:
        """One copy over the link, from its start to its landing, memory to itself."""
        return round(self._latency_ns + num_bytes / self._bytes_per_s * 1e9)

    def drafting_ns(self, draft: DraftSettings | None, drafts: int) -> int:
        """Making `drafts` tokens for one verify pass; see `simulator.costs.drafting`."""
        return drafting_ns(self._profile, draft, drafts)

    def contention(self, layer: int) -> Contention:
        """How many times longer CPU experts of a layer, and copies, take for as long as both run.

        (1, 1) where the profile knows no host.
        """
        if self._profile.host is None:
            return ALONE
        expert_bytes = self._shape.expert_bytes[layer]
        return self._host.contention(expert_bytes, weight_bytes(self._shape.weight_dtype), self._bytes_per_s)

    @cached_property
    def _host(self) -> HostCosts:
        return HostCosts(self._profile)


def interpolate_ns(points: Sequence[int], values: Sequence[float], at: int) -> int:
    """Linear interpolation; beyond the last point in proportion to tokens, below the first its value."""
    if at <= points[0]:
        return round(values[0])
    if at >= points[-1]:
        return round(values[-1] * at / points[-1])
    right = bisect_left(points, at)
    left = right - 1
    share = (at - points[left]) / (points[right] - points[left])
    return round(values[left] + share * (values[right] - values[left]))
