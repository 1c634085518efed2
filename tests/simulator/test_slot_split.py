"""The slot split: optimal against exhaustive search, within budget, and honest about solvers."""

from __future__ import annotations

import itertools
import random
import subprocess
from typing import Any

import numpy as np
import pytest

from simulator import solvers
from simulator.slot_split import split_slots
from tests.simulator.builders import make_shape
from trace_capture.errors import ConfigError


def random_case(seed: int) -> tuple[np.ndarray, list[int], Any, int]:
    """Small curves (rising, not concave), unequal sizes and copy times, a budget between tight and ample."""
    source = random.Random(seed)
    layers, experts, top_k = source.randint(1, 4), source.randint(3, 7), source.randint(1, 2)
    sizes = [source.choice([700, 1000, 1300]) for _ in range(layers)]
    shape = make_shape(layers=layers, experts=experts, top_k=top_k, expert_bytes=sizes)
    steps = [[0] + [source.choice([0, 0, 1, 3, 9]) for _ in range(experts)] for _ in range(layers)]
    hits = np.cumsum(np.array(steps), axis=1)
    copy_ns = [source.choice([500_000, 800_000]) for _ in range(layers)]
    least, most = top_k * sum(sizes), experts * sum(sizes)
    return hits, copy_ns, shape, source.randint(least, most + 500)


def best_by_trying_all(hits: np.ndarray, copy_ns: list[int], shape: Any, budget_bytes: int) -> float:
    counts = range(shape.top_k, shape.num_experts + 1)
    best = 0.0
    for slots in itertools.product(counts, repeat=shape.num_moe_layers):
        if sum(c * size for c, size in zip(slots, shape.expert_bytes, strict=True)) <= budget_bytes:
            best = max(best, saved_ms(hits, copy_ns, slots))
    return best


def saved_ms(hits: np.ndarray, copy_ns: list[int], slots: Any) -> float:
    return sum(int(hits[layer, count]) * copy_ns[layer] / 1e6 for layer, count in enumerate(slots))


@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_split_is_optimal_and_within_budget(solver: str) -> None:
    for seed in range(60 if solver == "HiGHS" else 15):
        hits, copy_ns, shape, budget = random_case(seed)
        split = split_slots(hits, copy_ns, shape, budget, solver=solver)
        best = best_by_trying_all(hits, copy_ns, shape, budget)
        half_a_copy = min(copy_ns) / 2e6
        assert split.solver == solver and split.is_proven
        assert sum(c * size for c, size in zip(split.slots, shape.expert_bytes, strict=True)) <= budget
        assert all(shape.top_k <= count <= shape.num_experts for count in split.slots)
        assert split.saved_ms == pytest.approx(saved_ms(hits, copy_ns, split.slots))
        assert best - half_a_copy <= split.saved_ms <= best + 1e-9
        assert split.bound_ms >= best - 1e-9


def test_equal_copies_give_the_exact_optimum() -> None:
    """The absolute gap is half a copy, so where all copies take equally long nothing is left."""
    for seed in range(40):
        hits, copy_ns, shape, budget = random_case(seed)
        copy_ns = [500_000] * len(copy_ns)
        split = split_slots(hits, copy_ns, shape, budget)
        assert split.saved_ms == pytest.approx(best_by_trying_all(hits, copy_ns, shape, budget))


def test_large_split_equals_dynamic_programming_to_half_a_copy() -> None:
    """A million hits: the solver's own relative gap of 1e-4 would leave fifty copies on the table."""
    source = random.Random(1)
    layers, experts = 24, 48
    shape = make_shape(layers=layers, experts=experts, top_k=4)
    for _ in range(4):
        steps = np.array([[0] + [source.randint(0, 3000) for _ in range(experts)] for _ in range(layers)])
        hits = np.cumsum(steps, axis=1)
        best = np.zeros(1)
        for layer in range(layers):  # best[s]: most hits with s slots above top-k in the layers so far
            gains = hits[layer, 4:].astype(float)
            merged = np.zeros(len(best) + len(gains) - 1)
            for spare, gain in enumerate(gains):
                merged[spare : spare + len(best)] = np.maximum(merged[spare : spare + len(best)], best + gain)
            best = np.maximum.accumulate(merged)
        budget_slots = 300
        split = split_slots(hits, [1_000_000] * layers, shape, budget_slots * 1000)
        assert split.saved_ms == pytest.approx(best[budget_slots - 4 * layers], abs=0.5)


