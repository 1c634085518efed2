"""Eviction and loading by utility: victims, thresholds, states that outlive a layer, the queue's order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from simulator import simulate
from simulator.policies.cache import Key, make_cache_policy
from simulator.policies.config import parse_config
from simulator.policies.eviction import Partition
from simulator.policies.utility import BOUNDARY_RULES, UtilitySignal
from simulator.policies.utility_cache import UtilityCache, UtilityQueue
from tests.simulator.builders import Only, make_config, make_hardware, make_shape
from tests.simulator.driver import driver_for
from trace_capture.errors import ConfigError
from trace_capture.rewindow import rewindow
from trace_capture.synthetic import synthetic_trace
from trace_capture.trace import Trace


class Told(UtilitySignal):
    """A signal whose states a test sets."""

    def count(self, layer: int, experts: Sequence[int], tokens: Sequence[int]) -> None:
        """Nothing moves by itself."""


def cache_of(states: list[list[int]]) -> tuple[UtilityCache, Told]:
    signal = Told(len(states), len(states[0]))
    signal.states[:] = states
    return UtilityCache(Partition(utility=signal)), signal


anyone = Only(lambda _: True)


def test_the_lowest_state_leaves_first_and_among_equals_the_least_recently_used() -> None:
    cache, signal = cache_of([[3, 1, 1, 0], [2, 1, 0, 0]])
    for key in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        cache.admitted(key)
        cache.used(key)
    cache.used((0, 1))
    order = []
    while (victim := cache.choose_victim(anyone)) is not None:
        order.append(victim)
        cache.removed(victim)
    assert order == [(0, 2), (1, 1), (0, 1), (1, 0), (0, 0)]


def test_a_moved_state_moves_the_place_in_the_pool_and_not_the_recency() -> None:
    cache, signal = cache_of([[2, 2, 2, 2]])
    for expert in range(3):
        cache.admitted((0, expert))
        cache.used((0, expert))
    signal.states[0] = [3, 1, 2, 2]
    cache.routed(0, [3], [1])
    assert cache.choose_victim(anyone) == (0, 1)
    signal.states[0] = 2
    cache.routed(0, [3], [1])
    assert cache.choose_victim(anyone) == (0, 0), "used before the others, whatever its state was meanwhile"


def test_nothing_at_or_above_the_threshold_leaves() -> None:
    cache, _ = cache_of([[0, 2, 5, 3]])
    for expert in range(4):
        cache.admitted((0, expert))
    cache.threshold = 3
    for expected in ((0, 0), (0, 1), None):
        victim = cache.choose_victim(anyone)
        assert victim == expected
        if victim:
            cache.removed(victim)
    assert cache.state((0, 2)) == 5


def test_pinned_experts_are_passed_over_and_keep_their_state() -> None:
    cache, _ = cache_of([[0, 1, 4, 2]])
    for expert in range(4):
        cache.admitted((0, expert))
        cache.used((0, expert))
    assert cache.choose_victim(Only(lambda key: key[1] not in (0, 1))) == (0, 3)
    assert cache.choose_victim(Only(lambda key: False)) is None
    assert [cache.state((0, expert)) for expert in range(4)] == [0, 1, 4, 2]


def test_victims_are_those_of_a_sorted_list_over_a_long_random_run() -> None:
    source = random.Random(0)
    cache, signal = cache_of([[0] * 40, [0] * 40])
    last_use: dict[Key, int] = {}
    uses = 0
    for _ in range(3000):
        key = (source.randrange(2), source.randrange(40))
        if key not in last_use:
            if len(last_use) == 20:
                victim = cache.choose_victim(anyone)
                assert victim == min(last_use, key=lambda one: (signal.states[one], last_use[one]))
                cache.removed(victim)
                del last_use[victim]
            cache.admitted(key)
        uses += 1
        last_use[key] = uses
        cache.used(key)
        signal.states[key[0], source.randrange(40)] = source.randrange(6)
        cache.routed(key[0], [0], [1])


def verified_trace() -> Trace:
    shape = make_shape(layers=6, experts=32, top_k=4)
    plain = synthetic_trace(shape, 2, 1, 250, reuse_ratio=0.4, skew=1.3, predictor_recall=0.5, seed=0)
    return rewindow(plain, 8, 0.8)


def test_states_outlive_the_layer_that_ran() -> None:
    """The released code sets every resident of a layer to 0 when it has run, and so forgets what it had learned."""
    trace = verified_trace()
    driver = driver_for(make_config("utility", budget_ratio=0.5), trace, 4)
    driver.run(trace)
    kept = 0
    for cache in driver.core._cache:
        assert isinstance(cache, UtilityCache)
        states = cache._signal.states
        for key in (shelf.row[place.expert] for shelf in cache._shelves for place in shelf.held):
            assert cache.state(key) == states[key]
            kept += int(states[key] > 0)
    assert kept > 30


def test_in_one_pool_verify_passes_push_an_lru_out_and_utilities_keep_what_many_tokens_use() -> None:
    """A pass of nine tokens asks for more experts than the pool holds, so that LRU has always lost what comes next."""
    trace = verified_trace()
    rates = {}
    for name, signal in (("lru", "speculative"), ("utility", "speculative"), ("utility", "autoregressive")):
        raw = {"cache": {"policy": name, "scope": "global", "budget_ratio": 0.3}, "utility": {"signal": signal}}
        run = simulate(trace, make_hardware(), parse_config(raw), bounds=False)
        rates[name, signal] = run.metrics.decode_hit_rate
    assert rates["utility", "speculative"] > rates["lru", "speculative"] + 0.1
    assert rates["utility", "speculative"] > rates["utility", "autoregressive"] + 0.02


def test_signals_and_rules_are_chosen_by_configuration() -> None:
    trace = verified_trace()
    hits = set()
    kinds = [("speculative", rule) for rule in BOUNDARY_RULES] + [("autoregressive", "fixed"), ("recency", "fixed")]
    for signal, rule in kinds:
        utility = {"signal": signal, "boundaries": rule}
        cache = {"policy": "utility", "scope": "global", "budget_ratio": 0.3}
        config = parse_config({"cache": cache, "utility": utility})
        hits.add(simulate(trace, make_hardware(), config, bounds=False).metrics.hits)
    assert len(hits) == len(kinds)
    with pytest.raises(ConfigError, match="unknown boundary rule 'fluctuations'; did you mean 'fluctuation'"):
        parse_config({"cache": {"budget_ratio": 0.5}, "utility": {"boundaries": "fluctuations"}})


def test_a_cache_without_a_signal_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a utility signal"):
        make_cache_policy("utility")


def test_queue_gives_the_most_useful_first_and_equals_in_order_of_asking() -> None:
    queue = UtilityQueue(top=5)
    for key, level in (((0, 1), 2), ((0, 2), 5), ((1, 3), 2), ((1, 4), 5), ((2, 0), 1)):
        queue.push(key, level)
    queue.push((1, 3), 2)  # again at the same level: keeps its place
    queue.push((2, 0), 4)  # has become more useful
    queue.push((2, 9), queue.predicted_level)  # named by a predictor: before all others
    popped = []
    while (key := queue.pop(1)) is not None:
        popped.append(key)
    assert popped == [(2, 9), (0, 2), (1, 4), (2, 0), (0, 1), (1, 3)]
    assert len(queue) == 0


def test_nothing_below_the_threshold_is_issued_and_it_waits_for_a_lower_one() -> None:
    queue = UtilityQueue(top=5)
    queue.push((0, 1), 2)
    queue.push((0, 2), 4)
    assert queue.pop(3) == (0, 2)
    assert queue.pop(3) is None and (0, 1) in queue
    assert queue.pop(2) == (0, 1)


def test_stale_requests_are_dropped_wherever_they_are_in_the_queue() -> None:
    queue = UtilityQueue(top=5)
    for layer in range(3):
        for expert in range(3):
            queue.push((layer, expert), 1 + (layer + expert) % 5)
    queue.drop_layer(1)
    assert len(queue) == 6
    left = []
    while (key := queue.pop(0)) is not None:
        left.append(key)
    assert len(left) == 6 and all(key[0] != 1 for key in left)


def test_levels_never_rise_from_pop_to_pop_in_a_random_run() -> None:
    source = random.Random(1)
    queue = UtilityQueue(top=5)
    levels: dict[Key, int] = {}
    for _ in range(500):
        for _ in range(source.randrange(4)):
            key = (source.randrange(4), source.randrange(20))
            levels[key] = source.randrange(7)
            queue.push(key, levels[key])
        threshold = source.randrange(1, 7)
        popped = queue.pop(threshold)
        best = max(levels.values(), default=-1)
        if popped is None:
            assert best < threshold
        else:
            assert levels.pop(popped) == best >= threshold
