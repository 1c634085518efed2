"""What no policy can beat: perfect eviction, perfect prefetch, and the larger of compute and transfer."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from simulator.cost_model import CostModel
from simulator.machine import PassTimes
from simulator.policies.cache import Key
from simulator.policies.capacity import Capacity, plan_capacity
from simulator.policies.config import OffloadConfig
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Phase, Trace

_NEVER = 1 << 62


def belady_hit_rates(trace: Trace, config: OffloadConfig) -> tuple[float, float]:
    """Hit rates of an eviction that knows the future, with the same budget and no prefetch.

    The same decisions as an `OffloadCore` with the `Belady` policy takes, in a tighter loop.

    Returns:
        Over all look-ups, and over those of decode passes; upper bounds for on-demand loading when all experts
        have equal bytes (Belady 1966), close to it otherwise.
    """
    routing = [trace.pass_experts(item) for item in trace.passes]
    lookups = [sum(map(len, layers)) for layers in routing]
    stream = [(layer, expert) for layers in routing for layer, experts in enumerate(layers) for expert in experts]
    is_decode = [item.phase != Phase.PREFILL for item in trace.passes]
    next_uses = _next_uses(stream, trace.shape)
    hits = _perfect_eviction(routing, next_uses, plan_capacity(config.cache, trace.shape), trace.shape)
    decode_hits = sum(count for count, decode in zip(hits, is_decode, strict=True) if decode)
    decode_lookups = sum(count for count, decode in zip(lookups, is_decode, strict=True) if decode)
    return sum(hits) / max(1, sum(lookups)), decode_hits / max(1, decode_lookups)


def _next_uses(stream: Sequence[Key], shape: ModelShape) -> list[int]:
    """For each look-up, the place of the next look-up of the same key."""
    if not stream:
        return []
    pairs = np.asarray(stream, dtype=np.int64)
    ids = pairs[:, 0] * shape.num_experts + pairs[:, 1]
    order = np.argsort(ids, kind="stable")
    following = np.full(len(ids), _NEVER, dtype=np.int64)
    same = ids[order[1:]] == ids[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    result: list[int] = following.tolist()
    return result


def _perfect_eviction(
    routing: Sequence[Sequence[Sequence[int]]], next_uses: Sequence[int], capacity: Capacity, shape: ModelShape
) -> list[int]:
    """Hits per pass when the expert whose next use is farthest leaves first."""
    partitions = [_Partition(size) for size in capacity.partition_bytes]
    place = 0
    hits: list[int] = []
    for layers in routing:
        count = 0
        for layer, experts in enumerate(layers):
            if not experts:
                continue
            partition = partitions[capacity.partition_of_layer[layer]]
            keys = [(layer, expert) for expert in experts]
            stop = place + len(keys)
            count += partition.ask(keys, next_uses[place:stop], shape.expert_bytes[layer], shape.expert_bytes)
            place = stop
        hits.append(count)
    return hits


class _Partition:
    """Device memory under perfect eviction: a heap of (minus next use, age, key), stale entries left in."""

    def __init__(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes
        self._next_use: dict[Key, int] = {}
        self._heap: list[tuple[int, int, Key]] = []
        self._age = 0

    def ask(self, keys: list[Key], next_uses: Sequence[int], size: int, sizes: Sequence[int]) -> int:
        """Look `keys` of one layer up, in waves where they do not fit at once. Gives how many were there."""
        resident = self._next_use
        missing = [key for key in keys if key not in resident]
        hits = len(keys) - len(missing)
        waiting = dict(zip(keys, next_uses, strict=True))
        while waiting:
            while missing and self._make_room(size, sizes, waiting):
                resident[missing.pop(0)] = 0
            done = list(waiting) if not missing else [key for key in waiting if key in resident]
            for key in done:
                self._age += 1
                resident[key] = next_use = waiting.pop(key)
                heapq.heappush(self._heap, (-next_use, self._age, key))
        return hits

    def _make_room(self, size: int, sizes: Sequence[int], pinned: dict[Key, int]) -> bool:
        """Take `size` bytes, evicting from the top of the heap; False, with nothing evicted, when it cannot."""
        free = self._free_bytes
        victims: list[tuple[int, int, Key]] = []
        heap, resident = self._heap, self._next_use
        while free < size:
            if not heap:
                for entry in victims:
                    heapq.heappush(heap, entry)
                return False
            entry = heapq.heappop(heap)
            key = entry[2]
            if resident.get(key) == -entry[0] and key not in pinned:
                victims.append(entry)
                free += sizes[key[0]]
        for _, _, key in victims:
            del resident[key]
        self._free_bytes = free - size
        return True


def tpot_bounds(trace: Trace, passes: Sequence[PassTimes], costs: CostModel, config: OffloadConfig) -> dict[str, float]:
    """Lower bounds on TPOT in milliseconds, and the best hit rate, beside a result.

    Returns:
        `belady_hit_rate`; `compute_ms`: everything but stalls, issue and prediction; `transfer_ms`: copies that a
        perfect eviction still needs in decode, back to back; `max_ms`: the larger of the two, which a perfect
        prefetch without look-ahead limit would reach.
    """
    decode = [times for times in passes if times.phase != Phase.PREFILL]
    tokens = sum(times.tokens for times in decode)
    hit_rate, decode_hit_rate = belady_hit_rates(trace, config)
    if not tokens:
        return {"belady_hit_rate": hit_rate}
    parts = ("dense", "experts", "decide", "overhead")
    compute_ms = sum(times.terms_ns[name] for times in decode for name in parts) / tokens / 1e6
    per_layer = sum(costs.copy_ns(size) for size in trace.shape.expert_bytes) / trace.shape.num_moe_layers
    lookups = sum(
        len(experts) for item in trace.passes if item.phase != Phase.PREFILL for _, experts in trace.iter_layers(item)
    )
    transfer_ms = lookups * (1 - decode_hit_rate) * per_layer / tokens / 1e6
    return {
        "belady_hit_rate": hit_rate,
        "belady_decode_hit_rate": decode_hit_rate,
        "compute_ms": compute_ms,
        "transfer_ms": transfer_ms,
        "max_ms": max(compute_ms, transfer_ms),
    }