def test_slots_go_where_they_save_copying() -> None:
    """Layer 0 gains from every slot, layer 1 from none: all that is spare goes to layer 0."""
    shape = make_shape(layers=2, experts=8, top_k=2)
    hits = np.array([range(0, 90, 10), [5] * 9])
    assert split_slots(hits, [1000, 1000], shape, 8000).slots == (6, 2)


def test_ample_budget_needs_no_more_slots_than_help() -> None:
    shape = make_shape(layers=2, experts=8, top_k=2)
    hits = np.array([[0, 1, 2, 3, 4, 4, 4, 4, 4]] * 2)
    split = split_slots(hits, [1000, 1000], shape, 10**9)
    assert split.slots == (4, 4)
    assert split.gap_ms == pytest.approx(0.0)


def test_budget_below_top_k_is_refused_with_the_bytes_needed() -> None:
    shape = make_shape(layers=2, experts=8, top_k=2)
    with pytest.raises(ConfigError, match=r"budget of 3,999 bytes cannot hold the top-2.*at least 4,000"):
        split_slots(np.zeros((2, 9), dtype=np.int64), [1, 1], shape, 3999)


def test_falls_back_to_cbc_where_highs_is_absent(monkeypatch: Any) -> None:
    class Absent:
        def available(self) -> bool:
            return False

    monkeypatch.setitem(solvers.SOLVERS, "HiGHS", lambda *_: Absent())
    hits, copy_ns, shape, budget = random_case(3)
    assert split_slots(hits, copy_ns, shape, budget).solver == "CBC"
    monkeypatch.setitem(solvers.SOLVERS, "CBC", lambda *_: Absent())
    with pytest.raises(ConfigError, match="pip install highspy"):
        split_slots(hits, copy_ns, shape, budget)


@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_stopped_by_its_time_limit_is_not_called_proven(solver: str) -> None:
    """Both solvers say `Optimal` then, so the clock decides; what comes back still fits and its gap is known."""
    for seed in range(6):
        hits, copy_ns, shape, budget = random_case(seed)
        split = split_slots(hits, copy_ns, shape, budget, time_limit_s=1e-9, solver=solver)
        best = best_by_trying_all(hits, copy_ns, shape, budget)
        assert not split.is_proven
        assert sum(c * size for c, size in zip(split.slots, shape.expert_bytes, strict=True)) <= budget
        assert split.saved_ms <= best + 1e-9 <= split.saved_ms + split.gap_ms + 2e-9


def test_solver_prints_nothing(capfd: Any) -> None:
    hits, copy_ns, shape, budget = random_case(7)
    for solver in ("HiGHS", "CBC"):
        split_slots(hits, copy_ns, shape, budget, solver=solver)
    assert capfd.readouterr().out == ""


def test_unknown_solver_names_the_known_ones() -> None:
    hits, copy_ns, shape, budget = random_case(7)
    with pytest.raises(ConfigError, match="unknown solver 'highs'.*HiGHS"):
        split_slots(hits, copy_ns, shape, budget, solver="highs")


def test_highs_is_asked_for_an_absolute_gap_alone_and_one_thread() -> None:
    import pulp

    engine = solvers.SOLVERS["HiGHS"](pulp, 0.25, 3.0)
    assert (engine.gapAbs, engine.gapRel, engine.threads, engine.timeLimit) == (0.25, 0.0, 1, 3.0)


def test_cbc_starts_no_worker_thread(monkeypatch: Any) -> None:
    """With `-threads 1` CBC loses a wake-up about once in 170 runs and sleeps ten seconds over a solved problem."""
    commands: list[list[str]] = []
    popen = subprocess.Popen

    def recording(command: list[str], *args: Any, **options: Any) -> Any:
        commands.append(command)
        return popen(command, *args, **options)

    monkeypatch.setattr(subprocess, "Popen", recording)
    hits, copy_ns, shape, budget = random_case(0)
    split_slots(hits, copy_ns, shape, budget, solver="CBC", time_limit_s=3.0)
    assert len(commands) == 1 and "-threads" not in commands[0]
    assert [commands[0][commands[0].index(option) + 1] for option in ("-sec", "-allow")] == ["3.0", "0.25"]
