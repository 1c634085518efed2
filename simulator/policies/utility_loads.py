"""Which experts to load for the pass to come while it is drafted, the most useful first, and how useful one must be.

Stated by MoE-SpAc (arXiv 2603.09983): a priority queue ordered by utility, from the highest down to the threshold tau;
experts below tau leave first; loads fit free device memory and the time of drafting. By its released code: requests
come up as soon as a layer has been routed, for its next pass. Ours: requests of a layer that has passed are dropped
wherever they are in the queue; which tokens each expert will serve is taken from the layer's latest pass; an expert
makes room for a hotter one even where both reach tau; copies under way count against the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from simulator.policies.balancer import ExpertTimes, Ints, global_threshold, layer_thresholds, threshold_table
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
        layers = len(signal.states)
        self._ran: list[tuple[Sequence[int], Sequence[int]]] = [((), ())] * layers
        """Experts that each layer last ran, and how many tokens each served [L]."""
        self._always = config.loads == "always"
        self.thresholds: list[int] = [config.tau or signal.top + 1] * layers
        self.copy_ns: list[int] = times.copy_ns.tolist()
        self._queue = UtilityQueue(signal.top)
        self._named: set[Key] = set()
        """Keys of the queue that a predictor named."""

    def routed(self, layer: int, experts: Sequence[int], tokens: Sequence[int], places: bytearray) -> None:
        """`layer` is about to run: what was asked for it is too late, and its utilities have moved.

        Args:
            layer: MoE layer index.
            experts, tokens: what it runs, and how many tokens each serves.
            places: of its experts; not 0 for those with a place on the device.
        """
        self._named.clear()
        self._queue.drop_layer(layer)
        self._ran[layer] = experts, tokens
        if self._always:
            self._ask(layer, places)

    def balance(self, window_ns: int, free_bytes: int, places: Sequence[bytearray], coming: Iterable[Key]) -> int:
        """Set the thresholds for the pass to come, and ask for what reaches them.

        Args:
            window_ns: time in which loads can hide.
            free_bytes: device memory for experts that is free.
            places: of the experts of each layer; not 0 for those with a place on the device.
            coming: copies that are queued or in flight.

        Returns:
            what of the time those copies leave.
        """
        left_ns = window_ns
        for layer, _ in coming:
            left_ns -= self.copy_ns[layer]
        left_ns = max(0, left_ns)
        if self._config.tau is None:
            self._choose(left_ns, free_bytes, places)
        self._queue = UtilityQueue(self._top)
        for layer in range(len(places)):
            self._ask(layer, places[layer])
        return left_ns

    def name(self, layer: int, experts: Iterable[int], places: bytearray) -> None:
        """A predictor names experts of the next layer (Speculating Experts, arXiv 2603.19289): asked for before all
        others, until that layer runs."""
        for expert in experts:
            if not places[expert]:
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
        queue, limit = self._queue, self._config.in_flight if self._always else 0
        while True:
            has_time = window_ns is not None or under_way < limit
            key = queue.pop(1 if has_time else queue.predicted_level)
            if key is None:
                return loads
            level = self._signal.state(key[0], key[1])
            if window_ns is not None:
                window_ns -= self.copy_ns[key[0]]
                if window_ns < 0:
                    queue.push(key, level)
                    return loads
            one = load(key, None if key in self._named else level)
            if one is not None:
                loads.append(one)
                under_way += one.reason == UTILITY

    def _ask(self, layer: int, places: bytearray) -> None:
        """Requests for experts of a layer that reach its threshold and have no place."""
        least = self.thresholds[layer]
        if least > self._top:
            return
        cells, first = self._signal.cells, layer * self._signal.num_experts
        for expert in range(len(places)):
            if cells[first + expert] >= least and not places[expert]:
                self._queue.push((layer, expert), cells[first + expert])

    def _choose(self, window_ns: int, free_bytes: int, places: Sequence[bytearray]) -> None:
        """The thresholds that the balancer finds."""
        states = self._signal.states.astype(np.int64)
        layers = len(states)
        resident = np.frombuffer(b"".join(places), dtype=np.uint8).reshape(states.shape) > 0
        table = threshold_table(states, self._frequencies(), resident, self._times, self._top)
        objective = self._config.objective
        if self._config.scope == "pass":
            self.thresholds[:] = [global_threshold(table, free_bytes, window_ns, objective)] * layers
        else:
            memory = np.full(layers, free_bytes // layers)
            window = np.full(layers, window_ns // layers)
            self.thresholds[:] = layer_thresholds(table, memory, window, objective).tolist()

    def _frequencies(self) -> Ints:
        """Tokens that each expert served when its layer last ran, cut to what the times know [L, E]."""
        layers, width = len(self._ran), self._signal.num_experts
        cells: list[int] = []
        served: list[int] = []
        for layer, (experts, tokens) in enumerate(self._ran):
            cells += [layer * width + expert for expert in experts]
            served += tokens
        frequencies = np.zeros(layers * width, dtype=np.int64)
        frequencies[cells] = served
        return np.asarray(np.minimum(frequencies, self._most).reshape(layers, width))
