"""The split of a routed layer: against every threshold tried, and in a replay beside sending misses alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simulator.cost_model import CostModel
from simulator.machine import Machine
from simulator.policies.balanced import Balanced
from simulator.policies.balancer import ExpertTimes, Objective
from simulator.policies.cache import make_cache_policy
from simulator.policies.capacity import describe_partitions, plan_capacity
from simulator.policies.core import OffloadCore
from simulator.policies.placement import MissesOnCpu, PlacementPolicy, PlacementSettings, make_asked
from simulator.policies.prefetch import NoPrefetch
from simulator.policies.utility import UtilitySignal
from tests.simulator.builders import make_config, make_hardware, make_host, make_shape, places_of
from trace_capture.rewindow import rewindow
from trace_capture.synthetic import synthetic_trace


class Told(UtilitySignal):
    """A signal whose states a test sets."""


def times_of(device: list[int], cpu: list[int], device_base: int = 0, cpu_base: int = 0) -> ExpertTimes:
    rows = [np.array(one) for one in ([device], [cpu], [device_base], [cpu_base], [100], [1000])]
    return ExpertTimes(*rows)


@pytest.mark.parametrize("objective", ["longest", "difference"])
def test_split_is_the_best_of_all_thresholds_and_misses_are_always_on_the_cpu(objective: Objective) -> None:
    source = random.Random(0)
    taus = set()
    for _ in range(300):
        signal = Told(1, 16)
        signal.states[0] = [source.randrange(6) for _ in range(16)]
        device = [0] + [source.randint(20, 40) + source.randint(1, 5) * n for n in range(1, 10)]
        cpu = [0] + [source.randint(20, 90) + source.randint(1, 30) * n for n in range(1, 10)]
        bases = source.choice([(0, 0), (10, 60)])
        policy = Balanced(signal, times_of(device, cpu, *bases), objective)
        experts = source.sample(range(16), source.randint(1, 12))
        tokens = [source.randint(1, 12) for _ in experts]
        landed = {expert: source.random() < 0.7 for expert in experts if source.random() < 0.8}
        part = policy.cpu_part(make_asked(0, experts, tokens, places_of(landed, 16)))
        best = None
        for tau in range(7):
            cold = [one for one in experts if not landed.get(one, False) or signal.states[0, one] < tau]
            served = dict(zip(experts, (min(count, 9) for count in tokens), strict=True))
            on_cpu = sum(cpu[served[one]] for one in cold) + bases[1] * bool(cold)
            hot = [one for one in experts if one not in cold]
            on_device = sum(device[served[one]] for one in hot) + bases[0] * bool(hot)
            cost = max(on_cpu, on_device) if objective == "longest" else abs(on_cpu - on_device)
            if best is None or cost < best[0]:
                best = (cost, tau, cold)
        assert best is not None and part == best[2]
        taus.add(best[1])
    assert len(taus) >= 4


def test_as_many_misses_are_loaded_as_let_the_layer_end_sooner() -> None:
    source = random.Random(1)
    loaded = set()
    for _ in range(300):
        signal = Told(1, 16)
        signal.states[0] = [source.randrange(6) for _ in range(16)]
        cpu = [0] + [60 + source.randint(0, 10) * n for n in range(1, 10)]
        device = [0] + [5 + n for n in range(1, 10)]  # copies take 100
        experts = source.sample(range(16), source.randint(1, 12))
        tokens = [source.randint(1, 12) for _ in experts]
        landed = {expert: source.random() < 0.7 for expert in experts if source.random() < 0.3}
        asked = make_asked(0, experts, tokens, places_of(landed, 16))
        part = Balanced(signal, times_of(device, cpu), loads_misses=True).cpu_part(asked)
        served = dict(zip(experts, (min(count, 9) for count in tokens), strict=True))
        absent = sorted((e for e in experts if e not in landed), key=lambda e: (-signal.states[0, e], -served[e]))
        costs = []
        for number in range(len(absent) + 1):
            here = [e for e in experts if landed.get(e, False)] + absent[:number]
            rest = [e for e in experts if e not in here]
            costs.append(max(100 * number + sum(device[served[e]] for e in here), sum(cpu[served[e]] for e in rest)))
        best = costs.index(min(costs))
        assert part == [e for e in experts if not landed.get(e, False) and e not in absent[:best]]
        loaded.add(best)
        fixed = Balanced(signal, times_of(device, cpu), fixed_tau=1, loads_misses=True).cpu_part(asked)
        assert set(absent) <= set(fixed), "without the balancer misses are on the CPU"
    assert len(loaded) >= 4


def test_a_replay_is_faster_than_with_misses_alone_where_the_device_is_the_slower_side() -> None:
    """A device that needs twice as long per expert as the cores: the balance moves cold residents to the CPU."""
    shape = make_shape(layers=3, experts=32, top_k=4, expert_bytes=10_000)
    plain = synthetic_trace(shape, 1, 1, 120, reuse_ratio=0.4, skew=1.3, predictor_recall=0.5, seed=0)
    trace = rewindow(plain, 4, 0.8)
    hardware = make_hardware(bytes_per_s=1e8, memory_bytes_per_s=5e8, host=make_host(ram=1e9, core_rate=1e9))
    config = make_config("utility", budget_ratio=0.6)
    costs = CostModel(hardware, shape)
    total_ns = {}
    for name in ("misses", "balanced"):
        capacity = plan_capacity(config.cache, shape)
        partitions = describe_partitions(config, capacity, shape)
        signal = partitions[0].utility
        assert signal is not None
        counts = range(1, 10)
        device = [[0] + [costs.compute.experts_ns(layer, n, 1, 4) for n in counts] for layer in range(3)]
        cpu = [[0] + [costs.compute.cpu_experts_ns(layer, n, 1, 4) for n in counts] for layer in range(3)]
        zero = np.zeros(3, dtype=np.int64)
        times = ExpertTimes(np.array(device), np.array(cpu), zero, zero, zero, zero)
        policy: PlacementPolicy = Balanced(signal, times)
        if name == "misses":
            policy = MissesOnCpu(PlacementSettings())
        policy.max_admissions = 2
        policies = [make_cache_policy("utility", partition) for partition in partitions]
        core = OffloadCore(shape, capacity, policies, NoPrefetch(), placement=policy)
        machine = Machine(trace, costs, core)
        machine.run()
        total_ns[name] = sum(times.total_ns for times in machine.passes)
    assert total_ns["balanced"] < 0.95 * total_ns["misses"]
