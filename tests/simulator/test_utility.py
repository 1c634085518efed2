"""Utility of experts: activation frequency, inertial transition, boundaries that follow the workload, ablations."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simulator.policies.utility import (
    AutoregressiveUtility,
    Boundaries,
    BoundaryRule,
    CapacityRule,
    FluctuationRule,
    RecencyUtility,
    SpeculativeUtility,
    activation_frequency,
    make_utility_signal,
    start_boundaries,
)
from trace_capture.errors import ConfigError
from trace_capture.trace import NO_EXPERT


def ids_with(frequency: list[int], tokens: int, top_k: int) -> np.ndarray:
    """Ids [T, K] in which expert e is used by `frequency[e]` tokens; the frequencies add up to T * K."""
    slots: list[list[int]] = [[] for _ in range(tokens)]
    for expert in sorted(range(len(frequency)), key=lambda expert: -frequency[expert]):
        for token in sorted(range(tokens), key=lambda token: len(slots[token]))[: frequency[expert]]:
            slots[token].append(expert)
    assert all(len(row) == top_k for row in slots)
    return np.array(slots, dtype=np.uint16)


def random_ids(source: random.Random, tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """Ids [T, K]; a few favourites make high states reachable."""
    weights = [8.0] * 3 + [0.3] * (num_experts - 3)
    rows = []
    for _ in range(tokens):
        row: list[int] = []
        while len(row) < top_k:
            expert = source.choices(range(num_experts), weights)[0]
            if expert not in row:
                row.append(expert)
        rows.append(row)
    return np.array(rows, dtype=np.uint16)


def test_frequency_counts_tokens_and_adds_up_to_all_choices() -> None:
    source = random.Random(0)
    for gamma in range(9):
        counts = activation_frequency(random_ids(source, gamma + 1, 16, 4), 16)
        assert counts.shape == (16,) and counts.min() >= 0 and counts.max() <= gamma + 1
        assert counts.sum() == (gamma + 1) * 4
    unrouted = np.array([[NO_EXPERT, NO_EXPERT], [1, 3]], dtype=np.uint16)
    assert activation_frequency(unrouted, 4).tolist() == [0, 1, 0, 1]


def released_state(state: int, frequency: int) -> int:
    """The released state machine, one expert at a time: states 0..5, up 5, down 1 (llama.cpp fork, preview)."""
    if frequency - state >= 5:
        return state + 1 if state < 5 else 5
    if state - frequency >= 1:
        return state - 1
    return state


def test_fixed_boundaries_reproduce_the_released_state_sequence_at_8_drafts() -> None:
    source = random.Random(1)
    signal = make_utility_signal("speculative", "fixed", 16, 8, [4, 4])
    expected = [[0] * 16, [0] * 16]
    seen = set()
    for _ in range(300):
        for layer in (0, 1):
            ids = random_ids(source, 9, 16, 4)
            counts = activation_frequency(ids, 16).tolist()
            signal.observe(layer, ids)
            expected[layer] = [released_state(state, n) for state, n in zip(expected[layer], counts, strict=True)]
            assert signal.states[layer].tolist() == expected[layer]
            seen.update(expected[layer])
    assert seen == {0, 1, 2, 3, 4, 5}
    assert start_boundaries(8) == (5, 1)


def test_the_fifth_state_needs_every_token_of_nine() -> None:
    """From state 4 up needs 9 of 9; 8 of 9 leaves it, whatever the expert did before."""
    signal = make_utility_signal("speculative", "fixed", 4, 8, [2])
    always = ids_with([9, 9, 9, 9], 9, 4)
    for state in (1, 2, 3, 4):
        signal.observe(0, always)
        assert signal.states[0].tolist() == [state] * 4
    signal.observe(0, ids_with([9, 8, 8, 2], 9, 3))
    assert signal.states[0].tolist() == [5, 4, 4, 3]


def test_states_move_by_one_and_only_across_a_boundary() -> None:
    source = random.Random(2)
    for gamma, start in ((2, None), (4, (2, 2)), (8, (3, 2))):
        rule = BoundaryRule(1, gamma, [4], start and Boundaries(*start))
        signal = SpeculativeUtility(1, 12, rule)
        for _ in range(200):
            before = signal.states[0].copy()
            up, down = rule.boundaries[0]
            ids = random_ids(source, gamma + 1, 12, 3)
            signal.observe(0, ids)
            moved = signal.states[0] - before
            fluctuation = activation_frequency(ids, 12) - before
            assert np.abs(moved).max() <= 1
            assert (moved[(fluctuation > -down) & (fluctuation < up)] == 0).all()
            assert (moved[fluctuation >= up] == (before[fluctuation >= up] < 5)).all()
            assert (moved[fluctuation <= -down] == -1).all()


def test_hysteresis_a_single_quiet_pass_costs_one_level_and_noise_below_the_boundary_costs_none() -> None:
    signal = SpeculativeUtility(1, 2, BoundaryRule(1, 8, [1], Boundaries(5, 3)))
    one_in = lambda n: ids_with([n, 9 - n], 9, 1)  # noqa: E731
    for _ in range(4):
        signal.observe(0, one_in(9))
    assert signal.states[0, 0] == 4
    for frequency in (2, 5, 3, 8, 2):  # never 3 below the state, never 5 above it
        signal.observe(0, one_in(frequency))
        assert signal.states[0, 0] == 4
    signal.observe(0, one_in(0))
    assert signal.states[0, 0] == 3
    signal.observe(0, one_in(9))
    assert signal.states[0, 0] == 4


def test_without_drafts_the_speculative_signal_is_the_autoregressive_one() -> None:
    source = random.Random(3)
    plain = make_utility_signal("autoregressive", "fixed", 16, 0, [4])
    counted = make_utility_signal("speculative", "fixed", 16, 0, [4])
    for _ in range(50):
        ids = random_ids(source, 1, 16, 4)
        plain.observe(0, ids)
        counted.observe(0, ids)
        assert plain.states.tolist() == counted.states.tolist()
        assert plain.states.sum() == 4


@pytest.mark.parametrize("rule_type", [FluctuationRule, CapacityRule])
def test_boundaries_settle_on_a_constant_input_and_move_with_a_step(rule_type: type[BoundaryRule]) -> None:
    """Four busy experts, then eight others that share the load: the usual rise falls, and twice as many are hot."""
    rule = rule_type(1, 8, [4])
    signal = SpeculativeUtility(1, 12, rule)
    narrow = ids_with([9, 9, 6, 3, 0, 0, 0, 0, 0, 0, 0, 0], 9, 3)
    wide = ids_with([0, 0, 0, 0, 4, 4, 4, 3, 3, 3, 3, 3], 9, 3)
    settled = []
    for ids in (narrow, wide):
        for _ in range(80):
            signal.observe(0, ids)
        boundaries = rule.boundaries[0]
        for _ in range(80):
            signal.observe(0, ids)
            assert rule.boundaries[0] == boundaries
        settled.append(boundaries)
        assert all(1 <= bound <= 9 for bound in boundaries)
    assert settled[0] != settled[1]


def test_fixed_boundaries_never_move() -> None:
    signal = make_utility_signal("speculative", "fixed", 16, 8, [4])
    assert isinstance(signal, SpeculativeUtility)
    source = random.Random(5)
    for _ in range(50):
        signal.observe(0, random_ids(source, 9, 16, 4))
    assert signal.rule.boundaries == [(5, 1)]


def test_layers_are_calibrated_apart() -> None:
    rule = FluctuationRule(2, 8, [4, 4])
    signal = SpeculativeUtility(2, 12, rule)
    for _ in range(80):
        signal.observe(1, ids_with([3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2], 9, 3))
    assert rule.boundaries[0] == (5, 1)
    assert rule.boundaries[1] != (5, 1)
    assert not signal.states[0].any()


def test_capacity_rule_makes_as_many_hot_as_there_is_room() -> None:
    """On the same workload a layer with room for nine experts has more of them hot than one with room for three."""
    hot = []
    for room in (3, 9):
        source = random.Random(6)
        signal = SpeculativeUtility(1, 16, CapacityRule(1, 8, [room]))
        total = 0
        for step in range(200):
            signal.observe(0, random_ids(source, 9, 16, 4))
            total += int(np.count_nonzero(signal.states)) if step >= 100 else 0
        hot.append(total / 100)
    assert hot[0] == pytest.approx(3, abs=1.5)
    assert hot[1] > hot[0] + 2


def test_recency_counts_passes_since_the_last_use() -> None:
    signal = RecencyUtility(1, 4)
    signal.observe(0, np.array([[0, 1], [0, 2]]))
    assert signal.states[0].tolist() == [5, 5, 5, 0]
    signal.observe(0, np.array([[3, 1]]))
    assert signal.states[0].tolist() == [4, 5, 4, 5]
    for _ in range(7):
        signal.observe(0, np.array([[3, 1]]))
    assert signal.states[0].tolist() == [0, 5, 0, 5]


def test_the_autoregressive_ablation_sees_one_token_of_the_pass() -> None:
    signal = AutoregressiveUtility(1, 5, 2)
    signal.observe(0, np.array([[0, 4], [1, 2], [1, 3]]))
    assert signal.states[0].tolist() == [0, 1, 0, 1, 0]


def test_wrong_names_and_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown utility signal 'speculativ'; did you mean 'speculative'"):
        make_utility_signal("speculativ", "fixed", 4, 8, [2])
    with pytest.raises(ConfigError, match="unknown boundary rule 'constant'.*fluctuation"):
        make_utility_signal("speculative", "constant", 4, 8, [2])
    with pytest.raises(ConfigError, match="gamma is -1"):
        make_utility_signal("speculative", "fixed", 4, -1, [2])
    with pytest.raises(ConfigError, match=r"boundaries are \(5, 0\)"):
        make_utility_signal("speculative", "fixed", 4, 8, [2], Boundaries(5, 0))
