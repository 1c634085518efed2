"""Statistics, each against a slow and obvious version or a case with a known answer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_capture import NO_EXPERT, Phase, Trace
from trace_capture.importers import import_trace
from trace_capture.statistics import (
    GENERATING,
    coactivation,
    consecutive_overlap,
    expert_load,
    hit_curve,
    layer_lookups,
    load_entropy_ratio,
    lru_hit_curve,
    num_lookups,
    perfect_distances,
    predictor_recall,
    reuse_distances,
    stack_distances,
)


def lru_hits(trace: Trace, layer: int, slots: int, phases: tuple[Phase, ...]) -> int:
    """Hits of one LRU cache, by simulating it."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for item in trace.passes:
        ids = trace.experts[item.start : item.stop, layer].ravel().tolist()
        for expert in dict.fromkeys(expert for expert in ids if expert != NO_EXPERT):
            if expert in cache:
                hits += item.phase in phases
                cache.move_to_end(expert)
            elif slots:
                if len(cache) == slots:
                    cache.popitem(last=False)
                cache[expert] = None
    return hits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("phases", [tuple(Phase), GENERATING])
def test_hit_curve_equals_a_simulated_lru_at_every_capacity(make: Any, seed: int, phases: tuple[Phase, ...]) -> None:
    trace = make.trace(seed, num_prompts=2, prompt=5, decode=30, num_experts=9, top_k=3)
    curve = lru_hit_curve(trace, phases)
    assert curve.shape == (3, 10)
    for layer in range(3):
        assert curve[layer].tolist() == [lru_hits(trace, layer, slots, phases) for slots in range(10)]


def test_hit_curve_ends_at_all_but_the_first_lookups(trace: Trace) -> None:
    curve, total = lru_hit_curve(trace), num_lookups(trace)
    used = [len(set(trace.experts[:, layer].ravel().tolist()) - {NO_EXPERT}) for layer in range(3)]
    assert (total - curve[:, -1]).tolist() == used
    assert (curve[:, 0] == 0).all() and (np.diff(curve, axis=1) >= 0).all()


def test_lookups_take_a_prefill_as_one_set(trace: Trace, make: Any) -> None:
    def routing(experts: Any) -> None:
        experts[0:4, 0] = [[5, 1], [1, 7], [5, 7], [2, 1]]
        experts[4, 0] = [7, 0]

    lookups = layer_lookups(make.edited(trace, experts=routing), 0)
    assert lookups.experts[:6].tolist() == [5, 1, 7, 2, 7, 0]
    assert lookups.phases[:6].tolist() == [0, 0, 0, 0, 1, 1]
    assert num_lookups(trace, [Phase.DECODE]).tolist() == [24, 24, 24]


def test_stack_distances_by_hand() -> None:
    stream = np.array([3, 1, 3, 3, 0, 1, 2, 3])
    assert stack_distances(stream, 4).tolist() == [4, 4, 1, 0, 4, 2, 4, 3]
    assert stack_distances(stream[:0], 4).tolist() == []


def perfect_hits(experts: list[int], slots: int) -> int:
    """Hits of one cache that drops the expert with the farthest next use, by simulating it."""
    cache: set[int] = set()
    hits = 0
    for now, expert in enumerate(experts):
        if expert in cache:
            hits += 1
            continue
        if len(cache) == slots:
            rest = experts[now + 1 :]
            cache.remove(max(cache, key=lambda one: rest.index(one) if one in rest else len(rest)))
        cache.add(expert)
    return hits


@pytest.mark.parametrize("seed", range(6))
def test_one_walk_gives_perfect_eviction_at_every_capacity(seed: int) -> None:
    random = np.random.default_rng(seed)
    experts = random.choice(9, 160, p=(weight := 1.0 / np.arange(1, 10)) / weight.sum())
    curve = hit_curve(perfect_distances(experts, 12), 12)
    assert curve.tolist() == [0] + [perfect_hits(experts.tolist(), slots) for slots in range(1, 13)]
    assert (curve >= hit_curve(stack_distances(experts, 12), 12)).all()
    assert perfect_distances(np.array([], dtype=np.int64), 4).size == 0


def test_decode_reuse_is_warmed_by_the_prefill(trace: Trace) -> None:
    decode, everything = reuse_distances(trace), reuse_distances(trace, tuple(Phase))
    assert [len(layer) for layer in decode] == [24, 24, 24]
    assert len(everything[0]) == num_lookups(trace)[0]
    cold = [int((layer == 8).sum()) for layer in reuse_distances(trace.rows(trace.phase == Phase.DECODE))]
    assert sum(int((layer == 8).sum()) for layer in decode) < sum(cold)


def test_load_counts_every_routed_token(trace: Trace) -> None:
    load = expert_load(trace)
    for layer in range(3):
        for expert in range(8):
            assert load[layer, expert] == (trace.experts[:, layer] == expert).sum()
    assert load.sum(axis=1).tolist() == [40, 40, 28]
    assert expert_load(trace, GENERATING).sum(axis=1).tolist() == [24, 24, 24]


