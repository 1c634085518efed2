"""The cost model laid open: every term of one decode token, and the numbers behind it with their origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from simulator.cost_model import CostModel, MeasuredCompute
from simulator.costs.device import DeviceCosts
from simulator.costs.link import RAM_SHARE_FOR_EXPERTS
from trace_capture.hardware import HardwareProfile, Kind, Quantity
from trace_capture.model_shape import ModelShape
from trace_capture.trace import DraftSettings

_MEASURED = Quantity(value=0, kind="measured", source="tables of the calibration")
_DEVICE = ("device.memory_bytes_per_s", "device.read_ratio", "device.flops_per_s")
_HOST = (
    "host.ram_bytes_per_s",
    "host.read_ratio",
    "host.cores",
    "host.threads",
    "host.core_bytes_per_s",
    "host.core_weights_per_s",
    "host.core_flops_per_s",
    "host.half_rate_bytes",
    "host.expert_dispatch_ns",
    "host.layer_dispatch_ns",
)
_LINK = ("link.latency_ns",)
_DISK = ("disk.bytes_per_s", "disk.latency_ns", "host.ram_bytes")


@dataclass(frozen=True)
class TermCost:
    """One term.

    Attributes:
        name: as in the cost model.
        per: what it is due for.
        each_ns: once.
        times: how often per token.
        numbers: what it is worked out from, by name in the profile.
    """

    name: str
    per: str
    each_ns: float
    times: float
    numbers: dict[str, Quantity]

    @property
    def token_ns(self) -> float:
        """Per token."""
        return self.each_ns * self.times

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Origins of its numbers, the strongest first."""
        found = {number.kind for number in self.numbers.values()}
        return tuple(kind for kind in get_args(Kind) if kind in found)


def term_costs(
    profile: HardwareProfile, shape: ModelShape, context: int = 0, draft: DraftSettings | None = None
) -> list[TermCost]:
    """The terms of one decode token with `context` tokens before it; those a profile cannot tell are left out.

    Experts appear three times, for each place where they can run or come from: on the device, on the CPU, and over
    the link. Which of them a token pays is the strategy's choice.

    Raises:
        ProfileError: a rate that is needed is zero.
    """
    costs = CostModel(profile, shape)
    layers, top_k = shape.num_moe_layers, shape.top_k
    compute = costs.compute
    terms = _dense_terms(profile, shape, costs, context)
    device = {"measured": _MEASURED} if costs.is_measured else _numbers(profile, *_DEVICE, "device.launch_ns")
    experts_ns = sum(compute.experts_ns(layer, 1, top_k, top_k) for layer in range(layers)) / layers
    terms.append(TermCost("device experts", f"layer, {top_k} experts", experts_ns, layers, device))
    terms.append(TermCost("head", "pass", compute.overhead_ns(1), 1, device))
    decide = {"measured": _MEASURED}
    if not costs.is_measured:
        decide = _numbers(profile, "host.decide_ns") or _numbers(profile, "device.launch_ns")
    terms.append(TermCost("decide", "layer", compute.decide_ns(0), layers, decide))
    launch = {"measured": _MEASURED} if costs.is_measured else _numbers(profile, "device.launch_ns")
    terms.append(TermCost("predict", "layer, with prediction", compute.predict_ns(0), layers, launch))
    if profile.host is not None or costs.is_measured:
        cpu_ns = sum(compute.cpu_experts_ns(layer, 1, top_k, top_k) for layer in range(layers)) / layers
        numbers = {"measured": _MEASURED} if costs.is_measured else _numbers(profile, *_HOST)
        terms.append(TermCost("CPU experts", f"layer, {top_k} experts", cpu_ns, layers, numbers))
    terms += _link_terms(profile, shape, costs)
    if draft is not None and draft.weight_bytes:
        numbers = _numbers(profile, "device.memory_bytes_per_s", "device.launch_ns")
        terms.append(TermCost("drafting", "draft", costs.drafting_ns(draft, 1), draft.gamma, numbers))
    return terms


