"""Predicted decode rate of a published operating point, out of the terms of the simulator's cost model.

Rows where no identity of experts matters (all resident, split by layers, all experts on the CPU) are the expected
cost of a token. For caches the hit rate is the row's own, else a closed form of the share of experts that is held
(`expected_hit_rate`): replaying a synthetic trace would only give back the locality that was put into it, a thousand
times slower. Copies and CPU experts of misses then cost what the cost model charges for them.

The efficiency of the engine family (`published_score`) is applied by the caller; here engines are as fast as the
terms allow.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.costs.rates import value_or
from simulator.validation.published_case import (
    Case,
    find_case,
    hit_rate,
    is_whole_layer_split,
    memory_for_experts,
    stated_ratio,
    whole_layer_share,
)
from simulator.validation.published_machine import COPIES_PER_EXPERT
from simulator.validation.published_rows import PublishedRow, first_number
from simulator.validation.published_scope import NO_DECODE, out_of_scope, ranking_only_reason

VERIFY_EXPERTS_PER_DRAFT = 0.9
"""Further experts' work per drafted token: consecutive tokens share few experts, and rows on a CPU do not amortise."""
VERIFY_DENSE_PER_DRAFT = 0.5
"""Further time of the rest per drafted token: step 2.6 + 0.45 n of a plain step with n drafts (ik_llama.cpp 1630)."""
DEFAULT_DRAFTS, DEFAULT_ACCEPTANCE = 1, 0.8
CAPTURED_LAUNCH_RATIO = 0.4
"""Launch cost in a captured graph, which engines replay where everything is on the card, over that of an eager one."""
ALL_REDUCE_NS = 15_000.0
"""Adding up one layer's halves over cards that share its matrices; twice per layer."""
_MODULE_CALL_NS = 2e6
"""One module moved in and out by hooks of the framework."""


@dataclass(frozen=True)
class Prediction:
    """A row with its predicted rate, before the efficiency of its engine family."""

    row: PublishedRow
    family: str
    token_ns: float
    terms_ns: dict[str, float]
    assumed: tuple[str, ...]
    ranking_only: str | None
    """Why it is left out of error statistics; None where it counts."""

    @property
    def per_s(self) -> float:
        """Tokens per second."""
        return 1e9 / self.token_ns


def predict_row(row: PublishedRow) -> Prediction | str:
    """The prediction, or the reason why there is none."""
    reason = out_of_scope(row)
    if reason is not None:
        return reason
    if not row.decode_per_s:
        return NO_DECODE
    case = find_case(row)
    if isinstance(case, str):
        return case
    terms = _terms(case)
    return Prediction(
        row=row,
        family=case.traits.family,
        token_ns=sum(terms.values()),
        terms_ns=terms,
        assumed=tuple(case.assumed),
        ranking_only=ranking_only_reason(row, precision_given=case.precision_given),
    )


def _terms(case: Case) -> dict[str, float]:
    strategy = case.row.strategy
    if strategy == "cpu_only":
        return _cpu_only(case)
    if strategy == "all_resident":
        return _placed(case, 0.0)
    if strategy in ("cpu_experts", "layer_split"):
        return _layer_split(case)
    if strategy == "speculative":
        plain = _layer_split(case) if case.row.cache_slots is None else _cached(case)
        return _verified(case, plain)
    return _cached(case)


def _dense(case: Case) -> dict[str, float]:
    """Attention, shared experts and head on the card; linear attention launches one more group of kernels."""
    compute, device = case.costs.compute, case.machine.profile.device
    launch = device.launch_ns.value
    each = compute.dense_ns(0, 1, case.context) - launch
    launches = case.counts.layers + case.counts.linear_attention_layers
    return {
        "dense": case.layers * each / case.ranks,
        "launch": launches * launch * case.traits.launch_ratio,
        "head": compute.overhead_ns(1) / case.ranks,
        "between cards": case.counts.layers * 2 * ALL_REDUCE_NS if case.ranks > 1 else 0.0,
    }


