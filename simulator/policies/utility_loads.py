"""Which experts to load for the pass to come while it is drafted, the most useful first, and how useful one must be.

Stated by MoE-SpAc (arXiv 2603.09983): a priority queue ordered by utility, from the highest down to the threshold tau;
experts below tau leave first; loads fit free device memory and the time of drafting. By its released code: requests
come up as soon as a layer has been routed, for its next pass. Ours: requests of a layer that has passed are dropped
wherever they are in the queue; which tokens each expert will serve is taken from the layer's latest pass; an expert
makes room for a hotter one even where both reach tau; copies under way count against the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from simulator.policies.balancer import ExpertTimes, global_threshold, layer_thresholds, threshold_table
from simulator.policies.eviction import Key
from simulator.policies.plans import UTILITY, Load
from simulator.policies.utility import UtilitySignal
from simulator.policies.utility_cache import UtilityQueue
from simulator.policies.utility_config import UtilityConfig


class UtilityLoads:
    """Requests for loads, and the threshold of each layer.

    Args:
        config: what was chosen; its `loads` is not `none`.
        signal: utilities, which somebody else keeps up to date.
        times: what experts cost on either side, and to load.

    Attributes:
        thresholds: tau of each layer [L], 1..top+1; changed in place. Above the top, as at first, nothing is asked for.
        copy_ns: time of loading one expert of each layer [L].
    """

    def __init__(self, config: UtilityConfig, signal: UtilitySignal, times: ExpertTimes) -> None:
        self._config = config
        self._signal = signal
        self._times = times
        self._top = signal.top
        self._most = times.device_ns.shape[1] - 1
        self._frequencies = np.zeros(signal.states.shape, dtype=np.int64)
        """Tokens that each expert served when its layer last ran, cut to what the times know [L, E]."""
        layers = len(signal.states)
        self.thresholds: list[int] = [config.tau or signal.top + 1] * layers
        self.copy_ns: list[int] = times.copy_ns.tolist()
        self._queue = UtilityQueue(signal.top)
        self._named: set[Key] = set()
        """Keys of the queue that a predictor named."""

    def routed(self, layer: int, experts: Sequence[int], tokens: Sequence[int], held: Collection[int]) -> None:
        """`layer` is about to run: what was asked for it is too late, and its utilities have moved.

        Args:
            layer: MoE layer index.
            experts, tokens: what it runs, and how many tokens each serves.
            held: its experts with a place on the device.
        """
        self._named.clear()
        self._queue.drop(lambda key: key[0] == layer)
        row = self._frequencies[layer]
        row[:] = 0
        row[list(experts)] = tokens
        np.minimum(row, self._most, out=row)
        if self._config.loads == "always" and self.thresholds[layer] <= self._top:
            self._ask(layer, held)

    def balance(self, window_ns: int, free_bytes: int, held: Sequence[Collection[int]], coming: Iterable[Key]) -> int:
        """Set the thresholds for the pass to come, and ask for what reaches them.

        Args:
            window_ns: time in which loads can hide.
            free_bytes: device memory for experts that is free.
            held: per layer its experts with a place on the device.
            coming: copies that are queued or in flight.

        Returns:
            what of the time those copies leave.
        """
        left_ns = max(0, window_ns - sum(self.copy_ns[layer] for layer, _ in coming))
        if self._config.tau is None:
            self._choose(left_ns, free_bytes, held)
        self._queue = UtilityQueue(self._top)
        for layer, experts in enumerate(held):
            self._ask(layer, experts)
        return left_ns

    def name(self, layer: int, experts: Iterable[int], held: Collection[int]) -> None:
        """A predictor names experts of the next layer (Speculating Experts, arXiv 2603.19289): asked for before all
        others, until that layer runs."""
        for expert in experts:
            if expert not in held:
                self._queue.push((layer, expert), self._queue.predicted_level)
                self._named.add((layer, expert))

    def plan(self, load: Callable[[Key, int | None], Load | None], window_ns: int | None, under_way: int) -> list[Load]:
        """Take requests from the queue, the most useful first.

        Args:
            load: loads a key where only experts below a level make room for it (None: any may); None if there is no
                room.
            window_ns: while drafting: the time that all copies together may take. While a pass runs: None.
            under_way: how many of these loads are queued or in flight.
        """
        loads: list[Load] = []
        queue, limit = self._queue, self._config.in_flight if self._config.loads == "always" else 0
        while True:
            has_time = window_ns is not None or under_way < limit
            key = queue.pop(1 if has_time else queue.predicted_level)
            if key is None:
                return loads
            level = int(self._signal.states[key])
            if window_ns is not None:
                window_ns -= self.copy_ns[key[0]]
                if window_ns < 0:
                    queue.push(key, level)
                    return loads
            one = load(key, None if key in self._named else level)
            if one is not None:
                loads.append(one)
                under_way += one.reason == UTILITY

    def _ask(self, layer: int, held: Collection[int]) -> None:
        """Requests for experts of a layer that reach its threshold and have no place."""
        states = self._signal.states[layer]
        for expert in np.flatnonzero(states >= self.thresholds[layer]).tolist():
            if expert not in held:
                self._queue.push((layer, expert), int(states[expert]))

    def _choose(self, window_ns: int, free_bytes: int, held: Sequence[Collection[int]]) -> None:
        """The thresholds that the balancer finds."""
        states = self._signal.states.astype(np.int64)
        layers = len(states)
        resident = np.zeros(states.shape, dtype=np.bool_)
        for layer, experts in enumerate(held):
            resident[layer, list(experts)] = True
        table = threshold_table(states, self._frequencies, resident, self._times, self._top)
        objective = self._config.objective
        if self._config.scope == "pass":
            self.thresholds[:] = [global_threshold(table, free_bytes, window_ns, objective)] * layers
        else:
            memory = np.full(layers, free_bytes // layers)
            window = np.full(layers, window_ns // layers)
            self.thresholds[:] = layer_thresholds(table, memory, window, objective).tolist()