def _dense_terms(profile: HardwareProfile, shape: ModelShape, costs: CostModel, context: int) -> list[TermCost]:
    layers = shape.num_moe_layers
    if isinstance(costs.compute, MeasuredCompute):
        return [TermCost("dense", "layer", costs.compute.dense_ns(0, 1, context), layers, {"measured": _MEASURED})]
    device = DeviceCosts(profile, shape)
    parts = [device.dense_parts_ns(layer, 1, context) for layer in range(layers)]
    terms = []
    for name in parts[0]:
        numbers = _numbers(profile, *(("device.launch_ns",) if name == "launch" else _DEVICE))
        terms.append(TermCost(name, "layer", sum(part[name] for part in parts) / layers, layers, numbers))
    return terms


def _link_terms(profile: HardwareProfile, shape: ModelShape, costs: CostModel) -> list[TermCost]:
    layers, loads = shape.num_moe_layers, shape.num_moe_layers * shape.top_k
    rate = "link.h2d_bytes_per_s" if profile.link.host_memory == "pinned" else "link.pageable_bytes_per_s"
    link = _numbers(profile, rate, *_LINK, "link.chunk_bytes")
    if costs.link.disk_ratio:
        link |= _numbers(profile, *_DISK)
    copy_ns = sum(costs.copy_ns(size) for size in shape.expert_bytes) / layers
    issue_ns = sum(costs.load_issue_ns(size) for size in shape.expert_bytes) / layers
    issue = _numbers(profile, "link.issue_ns", "link.chunk_bytes")
    wakeup_ns = costs.wakeup_ns(round(shape.top_k * copy_ns))  # after the copies of a whole top-k
    terms = [
        TermCost("copy", "expert loaded", copy_ns, loads, link),
        TermCost("issue", "expert loaded", issue_ns, loads, issue),
        TermCost("wake-up", "stall, at most one a layer", wakeup_ns, layers, _numbers(profile, "link.wakeup_ns")),
    ]
    contention = costs.contention(0)
    if contention.cpu_ratio > 1:
        numbers = _numbers(profile, "host.ram_bytes_per_s", "host.contended_ratio", rate)
        slower_ns = (contention.copy_ratio - 1) * copy_ns
        terms.append(TermCost("RAM contention", "expert loaded while the CPU runs experts", slower_ns, loads, numbers))
    if profile.disk is not None:
        disk_ns = sum(costs.link.disk_ns(size) for size in shape.expert_bytes) / layers
        numbers = _numbers(profile, *_DISK)
        terms.append(TermCost("disk", "expert not in memory", disk_ns, loads * costs.link.disk_ratio, numbers))
    return terms


def _numbers(profile: HardwareProfile, *names: str) -> dict[str, Quantity]:
    """Numbers of a profile by dotted name; those it does not have are left out."""
    found: dict[str, Quantity] = {}
    for name in names:
        table, _, key = name.partition(".")
        number = getattr(getattr(profile, table), key, None)
        if isinstance(number, Quantity):
            found[name] = number
    return found


def headlines(terms: list[TermCost]) -> dict[str, float]:
    """Milliseconds per decode token when all experts are resident, all run on the CPU, or all are loaded and nothing
    overlaps: the corners between which every strategy lies."""
    own = {term.name: term.token_ns for term in terms}
    base = sum(own.get(name, 0.0) for name in ("dense", "attention", "router", "shared", "launch", "head", "decide"))
    resident = base + own["device experts"]
    result = {"all_resident_ms": resident / 1e6}
    if "CPU experts" in own:
        result["all_on_cpu_ms"] = (base + own["CPU experts"]) / 1e6
    result["all_loaded_ms"] = (resident + own["copy"] + own["issue"] + own["wake-up"]) / 1e6
    return result


def memory_need(profile: HardwareProfile, shape: ModelShape, context: int) -> dict[str, Any]:
    """Bytes of experts, of everything else and of the cache, beside what device and host have."""
    host = profile.host
    return {
        "experts_bytes": shape.total_expert_bytes,
        "other_weights_bytes": sum(shape.dense_bytes) + shape.head_bytes,
        "cache_bytes": shape.cache_bytes(context),
        "device_bytes": profile.device.memory_bytes.value,
        "host_bytes_for_experts": None if host is None else host.ram_bytes.value * RAM_SHARE_FOR_EXPERTS,
    }
