"""What no policy can beat: perfect eviction, perfect prefetch, and the larger of compute and transfer."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.cost_model import ComputeCosts, CostModel
from simulator.executed import Routing, executed_routing
from simulator.policies.cache import Key
from simulator.policies.capacity import Capacity, plan_capacity, preloaded_keys
from simulator.policies.config import CpuConfig, OffloadConfig
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Phase, Trace

_NEVER = 1 << 62
_REMEMBERED = 16
"""Answers of `_misses` that are kept: sweeps ask for the same trace and budget again and again."""

Misses = npt.NDArray[np.uint16]
_known_misses: dict[tuple[object, ...], Misses] = {}


def belady_hit_rates(trace: Trace, config: OffloadConfig, warmup_passes: int = 0) -> tuple[float, float]:
    """Hit rates of evictions that know the future, with the same budget, the same start and no prefetch.

    Args:
        trace: what is replayed.
        config: budget, and what is on the device at the start.
        warmup_passes: decode passes at the start whose look-ups are not counted.

    Returns:
        The best over all look-ups, and the best over those of decode passes, which another eviction may reach: one
        that keeps nothing for a later prefill. Upper bounds for on-demand loading when all experts have equal bytes
        (Belady 1966), close to them otherwise.
    """
    return _hit_rates(trace, config, executed_routing(trace, config), warmup_passes)


def _hit_rates(trace: Trace, config: OffloadConfig, routing: Routing, warmup_passes: int) -> tuple[float, float]:
    """See `belady_hit_rates`."""
    lookups = _lookups(routing)
    decode = np.array(_counted_decode(trace, warmup_passes))
    counted = decode | np.array([item.phase == Phase.PREFILL for item in trace.passes])
    hits = (lookups - _misses(trace, config, routing, counted.tolist()))[counted]
    decode_hits = (lookups - _misses(trace, config, routing, decode.tolist()))[decode]
    return float(hits.sum() / max(1, lookups[counted].sum())), float(decode_hits.sum() / max(1, lookups[decode].sum()))


def _lookups(routing: Routing) -> npt.NDArray[np.int64]:
    """How many experts each layer of each pass runs [passes, L]."""
    return np.array([[len(experts) for experts in layers] for layers in routing.experts], dtype=np.int64)


def _counted_decode(trace: Trace, warmup_passes: int) -> list[bool]:
    """Which passes are decode passes behind the warm-up."""
    decode = [place for place, item in enumerate(trace.passes) if item.phase != Phase.PREFILL]
    counted = set(decode[warmup_passes:])
    return [place in counted for place in range(len(trace.passes))]


def _misses(trace: Trace, config: OffloadConfig, routing: Routing, counted: list[bool]) -> Misses:
    """Misses [passes, L] of a perfect eviction for which misses in passes that are not `counted` cost nothing.

    The same decisions as an `OffloadCore` with the `Belady` policy takes, in a tighter loop. A use in a pass
    that is not counted is as good as none: of the times an expert could be kept, only those that end in a counted pass
    are worth something, and the greedy choice of the earliest end keeps the most of them.
    """
    cpu_layers = config.cpu.whole_layers(trace.shape.num_moe_layers)
    capacity = plan_capacity(config.cache, trace.shape, cpu_layers)
    start = _start(config, capacity, trace.shape, cpu_layers)
    partitions = capacity.partition_bytes, capacity.partition_of_layer
    key = (trace.digest, partitions, routing.digest, tuple(counted), cpu_layers, start)
    if key not in _known_misses:
        while len(_known_misses) >= _REMEMBERED:
            _known_misses.pop(next(iter(_known_misses)), None)
        next_uses = _next_uses(routing, trace.shape, counted, start)
        _known_misses[key] = _perfect_eviction(routing.experts, next_uses, capacity, trace.shape, cpu_layers, start)
    return _known_misses[key]


def _start(config: OffloadConfig, capacity: Capacity, shape: ModelShape, cpu_layers: frozenset[int]) -> tuple[Key, ...]:
    """What is on the device before the first pass."""
    free = list(capacity.partition_bytes)
    start = []
    for key in preloaded_keys(config.cache, capacity, shape, cpu_layers):
        partition = capacity.partition_of_layer[key[0]]
        if free[partition] >= shape.expert_bytes[key[0]]:
            free[partition] -= shape.expert_bytes[key[0]]
            start.append(key)
    return tuple(start)


def _next_uses(routing: Routing, shape: ModelShape, counts: Sequence[bool], start: Sequence[Key]) -> list[int]:
    """For each key of the start and then each look-up, the place of the next look-up of the same key if that is in a
    pass that counts."""
    lengths = _lookups(routing).ravel()
    places = np.repeat(np.arange(len(lengths)), lengths)
    flat = chain.from_iterable(chain.from_iterable(routing.experts))
    experts = np.fromiter(flat, dtype=np.int64, count=len(places))
    first = [layer * shape.num_experts + expert for layer, expert in start]
    passes = np.concatenate([np.zeros(len(first), dtype=np.int64), places // shape.num_moe_layers])
    ids = np.concatenate([np.array(first, dtype=np.int64), places % shape.num_moe_layers * shape.num_experts + experts])
    order = np.argsort(ids, kind="stable")
    following = np.full(len(ids), _NEVER, dtype=np.int64)
    same = (ids[order[1:]] == ids[order[:-1]]) & np.asarray(counts)[passes[order[1:]]]
    following[order[:-1][same]] = order[1:][same]
    result: list[int] = following.tolist()
    return result


def _perfect_eviction(
    routing: Sequence[Sequence[Sequence[int]]],
    next_uses: Sequence[int],
    capacity: Capacity,
    shape: ModelShape,
    cpu_layers: frozenset[int],
    start: Sequence[Key],
) -> Misses:
    """Misses [passes, L] when the expert whose next use is farthest leaves first; of `cpu_layers` all look-ups."""
    partitions = [_Partition(size) for size in capacity.partition_bytes]
    misses = np.zeros((len(routing), shape.num_moe_layers), dtype=np.uint16)
    for key, next_use in zip(start, next_uses, strict=False):
        partitions[capacity.partition_of_layer[key[0]]].preload(key, next_use, shape.expert_bytes[key[0]])
    place = len(start)
    for number, layers in enumerate(routing):
        for layer, experts in enumerate(layers):
            if not experts:
                continue
            partition = partitions[capacity.partition_of_layer[layer]]
            keys = [(layer, expert) for expert in experts]
            stop = place + len(keys)
            if layer in cpu_layers:
                misses[number, layer] = len(keys)
                place = stop
                continue
            hits = partition.ask(keys, next_uses[place:stop], shape.expert_bytes[layer], shape.expert_bytes)
            misses[number, layer] = len(keys) - hits
            place = stop
    return misses


class _Partition:
    """Device memory under perfect eviction: a heap of (minus next use, age, key), stale entries left in. The entry of
    a resident key is the one of the age noted for it."""

    def __init__(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes
        self._resident: dict[Key, int] = {}
        self._heap: list[tuple[int, int, Key]] = []
        self._age = 0

    def preload(self, key: Key, next_use: int, size: int) -> None:
        """Have `key` there from the start."""
        self._age += 1
        self._resident[key] = self._age
        self._free_bytes -= size
        heapq.heappush(self._heap, (-next_use, self._age, key))

    def ask(self, keys: list[Key], next_uses: Sequence[int], size: int, sizes: Sequence[int]) -> int:
        """Look `keys` of one layer up, in waves where they do not fit at once. Gives how many were there."""
        resident = self._resident
        missing = [key for key in keys if key not in resident]
        hits = len(keys) - len(missing)
        waiting = dict(zip(keys, next_uses, strict=True))
        while waiting:
            while missing and self._make_room(size, sizes, waiting):
                resident[missing.pop(0)] = 0
            done = list(waiting) if not missing else [key for key in waiting if key in resident]
            for key in done:
                self._age += 1
                resident[key] = self._age
                heapq.heappush(self._heap, (-waiting.pop(key), self._age, key))
        return hits

    def _make_room(self, size: int, sizes: Sequence[int], pinned: dict[Key, int]) -> bool:
        """Take `size` bytes, evicting from the top of the heap; False, with nothing evicted, when it cannot."""
        free = self._free_bytes
        victims: list[tuple[int, int, Key]] = []
        heap, resident = self._heap, self._resident
        while free < size:
            if not heap:
                for entry in victims:
                    heapq.heappush(heap, entry)
                return False
            entry = heapq.heappop(heap)
            key = entry[2]
            if resident.get(key) == entry[1] and key not in pinned:
                victims.append(entry)
                free += sizes[key[0]]
        for _, _, key in victims:
            del resident[key]
        self._free_bytes = free - size
        return True


class _Layer(NamedTuple):
    """What one layer of a pass takes: its compute, and its copies under perfect eviction."""

    dense_ns: int
    decide_ns: int
    experts_ns: int
    copies_ns: int


def tpot_bounds(trace: Trace, costs: CostModel, config: OffloadConfig, warmup_passes: int = 0) -> dict[str, float]:
    """The best hit rates, and times per output token in milliseconds that loading could come down to.

    Args:
        trace: what is replayed.
        costs: of the machine.
        config: budget, start and CPU.
        warmup_passes: decode passes at the start that are not counted, as in the figures of the run.

    Returns:
        `belady_hit_rate`, `belady_decode_hit_rate`: see `belady_hit_rates`.
        `compute_ms`: everything but copies and their issue, prediction and the bookkeeping of loads.
        `transfer_ms`: copies that a perfect eviction still needs in decode, back to back.
        `max_ms`: the larger of the two. With experts of equal bytes no policy is faster. Where the CPU may run what
        is missing, nothing must be copied, and each layer's experts take the best split over device and CPU.
        `prefetch_ms`: these copies by a perfect prefetch, in the order of need, as far ahead as it likes.
        `look_ahead_ms`: by a perfect prefetch that looks one layer ahead, from its routing on (Speculating Experts,
        arXiv 2603.19289, Eq. 1 as a recurrence); the first layer of a pass is not foreseen.
        `on_demand_ms`: without prefetch.
        The last three stand for that one eviction. They are what perfection in one part would give, and a policy
        that evicts less well may hide its copies better.
    """
    routing = executed_routing(trace, config)
    hit_rate, decode_hit_rate = _hit_rates(trace, config, routing, warmup_passes)
    counted = _counted_decode(trace, warmup_passes)
    tokens = sum(trace.output_tokens(item) for item, counts in zip(trace.passes, counted, strict=True) if counts)
    if not tokens:
        return {"belady_hit_rate": hit_rate}
    compute_ns, transfer_ns, prefetch_ns, look_ahead_ns = _perfect_times(trace, costs, config, routing, counted)
    times_ns = {
        "compute_ms": compute_ns,
        "transfer_ms": transfer_ns,
        "max_ms": max(compute_ns, transfer_ns),
        "prefetch_ms": prefetch_ns,
        "look_ahead_ms": look_ahead_ns,
        "on_demand_ms": compute_ns + transfer_ns,
    }
    rates = {"belady_hit_rate": hit_rate, "belady_decode_hit_rate": decode_hit_rate}
    return rates | {name: value / tokens / 1e6 for name, value in times_ns.items()}


def _perfect_times(
    trace: Trace, costs: CostModel, config: OffloadConfig, routing: Routing, counted: list[bool]
) -> tuple[int, int, int, int]:
    """Nanoseconds of all counted decode passes: compute, copies, prefetch without limit, prefetch one layer ahead."""
    misses = _misses(trace, config, routing, counted).tolist()
    copy_ns = [costs.copy_ns(size) for size in trace.shape.expert_bytes]
    decide_ns = costs.compute.decide_ns(0)
    experts_time = lru_cache(maxsize=None)(partial(_experts_time, costs.compute, config.cpu, trace.shape))
    compute_ns = transfer_ns = unlimited_ns = look_ahead_ns = 0
    now_ns = link_ns = 0  # of a stretch of decode passes, in which the link may run ahead
    for place, item in enumerate(trace.passes):
        if not counted[place]:
            unlimited_ns += now_ns
            now_ns = link_ns = 0
            continue
        tokens, context = item.stop - item.start, int(trace.position[item.start])
        layers = []
        dense = costs.compute.dense_of_layers_ns(tokens, context)
        for layer, experts in enumerate(routing.experts[place]):
            if not experts:
                layers.append(_Layer(dense[layer], 0, 0, 0))
                continue
            experts_ns, is_loaded = experts_time(layer, tokens, len(experts))
            copies_ns = misses[place][layer] * copy_ns[layer] if is_loaded else 0
            layers.append(_Layer(dense[layer], decide_ns, experts_ns, copies_ns))
        overhead_ns = costs.compute.overhead_ns(tokens) + costs.drafting_ns(trace.info.draft, tokens - 1)
        compute_ns += overhead_ns
        look_ahead_ns += overhead_ns + _look_ahead_ns(layers)
        now_ns += overhead_ns
        for before_ns, bookkeeping_ns, experts_ns, copies_ns in layers:
            compute_ns += before_ns + bookkeeping_ns + experts_ns
            transfer_ns += copies_ns
            link_ns += copies_ns
            now_ns = max(now_ns + before_ns + bookkeeping_ns, link_ns) + experts_ns
    return compute_ns, transfer_ns, unlimited_ns + now_ns, look_ahead_ns


def _experts_time(
    compute: ComputeCosts, cpu: CpuConfig, shape: ModelShape, layer: int, tokens: int, active: int
) -> tuple[int, bool]:
    """Time of a layer's experts at best, and whether its misses must be loaded.

    Where the CPU may take what is missing, the best is the split over device and CPU that ends first, whatever it
    takes to have the device's part there.
    """
    if layer in cpu.whole_layers(shape.num_moe_layers):
        return compute.cpu_experts_ns(layer, tokens, active, active), False
    whole_ns = compute.experts_ns(layer, tokens, active, active)
    if cpu.policy == "none":
        return whole_ns, True
    splits = [
        max(
            compute.experts_ns(layer, tokens, active - count, active) if count < active else 0,
            compute.cpu_experts_ns(layer, tokens, count, active),
        )
        for count in range(1, active + 1)
    ]
    return min(whole_ns, *splits), False


def _look_ahead_ns(layers: Sequence[_Layer]) -> int:
    """One pass when the copies of a layer may begin once the layer before it has been routed, the first one's once
    it has been routed itself."""
    now_ns = 0
    landed_ns = layers[0].dense_ns + layers[0].copies_ns
    next_copies_ns = [each.copies_ns for each in layers[1:]] + [0]
    for (dense_ns, decide_ns, experts_ns, _), copies_ns in zip(layers, next_copies_ns, strict=True):
        routed_ns = now_ns + dense_ns
        ready_ns = max(routed_ns + decide_ns, landed_ns)
        landed_ns = max(routed_ns, landed_ns) + copies_ns
        now_ns = ready_ns + experts_ns
    return now_ns
