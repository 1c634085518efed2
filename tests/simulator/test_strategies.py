"""Baselines, fixed placements, the oracle, how prompts are read, warm-up: each by what tells it from the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator import simulate
from simulator.counters import can_tell_residency, residency
from simulator.hot_experts import with_hot_experts
from simulator.micro_batch import split_prefill
from simulator.policies.cache import Key, make_cache_policy
from simulator.policies.config import OffloadConfig, parse_config
from simulator.policies.eviction import Partition
from simulator.policies.prefetch import make_prefetch_policy
from simulator.predictions import predictions_of
from tests.simulator.builders import (
    Only,
    decode_trace,
    make_config,
    make_hardware,
    make_measured,
    make_shape,
    mixed_trace,
    trace_of,
)
from trace_capture.errors import ConfigError, TraceError
from trace_capture.trace import Phase, Trace

SKEWED = make_shape(layers=2, experts=6, top_k=1, expert_bytes=(1000, 2000))


def skewed() -> Trace:
    """Layer 0 asks mostly for 4 and 2, layer 1 mostly for 5."""
    rows = [[[first], [second]] for first, second in zip([4, 4, 2, 4, 2, 0], [5, 5, 5, 1, 5, 5], strict=True)]
    return decode_trace(SKEWED, rows)


def table(**tables: Any) -> OffloadConfig:
    return parse_config(tables)


def test_static_keeps_the_hottest_beside_room_for_one_token_and_nothing_else() -> None:
    config = with_hot_experts(table(cache={"policy": "static", "slots_per_layer": [3, 2]}), skewed())
    assert config.cache.hot_experts == ((4, 2), (5,))
    run = simulate(skewed(), make_hardware(), config)
    assert run.info.preloaded_experts == 3
    assert (run.metrics.hits, run.metrics.loads) == (10, 2), "only 0 of layer 0 and 1 of layer 1 are ever loaded"
    assert run.metrics.evictions == 2 and run.metrics.bytes_loaded == 3000


def test_static_in_one_pool_takes_the_highest_load_per_byte_of_all_layers() -> None:
    cache = {"policy": "static", "scope": "global", "budget_bytes": 5000}
    config = with_hot_experts(table(cache=cache), skewed())
    assert config.cache.hot_experts == ((4,), (5,)), "2000 of 5000 bytes let the largest expert pass through"
    assert with_hot_experts(table(cache=cache | {"budget_bytes": 18_000}), skewed()).cache.hot_experts == (
        (4, 2, 0),
        (5, 1),
    )


def test_static_gives_its_coldest_up_where_a_layer_needs_all_the_room() -> None:
    shape = make_shape(layers=1, experts=6, top_k=2)
    trace = decode_trace(shape, [[[0, 1]], [[4, 5]], [[0, 1]]])
    config = table(cache={"policy": "static", "slots_per_layer": [3], "hot_experts": [[0, 1]]})
    run = simulate(trace, make_hardware(), config, record_spans=True)
    assert [span.expert for span in run.spans if span.kind == "load" and span.reason == "demand"] == [4, 5, 1]


def test_resident_loads_nothing_and_takes_the_compute_alone() -> None:
    run = simulate(mixed_trace(make_shape()), make_hardware(), make_config("resident", budget_ratio=1.0))
    assert run.metrics.loads == 0 and run.metrics.hit_rate == 1.0 and run.info.preloaded_experts == 64
    assert run.metrics.tpot_ms == pytest.approx(run.info.bounds["compute_ms"])
    warmed = simulate(
        mixed_trace(make_shape()), make_hardware(), make_config("resident", budget_ratio=1.0, preload=False)
    )
    assert 0 < warmed.metrics.loads <= 64 and warmed.metrics.evictions == 0
    with pytest.raises(ConfigError, match=r"'resident' needs room for all experts: 16,000 bytes where 8,000"):
        simulate(mixed_trace(make_shape()), make_hardware(), make_config("resident", budget_ratio=0.5))


def test_belady_as_a_strategy_reaches_its_bound_and_beats_the_others() -> None:
    trace = mixed_trace(make_shape(), seed=3)
    runs = {
        name: simulate(trace, make_hardware(), make_config(name, scope="global", budget_bytes=16_000))
        for name in ("belady", "lru", "lfu", "s3-fifo", "random")
    }
    best = runs.pop("belady")
    assert best.metrics.hit_rate == pytest.approx(best.info.bounds["belady_hit_rate"])
    assert all(run.metrics.hit_rate < best.metrics.hit_rate for run in runs.values())


def test_belady_looks_at_the_committed_experts() -> None:
    trace = mixed_trace(make_shape(), seed=3, right=0.5)
    raw = {
        "cache": {"policy": "belady", "budget_bytes": 20_000},
        "prefetch": {"source": "quasi-hidden", "mode": "commit"},
    }
    simulate(trace, make_hardware(), parse_config(raw))  # a look-up that was not foreseen would raise


def test_random_is_a_matter_of_its_seed() -> None:
    trace = mixed_trace(make_shape())
    runs = [
        simulate(trace, make_hardware(), make_config("random", budget_bytes=20_000, seed=seed)) for seed in (0, 0, 1)
    ]
    assert runs[0].metrics == runs[1].metrics != runs[2].metrics


def test_s3_fifo_lets_what_was_used_once_pass_and_remembers_it() -> None:
    policy = make_cache_policy("s3-fifo", Partition(capacity_bytes=10_000, expert_bytes=1000))
    present: list[Key] = []

    def ask(expert: int) -> Key | None:
        key, victim = (0, expert), None
        if key not in present:
            if len(present) == 10:
                victim = policy.choose_victim(Only(lambda _: True))
                assert victim is not None
                present.remove(victim)
                policy.removed(victim)
            policy.admitted(key)
            present.append(key)
        policy.used(key)
        return victim

    for _ in range(3):
        ask(0)  # its load and two more uses
    for expert in range(1, 10):
        ask(expert)
    assert [ask(expert) for expert in (10, 11)] == [(0, 1), (0, 2)], "0 moves to the main queue, the scan passes"
    assert ask(1) == (0, 3), "1 is remembered: it comes back to the main queue"
    assert [ask(expert) for expert in range(20, 40)].count((0, 1)) == 0
    assert {(0, 0), (0, 1)} <= set(present)


def test_oracle_names_the_set_share_and_more_recall_foresees_more_of_the_same() -> None:
    trace = mixed_trace(make_shape(experts=16), sequences=4, decode=40)
    decode = [item for item in trace.passes if item.phase == Phase.DECODE]

    def foreseen(recall: float, seed: int = 0) -> list[list[list[int]]]:
        setting = parse_config(
            {"cache": {"budget_ratio": 1}, "prefetch": {"source": "oracle", "recall": recall, "seed": seed}}
        )
        predict = predictions_of(trace, make_prefetch_policy("oracle", setting.prefetch.setting))
        return [predict(item) for item in decode]

    right: dict[float, list[set[tuple[int, int, int]]]] = {}
    for recall in (0.0, 0.3, 0.7, 1.0):
        hits = [
            {(number, layer, expert) for layer in range(1, 4) for expert in set(guess[layer]) & set(truth[layer])}
            for number, (item, guess) in enumerate(zip(decode, foreseen(recall), strict=True))
            for truth in [trace.pass_experts(item)]
        ]
        right[recall] = hits
        share = sum(map(len, hits)) / (len(decode) * 3 * 3)
        assert share == pytest.approx(recall, abs=0.06)
        assert all(guess[0] == [] for guess in foreseen(recall)), "nobody foresees the first layer"
    for lower, higher in ((0.3, 0.7), (0.7, 1.0)):
        assert all(few <= more for few, more in zip(right[lower], right[higher], strict=True))
    assert foreseen(0.5) == foreseen(0.5) != foreseen(0.5, seed=1)


def test_popularity_prefetch_brings_the_hottest_of_the_next_layer() -> None:
    trace = skewed()
    config = table(
        cache={"policy": "none", "slots_per_layer": [6, 6]}, prefetch={"source": "popularity", "max_experts": 1}
    )
    run = simulate(trace, make_hardware(), config, record_spans=True)
    ahead = [span.expert for span in run.spans if span.reason == "prefetch"]
    assert set(ahead) == {5} and run.metrics.prefetch_used == 5


def test_prompt_in_pieces_is_more_passes_and_one_time_to_first_token() -> None:
    shape = make_shape(layers=1, experts=8, top_k=1)
    trace = trace_of(shape, [(Phase.PREFILL, [[[token]] for token in (0, 1, 0, 1, 2)]), (Phase.DECODE, [[[2]]])])
    pieces = split_prefill(trace, 2)
    assert [item.stop - item.start for item in pieces.passes] == [2, 2, 1, 1]
    assert [item.phase for item in pieces.passes] == [Phase.PREFILL] * 3 + [Phase.DECODE]
    measured = make_measured(decide_ns=0.0, decide_per_load_ns=0.0)
    hardware = make_hardware(measured=measured)
    whole = simulate(trace, hardware, table(cache={"policy": "none", "slots_per_layer": [8]}))
    cut = simulate(trace, hardware, table(cache={"policy": "none", "slots_per_layer": [8]}, prefill={"micro_batch": 2}))
    assert (whole.metrics.lookups, cut.metrics.lookups) == (3 + 1, 5 + 1), "0 and 1 are asked for by two pieces"
    per_token = 300 + 700 + 5000
    assert whole.metrics.ttft_ms == pytest.approx((5 * per_token + 3000) / 1e6)
    assert cut.metrics.ttft_ms == pytest.approx((5 * per_token + 5000) / 1e6)
    assert whole.metrics.tpot_ms == cut.metrics.tpot_ms and cut.info.trace_digest == trace.digest


def test_streamed_prefill_copies_the_next_layer_meanwhile_whatever_is_asked_for() -> None:
    shape = make_shape(layers=3, experts=4, top_k=1, dense_bytes=(0,) * 3)
    trace = trace_of(shape, [(Phase.PREFILL, [[[token]] * 3 for token in range(3)])])
    measured = make_measured(
        tokens=(1, 3), dense_ns=(0.0, 0.0), experts_ns=(700.0, 4000.0), cpu_experts_ns=(1.0, 1.0),
        pass_overhead_ns=(0.0, 0.0), decide_ns=0.0, decide_per_load_ns=0.0,
    )  # fmt: skip
    hardware = make_hardware(measured=measured)
    cache = {"slots_per_layer": [4, 4, 4]}
    waves, stream = (simulate(trace, hardware, table(cache=cache, prefill={"strategy": name}), record_spans=True)
                     for name in ("on-demand", "stream"))  # fmt: skip
    assert waves.metrics.ttft_ms == pytest.approx(3 * (3000 + 4000) / 1e6)
    assert stream.metrics.ttft_ms == pytest.approx((3000 + 3 * 4000) / 1e6), "four copies fit behind a layer's compute"
    assert (waves.metrics.loads, stream.metrics.loads) == (9, 3 + 4 + 4), "expert 3 is copied and not asked for"
    assert not any(span.layer == 0 and span.reason == "prefetch" for span in stream.spans)


def test_preload_fills_an_ordinary_cache_and_the_bounds_know_it() -> None:
    trace = mixed_trace(make_shape(), seed=2)
    cold, warm = (
        simulate(trace, make_hardware(), make_config("lru", budget_bytes=24_000, preload=preload))
        for preload in (False, True)
    )
    assert cold.info.preloaded_experts == 0 and warm.info.preloaded_experts == 24
    assert warm.metrics.hits > cold.metrics.hits
    assert warm.metrics.hit_rate <= warm.info.bounds["belady_hit_rate"]
    assert warm.info.bounds["belady_hit_rate"] > cold.info.bounds["belady_hit_rate"]
    assert any("replayed trace itself" in note for note in warm.info.notes)
    other = simulate(
        trace,
        make_hardware(),
        make_config("lru", budget_bytes=24_000, preload=True),
        profile=mixed_trace(make_shape(), seed=5),
    )
    assert not any("replayed trace itself" in note for note in other.info.notes)


def test_warmup_is_left_out_of_figures_and_bounds() -> None:
    shape = make_shape(layers=1, experts=4, top_k=1)
    trace = decode_trace(shape, [[[0]], [[1]], [[0]], [[1]]])
    hardware = make_hardware(measured=make_measured())
    full = simulate(trace, hardware, make_config(budget_bytes=2000))
    late = simulate(trace, hardware, make_config(budget_bytes=2000), warmup_passes=2, record_spans=True)
    assert can_tell_residency(late) and residency(late)[-1][1:] == (2, 2000)
    few = simulate(trace, hardware, make_config(budget_bytes=1000), warmup_passes=2, record_spans=True)
    assert can_tell_residency(few) and few.metrics.evictions == 2 and residency(few)[-1][1:] == (1, 1000)
    assert (full.metrics.loads, late.metrics.loads) == (2, 0)
    assert late.metrics.decode_hit_rate == late.info.bounds["belady_decode_hit_rate"] == 1.0
    assert late.metrics.tpot_ms == pytest.approx(late.info.bounds["compute_ms"]) and late.info.warmup_passes == 2
    assert np.array_equal(late.token_ns, full.token_ns[2:])
    with pytest.raises(TraceError, match="a warm-up of 4 passes leaves nothing of 4 decode passes"):
        simulate(trace, hardware, make_config(budget_bytes=2000), warmup_passes=4)


@pytest.mark.parametrize(
    ("hot", "message"),
    [
        ([[0]], "1 lists, toy has 4 MoE layers"),
        ([[0], [1], [16], [2]], "below 16"),
        ([[0, 0]] * 4, "different numbers"),
    ],
)
def test_hot_lists_of_another_model_are_refused(hot: list[list[int]], message: str) -> None:
    for raw in (
        {"cache": {"policy": "static", "budget_ratio": 0.5, "hot_experts": hot}},
        {"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "popularity", "hot_experts": hot}},
    ):
        with pytest.raises(ConfigError, match=message):
            simulate(mixed_trace(make_shape()), make_hardware(), parse_config(raw))
