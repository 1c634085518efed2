"""The balancer: table scan against the definition, the integer programs against the scan and against brute force."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from simulator import solvers
from simulator.balance_program import Limits, placement_cost_ns, placement_program, threshold_program
from simulator.policies.balancer import (
    ExpertTimes,
    Objective,
    ThresholdTable,
    global_threshold,
    layer_thresholds,
    threshold_table,
)
from trace_capture.errors import ConfigError

TOP = 5


class Case:
    """One random problem of `layers` layers."""

    def __init__(self, seed: int, layers: int = 1, experts: int = 12, gamma: int = 8) -> None:
        source = random.Random(seed)
        self.states = np.array([[source.choice([0, 0, 1, 2, 3, 4, 5]) for _ in range(experts)] for _ in range(layers)])
        most = gamma + 1
        self.frequencies = np.array([[source.randint(0, most) for _ in range(experts)] for _ in range(layers)])
        self.resident = np.array([[source.random() < 0.4 for _ in range(experts)] for _ in range(layers)])
        rates = [(source.randint(5, 40), source.randint(1, 9), source.randint(30, 200), source.randint(5, 60))]
        rates *= layers
        device = [[0] + [base + each * n for n in range(1, most + 1)] for base, each, _, _ in rates]
        cpu = [[0] + [base + each * n for n in range(1, most + 1)] for _, _, base, each in rates]
        base = source.choice([0, 50])
        self.times = ExpertTimes(
            np.array(device), np.array(cpu), np.full(layers, base // 5), np.full(layers, base),
            np.full(layers, source.randint(50, 400)), np.full(layers, 1000),
        )  # fmt: skip
        self.limits = Limits(source.choice([0, 2000, 6000, 10**6]), source.choice([0, 500, 1500, 10**6]))
        self.table = threshold_table(self.states, self.frequencies, self.resident, self.times, TOP)
        self.objective: Objective = source.choice(["longest", "difference"])

    def outcome(self, tau: int) -> tuple[int, bool]:
        """Cost of one tau for all layers, and whether it fits, by the definition."""
        cost = loads = grow = 0
        for layer, states in enumerate(self.states):
            hot = states >= tau
            one = ExpertTimes(*(field[layer : layer + 1] for field in self.times))
            cost += placement_cost_ns(hot, self.frequencies[layer], one, self.objective)
            loads += int((hot & ~self.resident[layer]).sum())
            grow += int((hot & ~self.resident[layer]).sum()) - int((~hot & self.resident[layer]).sum())
        fits = grow * 1000 <= self.limits.free_bytes and loads * int(self.times.copy_ns[0]) <= self.limits.window_ns
        return cost, fits

    def best(self) -> tuple[int, int]:
        """The cheapest tau that fits, the largest among equals, and its cost."""
        feasible = [(cost, -tau) for tau in range(1, TOP + 2) for cost, fits in [self.outcome(tau)] if fits]
        cost, tau = min(feasible)
        return -tau, cost


@pytest.mark.parametrize("layers", [1, 3])
def test_scan_finds_the_best_threshold_that_fits(layers: int) -> None:
    binding = set()
    for seed in range(300):
        case = Case(seed, layers)
        tau = global_threshold(case.table, *case.limits, case.objective)
        assert (tau, case.outcome(tau)[0]) == case.best(), seed
        assert case.outcome(TOP + 1)[1]  # nothing on the device always fits
        binding.add(tau)
    assert len(binding) >= 4


def test_layers_by_themselves_are_problems_of_one_layer() -> None:
    for seed in range(100):
        case = Case(seed, layers=3)
        limits = np.array([case.limits] * 3)
        taus = layer_thresholds(case.table, limits[:, 0], limits[:, 1], case.objective)
        for layer in range(3):
            one = ThresholdTable(*(field[layer : layer + 1] for field in case.table))
            assert taus[layer] == global_threshold(one, *case.limits, case.objective)


def test_device_and_loads_fall_with_the_threshold_and_the_cpu_rises() -> None:
    for seed in range(50):
        table = Case(seed).table
        assert (np.diff(table.device_ns) <= 0).all() and (np.diff(table.load_ns) <= 0).all()
        assert (np.diff(table.cpu_ns) >= 0).all() and (np.diff(table.grow_bytes) <= 0).all()
        assert table.device_ns[0, -1] == 0 and table.load_ns[0, -1] == 0


def test_at_the_chosen_threshold_both_sides_are_closest_together() -> None:
    for seed in range(100):
        case = Case(seed)
        case.objective = "difference"
        chosen = global_threshold(case.table, *case.limits, "difference")
        gap = {tau: case.outcome(tau) for tau in range(1, TOP + 2)}
        assert all(gap[chosen][0] <= cost for cost, fits in gap.values() if fits)


def test_equal_thresholds_are_decided_for_the_larger_which_loads_less() -> None:
    """No expert has state 2 or 3, so tau 2, 3 and 4 put the same experts on the device."""
    times = ExpertTimes(*(np.array(v) for v in ([[0, 10]], [[0, 10]], [0], [0], [5], [1])))
    table = threshold_table(np.array([[1, 4]]), np.array([[1, 1]]), np.array([[False, False]]), times, TOP)
    assert table.cost_ns("longest")[0].tolist() == [20, 10, 10, 10, 20, 20]
    assert global_threshold(table, 100, 100) == 4
    idle = threshold_table(np.array([[1, 4]]), np.array([[0, 0]]), np.array([[False, False]]), times, TOP)
    assert global_threshold(idle, 100, 100) == TOP + 1
    answer = threshold_program([table, idle], [Limits(100, 100)] * 2)
    assert answer.thresholds == (4, TOP + 1)


@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_integer_program_and_scan_agree(solver: str) -> None:
    """1,200 random problems by HiGHS (fifty to a program), and a sample by CBC: the very same thresholds."""
    for layers, programs, each in ((1, 16, 50), (3, 8, 50)) if solver == "HiGHS" else ((1, 2, 10),):
        for number in range(programs):
            cases = [Case(1000 * number + seed, layers, experts=10) for seed in range(each)]
            for objective in ("longest", "difference") if number % 4 == 0 else ("longest",):
                expected = [global_threshold(case.table, *case.limits, objective) for case in cases]
                answer = threshold_program(
                    [case.table for case in cases], [case.limits for case in cases], objective, solver=solver
                )
                assert answer.solved.is_proven and answer.solved.solver == solver
                assert list(answer.thresholds) == expected


def test_free_form_equals_brute_force_and_is_never_worse_than_a_threshold() -> None:
    better = 0
    for seed in range(40):
        case = Case(seed, experts=7)
        answer = placement_program(case.frequencies[0], case.resident[0], case.times, case.limits, case.objective)
        best = min(cost for cost, fits in _all_placements(case) if fits)
        assert answer.cost_ns == best and answer.solved.is_proven, seed
        threshold = global_threshold(case.table, *case.limits, case.objective)
        assert best <= case.outcome(threshold)[0]
        better += best < case.outcome(threshold)[0]
    assert better > 10


def _all_placements(case: Case) -> list[tuple[int, bool]]:
    result = []
    for bits in itertools.product([False, True], repeat=case.states.shape[1]):
        hot = np.array(bits)
        loads = int((hot & ~case.resident[0]).sum())
        grow = loads - int((~hot & case.resident[0]).sum())
        fits = grow * 1000 <= case.limits.free_bytes and loads * int(case.times.copy_ns[0]) <= case.limits.window_ns
        result.append((placement_cost_ns(hot, case.frequencies[0], case.times, case.objective), fits))
    return result


@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_a_solver_without_time_is_not_called_proven_and_its_answer_still_fits(solver: str) -> None:
    cases = [Case(seed) for seed in range(5)]
    answer = threshold_program(
        [case.table for case in cases], [case.limits for case in cases], time_limit_s=1e-9, solver=solver
    )
    assert not answer.solved.is_proven
    for case, tau in zip(cases, answer.thresholds, strict=True):
        assert case.outcome(tau)[1]


def test_falls_back_to_cbc_where_highs_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        def available(self) -> bool:
            return False

    monkeypatch.setitem(solvers.SOLVERS, "HiGHS", lambda *_: Absent())
    case = Case(3)
    assert threshold_program([case.table], [case.limits]).solved.solver == "CBC"


def test_negative_limits_are_refused() -> None:
    case = Case(0)
    with pytest.raises(ConfigError, match="-1 free bytes"):
        global_threshold(case.table, -1, 0)
    with pytest.raises(ConfigError, match="window of -5 ns"):
        layer_thresholds(case.table, np.array([0]), np.array([-5]))
