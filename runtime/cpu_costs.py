"""What experts on the CPU cost in place: on the engine's own thread for them, beside the device and the link."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from runtime.measure import generate_offloaded
from runtime.models import LoadedModel, Sampling
from runtime.offloading import offloaded
from runtime.records import LayerTimes, PassRecord
from runtime.steadiness import Probes, around_passes, probed, steady_only
from simulator.policies.config import parse_config

_TOKENS = 24


class CpuCosts(NamedTuple):
    """Costs of a layer's experts on the CPU, by the names that `MeasuredCosts` and `CpuThreadCosts` have for them."""

    cpu_experts_ns: tuple[float, ...]
    """All of a layer's experts on the CPU by token count, from when they are handed over until they are back."""
    cpu_layer_ns: float
    """The part of it that does not depend on how many of the experts run there."""
    cpu_start_ns: float
    """Handing a layer's experts over: bookkeeping beside what a layer has in any case."""
    cpu_split_ns: float
    """Further time of the device's part of a layer of which another part runs on the CPU."""
    cpu_beside_ns: float
    """Further time of the CPU's part beside the device's."""


class _Layer(NamedTuple):
    times: LayerTimes
    on_device: int
    on_cpu: int


class _Pass(NamedTuple):
    record: PassRecord
    layers: list[_Layer]


def measure_cpu_costs(
    loaded: LoadedModel,
    ids: Tensor,
    counts: Sequence[int],
    rate: float,
    latency_ns: int,
    reference_ns: float,
    threads: int = 1,
) -> CpuCosts:
    """Run all layers on the CPU with prompts of each length, then misses alone.

    Args:
        loaded: an untouched model.
        ids: [1, T] to continue.
        counts: token counts, the first of them 1.
        rate, latency_ns: of the link.
        reference_ns: of the fixed work in calibration (`runtime.steadiness`).
        threads: of the CPU's part.
    """
    link = {"h2d_bytes_per_s": rate, "latency_ns": latency_ns}
    alone = {"cache": {"budget_ratio": 1.0}, "cpu": {"layers": "all", "threads": threads}, "device": link}
    passes = _run(loaded, alone, [ids[:, :count] for count in counts[1:]])
    whole = tuple(_handed_over(passes, count, reference_ns) for count in counts)
    misses = {"cache": {"budget_ratio": 0.5}, "cpu": {"policy": "misses", "threads": threads}, "device": link}
    decode = [item for item in _run(loaded, misses, [ids[:, :4], ids[:, :2]]) if item[0].record.tokens == 1]
    steady = steady_only(decode, reference_ns)
    return _read(whole, [layer for each in steady.items for layer in each.layers], steady.slowdown)


def _run(loaded: LoadedModel, raw: dict[str, Any], prompts: Sequence[Tensor]) -> list[tuple[_Pass, Probes]]:
    """Passes of generations from prompts, after one that warms up."""
    log: list[tuple[Any, ...]] = []
    with offloaded(loaded.model, parse_config(raw), log=log) as engine, probed(loaded.model) as seen:
        engine.link.times_parts = True
        for prompt in (prompts[0], *prompts):
            generate_offloaded(engine, loaded, prompt, _TOKENS, Sampling(ignore_eos=True))
        layers = _layers_of(engine.passes, log)
        passes = [_Pass(*each) for each in zip(engine.passes, layers, strict=True)]
        return list(zip(passes, around_passes(seen), strict=True))[_TOKENS:]


def _layers_of(passes: Sequence[PassRecord], log: Sequence[tuple[Any, ...]]) -> list[list[_Layer]]:
    """Every layer with the number of experts of its device's and its CPU's part."""
    parts: list[tuple[int, int]] = []
    for entry in log:
        if entry[0] == "layer_routed":
            parts.append((0, 0))
        elif entry[0] == "wave":
            on_device, on_cpu = parts[-1]
            parts[-1] = on_device + len(entry[1].experts), on_cpu + len(entry[1].cpu_experts)
    counts = iter(parts)
    return [[_Layer(times, *next(counts)) for times in record.layers] for record in passes]


def _handed_over(passes: Sequence[tuple[_Pass, Probes]], tokens: int, reference_ns: float) -> float:
    """Mean time from hand-over to end of a layer over passes of so many tokens."""
    of_size = steady_only([item for item in passes if item[0].record.tokens == tokens], reference_ns)
    spans_ns = [layer.times.done_ns - layer.times.submitted_ns for each in of_size.items for layer in each.layers]
    return fmean(spans_ns) / of_size.slowdown


def _read(whole: tuple[float, ...], layers: Sequence[_Layer], slowdown: float) -> CpuCosts:
    """Costs by layers of which a part ran on the CPU, beside layers that ran on the device alone."""
    device_only = [layer.times for layer in layers if not layer.on_cpu]
    split = [layer for layer in layers if layer.on_cpu and layer.on_device]
    if not split or not device_only:
        return CpuCosts(whole, 0.0, 0.0, 0.0, 0.0)
    top_k = max(layer.on_cpu + layer.on_device for layer in layers)
    spans: dict[int, list[float]] = {}
    for layer in split:
        spans.setdefault(layer.on_cpu, []).append(_cpu_part_ns(layer.times) / slowdown)
    counts = sorted(spans)
    per_expert = 0.0
    if len(counts) > 1:
        weights = np.sqrt([len(spans[count]) for count in counts])
        slope = np.polyfit(counts, [median(spans[count]) for count in counts], 1, w=weights)[0]
        per_expert = min(max(0.0, float(slope)), whole[0] / top_k)
    layer_ns = whole[0] - per_expert * top_k
    beside_ns = median(span - per_expert * count for count in counts for span in spans[count]) - layer_ns
    start_ns = median(layer.times.decided_ns - layer.times.entered_ns for layer in split)
    start_ns -= median(times.decided_ns - times.entered_ns for times in device_only)
    split_ns = median(layer.times.device_done_ns - layer.times.landed_ns for layer in split)
    split_ns -= median(times.done_ns - times.landed_ns for times in device_only)
    return CpuCosts(whole, layer_ns, max(0.0, start_ns) / slowdown, max(0.0, split_ns) / slowdown, max(0.0, beside_ns))


def _cpu_part_ns(times: LayerTimes) -> float:
    """From the hand-over to the end of the CPU's part; to the end of the layer where that waited for it."""
    ended_ns = times.cpu_ns[1] if times.cpu_ns is not None else times.decided_ns
    return (times.done_ns if ended_ns > times.device_done_ns else ended_ns) - times.decided_ns
