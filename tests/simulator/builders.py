"""Small traces, shapes and machines built in code, so that tests depend on no file and on no random stream of numpy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simulator.policies.config import OffloadConfig, parse_config
from simulator.policies.eviction import Key, Leavers
from simulator.policies.plans import COMING, LANDED
from trace_capture.hardware import DeviceProfile, HardwareProfile, HostProfile, LinkProfile, MeasuredCosts, Quantity
from trace_capture.model_shape import ModelShape
from trace_capture.trace import NO_EXPERT, Phase, Trace, TraceInfo


def make_shape(
    layers: int = 4, experts: int = 16, top_k: int = 3, expert_bytes: Sequence[int] | int = 1000, **fields: Any
) -> ModelShape:
    """A shape whose decoder layers are all MoE layers."""
    sizes = (expert_bytes,) * layers if isinstance(expert_bytes, int) else tuple(expert_bytes)
    return ModelShape(
        name="toy",
        architecture="toy",
        num_layers=layers,
        moe_layer_ids=tuple(range(layers)),
        num_experts=experts,
        top_k=top_k,
        expert_bytes=sizes,
        dense_bytes=fields.pop("dense_bytes", (5000,) * layers),
        **fields,
    )


def trace_of(
    shape: ModelShape,
    passes: Sequence[tuple[Phase, Sequence[Sequence[Sequence[int]]]]],
    sequences: Sequence[int] | None = None,
    predicted: np.ndarray | None = None,
) -> Trace:
    """A trace from passes of (phase, rows), a row being one list of ids per layer (empty: not routed).

    Args:
        sequences: sequence number per pass; all 0 by default.
        predicted: a `quasi-hidden` column [T, L, P].
    """
    rows: list[list[list[int]]] = []
    columns: dict[str, list[int]] = {"sequence": [], "pass_id": [], "phase": [], "position": []}
    position: dict[int, int] = {}
    for number, (phase, tokens) in enumerate(passes):
        sequence = sequences[number] if sequences else 0
        for token in tokens:
            rows.append([list(ids) or [NO_EXPERT] * shape.top_k for ids in token])
            place = position.get(sequence, 0)
            position[sequence] = place + 1
            for name, value in zip(columns, (sequence, number, int(phase), place), strict=True):
                columns[name].append(value)
    count = len(rows)
    experts = np.asarray(rows, dtype=np.uint16).reshape(count, shape.num_moe_layers, shape.top_k)
    return Trace(
        info=TraceInfo(shape=shape, source="synthetic"),
        sequence=np.asarray(columns["sequence"], dtype=np.int32),
        pass_id=np.asarray(columns["pass_id"], dtype=np.int32),
        phase=np.asarray(columns["phase"], dtype=np.uint8),
        position=np.asarray(columns["position"], dtype=np.int32),
        token_id=np.zeros(count, dtype=np.int32),
        accepted=np.ones(count, dtype=np.bool_),
        experts=experts,
        weights=np.full(experts.shape, 1 / shape.top_k, dtype=np.float16),
        predicted={} if predicted is None else {"quasi-hidden": predicted},
    )


def decode_trace(shape: ModelShape, tokens: Sequence[Sequence[Sequence[int]]], **more: Any) -> Trace:
    """A trace of decode passes only, one row of ids per layer each."""
    return trace_of(shape, [(Phase.DECODE, [token]) for token in tokens], **more)


def mixed_trace(shape: ModelShape, seed: int = 1, sequences: int = 3, decode: int = 20, right: float = 0.8) -> Trace:
    """Prefill, decode and verify passes with skewed, sticky routing, and a predictor that is `right` so often.

    The last layer of a prefill routes its last token alone, as transformers may do.
    """
    source = random.Random(seed)
    layers, num, top_k = shape.num_moe_layers, shape.num_experts, shape.top_k
    ranks = [source.sample(range(num), num) for _ in range(layers)]
    weights = [1.0 / (rank + 1) for rank in range(num)]

    def draw(layer: int, before: list[int]) -> list[int]:
        kept = [expert for expert in before if source.random() < 0.4]
        while len(kept) < top_k:
            expert = ranks[layer][source.choices(range(num), weights)[0]]
            if expert not in kept:
                kept.append(expert)
        return kept

    passes: list[tuple[Phase, list[list[list[int]]]]] = []
    numbers: list[int] = []
    last: list[list[int]] = [[] for _ in range(layers)]
    for sequence in range(sequences):
        for step in range(decode + 1):
            count = 7 if step == 0 else 3 if step % 6 == 5 else 1
            tokens = []
            for _ in range(count):
                last = [draw(layer, last[layer]) for layer in range(layers)]
                tokens.append(last)
            if step == 0:
                tokens = [[*token[:-1], []] for token in tokens[:-1]] + tokens[-1:]
            passes.append((Phase.PREFILL if step == 0 else Phase.VERIFY if count > 1 else Phase.DECODE, tokens))
            numbers.append(sequence)
    plain = trace_of(shape, passes, numbers)
    return trace_of(shape, passes, numbers, predicted=guess(plain, source, right))


def guess(trace: Trace, source: random.Random, right: float) -> np.ndarray:
    """Predictions [T, L, K] for every layer but the first, each id right with probability `right`."""
    shape = trace.shape
    ids = np.array(trace.experts)
    ids[:, 0] = NO_EXPERT
    for token in range(trace.num_tokens):
        for layer in range(1, shape.num_moe_layers):
            row = [int(expert) for expert in ids[token, layer]]
            if NO_EXPERT in row:
                continue
            for place in range(shape.top_k):
                if source.random() > right:
                    row[place] = source.choice([other for other in range(shape.num_experts) if other not in row])
            ids[token, layer] = row
    return ids


def make_hardware(
    bytes_per_s: float = 1e9,
    latency_ns: float = 0,
    issue_ns: float = 0,
    wakeup_ns: float = 0,
    measured: MeasuredCosts | None = None,
    host: HostProfile | None = None,
    **device: float,
) -> HardwareProfile:
    """A machine; by default a link of one byte per nanosecond without any other cost, and a fast device."""
    numbers = {"memory_bytes": 1e9, "memory_bytes_per_s": 1e10, "flops_per_s": 1e15, "launch_ns": 0.0} | device
    return HardwareProfile(
        name="toy machine",
        link=LinkProfile(
            name="toy link",
            h2d_bytes_per_s=quantity(bytes_per_s),
            latency_ns=quantity(latency_ns),
            issue_ns=quantity(issue_ns),
            wakeup_ns=quantity(wakeup_ns),
        ),
        device=DeviceProfile(name="toy device", **{name: quantity(value) for name, value in numbers.items()}),
        measured=measured,
        host=host,
    )


def make_host(
    ram: float = 1e9,
    cores: float = 1,
    core_rate: float = 1e9,
    core_flops: float = 1e15,
    contended_ratio: float = 1.0,
    half_rate_bytes: float = 0,
    expert_ns: float = 0,
    layer_ns: float = 0,
    threads: float | None = None,
) -> HostProfile:
    """Cores and memory; by default one core that takes a byte per nanosecond, at two per weight, at no other cost."""
    return HostProfile(
        name="toy host",
        cores=quantity(cores),
        ram_bytes=quantity(1e9),
        ram_bytes_per_s=quantity(ram),
        contended_ratio=quantity(contended_ratio),
        core_weights_per_s=quantity(core_rate / 2),
        core_flops_per_s=quantity(core_flops),
        half_rate_bytes=quantity(half_rate_bytes),
        expert_dispatch_ns=quantity(expert_ns),
        layer_dispatch_ns=quantity(layer_ns),
        threads=None if threads is None else quantity(threads),
    )


def make_measured(**fields: Any) -> MeasuredCosts:
    """Measured costs of the toy model: one token count, every piece a different round number."""
    numbers: dict[str, Any] = {
        "model": "toy",
        "tokens": (1,),
        "dense_ns": (300.0,),
        "experts_ns": (700.0,),
        "cpu_experts_ns": (9000.0,),
        "pass_overhead_ns": (5000.0,),
        "decide_ns": 40.0,
        "decide_per_load_ns": 10.0,
        "predict_ns": 25.0,
    }
    return MeasuredCosts(**(numbers | fields))


def quantity(value: float) -> Quantity:
    """A number of no particular origin."""
    return Quantity(value=value, kind="guess")


def room_for(policy: str, shape: ModelShape, budget_bytes: int) -> int:
    """A budget with which a policy can run: what was asked for, or room for all experts where it needs that."""
    return shape.total_expert_bytes if policy == "resident" else budget_bytes


def make_config(policy: str = "lru", source: str = "none", **cache: Any) -> OffloadConfig:
    """A configuration by policy, prefetch source and the fields of `CacheConfig`; `serial` goes to the device and
    `cpu` is a table of its own."""
    cpu = cache.pop("cpu", {})
    device = {"serial": cache.pop("serial", False)}
    prefetch: dict[str, Any] = {"source": source}
    if "max_experts" in cache:
        prefetch["max_experts"] = cache.pop("max_experts")
    return parse_config({"cache": {"policy": policy, **cache}, "prefetch": prefetch, "cpu": cpu, "device": device})


class Only(Leavers):
    """Those keys may leave for which a function says so."""

    def __init__(self, allows: Callable[[Key], bool]) -> None:
        self._allows = allows

    def allow(self, key: Key) -> bool:
        return bool(self._allows(key))


def places_of(landed: dict[int, bool], num_experts: int) -> bytearray:
    """Places of a layer's experts: True where the copy has landed, False while it is on its way; others have none."""
    places = bytearray(num_experts)
    for expert, is_landed in landed.items():
        places[expert] = LANDED if is_landed else COMING
    return places