def _device_experts(case: Case, experts: float) -> float:
    """`experts` routed experts per token on the card, over all layers, without launches."""
    launch = case.machine.profile.device.launch_ns.value
    each = case.costs.compute.experts_ns(0, 1, 1, case.shape.top_k) - launch
    return experts * each / case.ranks


def _cpu_experts(case: Case, layers: float, experts: float) -> float:
    """`layers` layers that run `experts` experts each (may be a fraction) on the CPU."""
    if layers <= 0 or experts <= 0:
        return 0.0
    one, two = (case.costs.compute.cpu_experts_ns(0, 1, n, case.shape.top_k) for n in (1, 2))
    each = two - one
    work = experts * each * (1 if "no repack" not in case.row.text else 2)
    return layers * (work + _handover(case))


def _handover(case: Case) -> float:
    """From the card to the CPU and back, once per layer. Engines run a fixed graph, so it is due without work too."""
    host = case.machine.profile.host
    return 0.0 if host is None else host.layer_dispatch_ns.value


def _placed(case: Case, cpu_layers: float) -> dict[str, float]:
    """Experts of `cpu_layers` layers on the CPU, all others resident."""
    top_k, resident = case.shape.top_k, case.layers - cpu_layers
    terms = _dense(case)
    captured = CAPTURED_LAUNCH_RATIO if cpu_layers <= 0 and case.traits.launch_ratio <= 1 else 1.0
    launches = resident * case.machine.profile.device.launch_ns.value * captured
    return terms | {
        "launch": terms["launch"] * captured,
        "experts": _device_experts(case, resident * top_k) + launches,
        "cpu": _cpu_experts(case, cpu_layers, top_k),
    }


def _layer_split(case: Case) -> dict[str, float]:
    row = case.row
    if is_whole_layer_split(row):
        return _whole_layers(case)
    layers = case.offloaded_layers
    if layers is None and row.strategy == "cpu_experts":
        layers = case.layers
    ratio = stated_ratio(row)
    if layers is None and ratio is not None:
        layers = (1 - ratio) * case.layers
    if layers is None:
        case.assumed.append("placement")
        held = memory_for_experts(case) / (case.shape.num_experts * case.shape.expert_bytes[0])
        layers = max(0.0, case.layers - float(int(held)))
    return _placed(case, min(float(case.layers), layers))


def _whole_layers(case: Case) -> dict[str, float]:
    """Whole decoder layers on the card as memory allows, the others wholly on the CPU."""
    case.assumed.append("placement")
    share = whole_layer_share(case)
    on_card, on_cpu = _placed(case, 0.0), _cpu_only(case)
    return {"device layers": share * sum(on_card.values()), "cpu layers": (1 - share) * sum(on_cpu.values())}


def _cpu_only(case: Case) -> dict[str, float]:
    """Everything on the CPU: a layer's other weights are read like experts, in four products."""
    shape, host = case.shape, case.costs.compute
    per_byte = (host.cpu_experts_ns(0, 1, 2, shape.top_k) - host.cpu_experts_ns(0, 1, 1, shape.top_k)) / (
        shape.expert_bytes[0]
    )
    other = sum(shape.dense_bytes) + shape.head_bytes + shape.kv_bytes_per_token * case.context
    profile = case.machine.profile.host
    dispatch = 0.0 if profile is None else 4 * shape.num_layers * profile.expert_dispatch_ns.value
    return {"cpu dense": other * per_byte, "cpu": shape.bytes_per_token * per_byte, "dispatch": dispatch}


