"""Random traces, configurations and machines for property tests, and an observer of the offload core."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st

from simulator.cost_model import CostModel
from simulator.executed import executed_routing
from simulator.hot_experts import with_hot_experts
from simulator.machine import Machine
from simulator.micro_batch import split_prefill
from simulator.policies.belady import future_uses
from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.capacity import plan_capacity
from simulator.policies.config import OffloadConfig, parse_config
from simulator.policies.core import OffloadCore
from simulator.policies.prefetch import PREFETCH_POLICIES, make_prefetch_policy
from tests.simulator.builders import make_hardware, make_host, make_shape, mixed_trace
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Span
from trace_capture.trace import Trace


class Case(NamedTuple):
    """One replay."""

    trace: Trace
    hardware: HardwareProfile
    config: OffloadConfig

    def __repr__(self) -> str:
        passes = [(item.phase.name, self.trace.pass_experts(item)) for item in self.trace.passes]
        chosen = self.config.model_dump(exclude_defaults=True)
        return f"Case(sizes={self.trace.shape.expert_bytes}, passes={passes}, config={chosen})"


@st.composite
def traces(draw: Any, equal_sizes: bool = False) -> Trace:
    """Prefill, decode and verify passes of a small model, with predictors that are right now and then."""
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(3, 8))
    top_k = draw(st.integers(1, min(3, experts - 1)))
    sizes = [1000] * layers if equal_sizes else draw(st.lists(st.integers(1, 3000), min_size=layers, max_size=layers))
    shape = make_shape(layers, experts, top_k, sizes, kv_bytes_per_token=draw(st.integers(0, 99)))
    seed, decode = draw(st.integers(0, 999)), draw(st.integers(0, 8))
    trace = mixed_trace(shape, seed, sequences=draw(st.integers(1, 2)), decode=decode, right=draw(st.floats(0, 1)))
    for name in ("estimator", "hybrid"):
        trace.predicted[name] = trace.predicted["quasi-hidden"]
    return trace


@st.composite
def machines(draw: Any) -> HardwareProfile:
    """Links and devices from instant to slow."""
    costs = {name: draw(st.integers(0, 400)) for name in ("latency_ns", "issue_ns", "wakeup_ns", "launch_ns")}
    rates = {"memory_bytes_per_s": draw(st.floats(1e9, 1e12))}
    return make_hardware(
        draw(st.floats(1e8, 1e11)), host=make_host(contended_ratio=draw(st.floats(0.3, 1))), **rates, **costs
    )


@st.composite
def cases(draw: Any) -> Case:
    """Any registered strategy on any trace, with a budget between the least and everything."""
    trace = draw(traces())
    policy, source = draw(st.sampled_from(sorted(CACHE_POLICIES))), draw(st.sampled_from(sorted(PREFETCH_POLICIES)))
    modes = ["hint", "verify", "commit"] if make_prefetch_policy(source).prediction else ["hint"]
    scope = draw(st.sampled_from(["layer", "global"]))
    return Case(trace, draw(machines()), complete(trace, {
        "cache": {
            "policy": policy,
            "scope": scope,
            "budget_bytes": draw(budgets(trace, scope)) if policy != "resident" else trace.shape.total_expert_bytes,
            "preload": draw(st.sampled_from([None, True, False])),
            "seed": draw(st.integers(0, 3)),
        },
        "prefetch": {
            "source": source,
            "mode": draw(st.sampled_from(modes)),
            "max_experts": draw(st.none() | st.integers(1, 4)),
            "recall": draw(st.floats(0, 1)),
        },
        "prefill": {
            "strategy": draw(st.sampled_from(["on-demand", "stream"])),
            "micro_batch": draw(st.none() | st.integers(1, 5)),
        },
        "cpu": {"policy": draw(st.sampled_from(["none", "misses", "threshold"])), "max_tokens": 2},
        "device": {"serial": draw(st.booleans())},
    }))  # fmt: skip


def budgets(trace: Trace, scope: str) -> st.SearchStrategy[int]:
    """Bytes from the least that a scope needs to room for all experts."""
    shape = trace.shape
    least = shape.top_k * (sum(shape.expert_bytes) if scope == "layer" else max(shape.expert_bytes))
    return st.integers(least, shape.total_expert_bytes)


def complete(trace: Trace, table: dict[str, Any]) -> OffloadConfig:
    """The configuration with its hot experts counted on the trace."""
    return with_hot_experts(parse_config(table), trace)


class Watched(NamedTuple):
    """What a replay did: calls and plans, spans, the machine, and the rows it replayed."""

    log: list[tuple[Any, ...]]
    spans: list[Span]
    machine: Machine
    trace: Trace


def replay(case: Case, check: Callable[[OffloadCore], None]) -> Watched:
    """Replay a case as `simulate` does; `check` sees the core between all calls to it, and at the end."""
    trace = split_prefill(case.trace, case.config.prefill.micro_batch)
    log = _Watch()
    future = future_uses(executed_routing(trace, case.config).lookups())
    core = OffloadCore.from_config(case.config, trace.shape, log, future)
    log.check = lambda: check(core)
    machine = Machine(trace, CostModel(case.hardware, trace.shape), core, case.config.device.serial, True)
    machine.run()
    check(core)
    return Watched(log, machine.spans(), machine, trace)


class _Watch(list[tuple[Any, ...]]):
    """A log of calls and plans; whoever adds to it is about to change something, or has just done so."""

    check: Callable[[], None] = staticmethod(lambda: None)

    def append(self, entry: tuple[Any, ...]) -> None:
        self.check()
        super().append(entry)


def bytes_per_partition(core: OffloadCore, case: Case) -> list[tuple[int, int]]:
    """Bytes with a place on the device, those on their way included, beside the size, for each partition."""
    capacity = plan_capacity(case.config.cache, case.trace.shape)
    held = [0] * len(capacity.partition_bytes)
    for layer, _ in core.resident():
        held[capacity.partition_of_layer[layer]] += case.trace.shape.expert_bytes[layer]
    return list(zip(held, capacity.partition_bytes, strict=True))


def decode_rows(seed: int, layers: int, experts: int, top_k: int, tokens: int) -> list[list[list[int]]]:
    """Rows of a decode trace whose tokens share some of their experts."""
    source = random.Random(seed)
    rows = [[source.sample(range(experts), top_k) for _ in range(layers)]]
    for _ in range(tokens - 1):
        before = rows[-1]
        rows.append([ids if source.random() < 0.3 else source.sample(range(experts), top_k) for ids in before])
    return rows