def test_entropy_ratio_of_even_single_and_absent_load() -> None:
    load = np.array([[5, 5, 5, 5], [9, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    ratio = load_entropy_ratio(load)
    np.testing.assert_allclose(ratio[[0, 1, 3]], [1.0, 0.0, 0.5], atol=1e-12)
    assert np.isnan(ratio[2])


def test_overlap_is_the_mean_over_generated_neighbours_of_one_sequence(trace: Trace) -> None:
    overlap = consecutive_overlap(trace)
    for layer in range(3):
        shares = []
        for row in range(1, trace.num_tokens):
            if trace.sequence[row] == trace.sequence[row - 1] and trace.phase[row] == Phase.DECODE:
                now, before = set(trace.experts[row, layer].tolist()), set(trace.experts[row - 1, layer].tolist())
                shares.append(len(now & before) / 2)
        assert len(shares) == 12
        assert overlap[layer] == pytest.approx(np.mean(shares))


def test_overlap_never_pairs_tokens_of_two_sequences(trace: Trace, make: Any) -> None:
    """Without their prefills, the first decoded token of a sequence stands right behind the last of another."""
    routing = make.edited(trace, experts=lambda column: column.__setitem__(slice(None), [0, 1]))
    other = make.edited(routing, experts=lambda column: column.__setitem__(routing.sequence == 1, [6, 7]))
    assert consecutive_overlap(other.rows(other.phase == Phase.DECODE)).tolist() == [1.0, 1.0, 1.0]


def test_overlap_leaves_rejected_tokens_out(trace: Trace, make: Any) -> None:
    """Token 7 was drafted and rejected; 8 follows 6."""

    def routing(experts: Any) -> None:
        experts[3:10, 0] = [[0, 1], [0, 1], [0, 1], [0, 1], [6, 7], [0, 1], [0, 1]]

    one = make.edited(trace, experts=routing).rows(np.arange(trace.num_tokens) < 10)
    one = replace(one, phase=np.where(one.phase == 1, 2, 0).astype(np.uint8), accepted=np.arange(10) != 7)
    assert consecutive_overlap(one)[0] == 1.0
    assert consecutive_overlap(replace(one, accepted=np.ones(10, dtype=np.bool_)))[0] < 1.0


def test_recall_counts_decode_rows_and_layers_with_predictions_only(trace: Trace) -> None:
    guess = trace.experts.copy()
    guess[:, 0] = NO_EXPERT
    guess[trace.phase == Phase.PREFILL] = NO_EXPERT
    row = np.flatnonzero(trace.phase == Phase.DECODE)[0]
    wrong = [expert for expert in range(8) if expert not in trace.experts[row, 1].tolist()]
    guess[row, 1] = wrong[:2]
    wide = np.concatenate([guess, np.full_like(guess, NO_EXPERT)], axis=2)
    recall = predictor_recall(replace(trace, predicted={"guess": guess, "wide": wide}))
    assert np.isnan(recall["guess"][0])
    assert recall["guess"][1:].tolist() == [pytest.approx(11 / 12), 1.0]
    assert recall["wide"][1:].tolist() == recall["guess"][1:].tolist()


def test_recall_is_a_share_of_the_truth_not_of_the_guess(trace: Trace) -> None:
    everything = np.tile(np.arange(8, dtype=np.uint16), (trace.num_tokens, 3, 1))
    assert predictor_recall(replace(trace, predicted={"all": everything}))["all"].tolist() == [1.0, 1.0, 1.0]
    one = np.ascontiguousarray(trace.experts[:, :, :1])
    assert predictor_recall(replace(trace, predicted={"one": one}))["one"].tolist() == [0.5, 0.5, 0.5]


def test_coactivation_counts_pairs_and_has_the_load_on_its_diagonal(trace: Trace) -> None:
    for layer in range(3):
        pairs = coactivation(trace, layer)
        wanted = np.zeros((8, 8), dtype=np.int64)
        for first, second in trace.experts[:, layer].tolist():
            if first != NO_EXPERT:
                wanted[first, second] += 1
                wanted[second, first] += 1
        np.fill_diagonal(wanted, expert_load(trace)[layer])
        np.testing.assert_array_equal(pairs, wanted)


def test_nothing_to_count_is_nan_not_zero(trace: Trace) -> None:
    prefill = trace.rows(trace.phase == Phase.PREFILL)
    assert np.isnan(consecutive_overlap(prefill)).all()
    assert np.isnan(predictor_recall(prefill)["guess"]).all()
    assert lru_hit_curve(trace.rows(np.zeros(20, dtype=np.bool_))).sum() == 0


def test_public_trace_has_the_published_locality(public_traces: Path) -> None:
    """The recorder's own analysis gives 38.0 % overlap of consecutive decode tokens for the Qwen trace."""
    trace = import_trace(public_traces / "qwen.route.csv")
    decode = trace.rows(trace.phase == Phase.DECODE)
    assert consecutive_overlap(decode).mean() == pytest.approx(0.380, abs=0.001)
    assert num_lookups(trace).sum() == 39_526