def _cached(case: Case) -> dict[str, float]:
    """Experts cached on the card, prefetched, fetched on demand, or divided between card and CPU."""
    row, shape, launch = case.row, case.shape, case.machine.profile.device.launch_ns.value
    layers = float(case.layers) if case.offloaded_layers is None else case.offloaded_layers
    if row.strategy == "on_demand" and case.traits.streaming != "active experts":
        return _streamed(case)
    hit = hit_rate(case)
    misses = layers * shape.top_k * (1 - hit)
    on_card = case.layers * shape.top_k
    base = _dense(case)
    if row.strategy == "hybrid" and not case.traits.misses_on_cpu:
        copy, cpu = _copy(case), _cpu_experts(case, 1, 1.0)
        shared = misses / (1 / copy + 1 / cpu)
        return base | {
            "experts": _device_experts(case, on_card - misses / 2) + case.layers * launch,
            "copy and cpu": shared,
        }
    if case.traits.misses_on_cpu and row.strategy not in ("on_demand", "prefetch"):
        on_cpu = _cpu_experts(case, layers, shape.top_k * (1 - hit))
        on_device = _device_experts(case, on_card - misses) + case.layers * launch
        if case.traits.runs_both_at_once:
            return base | {"experts": on_device - case.layers * launch, "cpu": on_cpu}
        return base | {
            "experts": on_device,
            "cpu": on_cpu,
            "route on host": layers * _handover(case) if case.traits.reads_router_on_host else 0.0,
        }
    groups = shape.top_k if "serial per-expert" in row.text else 1
    compute = _device_experts(case, on_card) + case.layers * groups * launch
    copies = misses * _copy(case)
    if row.strategy == "prefetch":
        hidden = 0.9 * min(copies, compute + sum(base.values()))
        return base | {"experts": compute, "exposed copies": copies - hidden}
    return base | {"experts": compute, "copies": copies}


def _copy(case: Case) -> float:
    """One expert over the link, issued matrix by matrix and waited for."""
    return case.costs.copy_ns(case.shape.expert_bytes[0]) + COPIES_PER_EXPERT * case.costs.issue_ns


def _streamed(case: Case) -> dict[str, float]:
    """Engines that move weights without looking at the router: whole layers, or module by module as they run."""
    shape, link = case.shape, case.machine.profile.link
    whole = shape.total_expert_bytes + sum(shape.dense_bytes)
    away = max(0.0, 1 - 0.85 * case.machine.device_memory_bytes / whole)
    base = _dense(case) | {
        "experts": _device_experts(case, case.layers * shape.top_k),
    }
    if case.traits.streaming == "all weights":
        return base | {"copies": case.costs.copy_ns(whole)}
    if case.traits.streaming == "whole layers":
        return base | {"copies": away * case.costs.copy_ns(whole)}
    pageable = link.pageable_bytes_per_s or link.h2d_bytes_per_s
    moved = away * (shape.bytes_per_token + sum(shape.dense_bytes))
    modules = 4 * shape.num_layers + COPIES_PER_EXPERT * shape.top_k * case.layers
    return base | {"copies": moved / pageable.value * 1e9, "hooks": modules * _MODULE_CALL_NS}


def _verified(case: Case, plain: dict[str, float]) -> dict[str, float]:
    """A step that drafts and verifies, per token that it yields."""
    text, launch = case.row.text, case.machine.profile.device.launch_ns.value
    drafts = int(
        first_number(r"n_max (\d+)|\bn (\d+)|mtp (\d+) draft|length (\d+)|draft-max (\d+)", text) or DEFAULT_DRAFTS
    )
    accepted_ratio = first_number(r"acceptance (?:rate )?(?:about )?(0?\.\d+)", text)
    percent = first_number(r"acceptance (?:rate )?(?:about )?(\d+(?:\.\d+)?) ?%", text)
    accepted_ratio = percent / 100 if percent is not None else accepted_ratio
    accepted = sum(DEFAULT_ACCEPTANCE**n for n in range(1, drafts + 1))
    yielded = 1 + (accepted if accepted_ratio is None else drafts * accepted_ratio)
    fixed = ("dense", "launch", "head")
    terms = {
        name: value * (1 + drafts * (VERIFY_DENSE_PER_DRAFT if name in fixed else VERIFY_EXPERTS_PER_DRAFT)) / yielded
        for name, value in plain.items()
    }
    separate = first_number(r"draft [^|]*?(\d+(?:\.\d+)?)b\b", text)
    if separate is None:
        draft = plain.get("head", 0.0) + 2 * launch + _device_experts(case, case.shape.top_k)
    else:
        device = case.machine.profile.device
        rate = device.memory_bytes_per_s.value * value_or(device.read_ratio, 1.0)
        draft = separate * 1e18 / rate + 30 * launch
    return terms | {"draft": drafts * draft / yielded}
