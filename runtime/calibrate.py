"""`calibrate`: measure this machine with one model into a hardware profile, and check what it predicts.

Compute is measured in place, on the offloaded engine with every expert resident; what a stall and a load cost beside
the link's own time in `runtime.load_costs`. Means over passes, since a TPOT is one, at one speed of the machine
(`runtime.steadiness`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.cpu_costs import measure_cpu_costs
from runtime.draft_costs import measure_draft_costs
from runtime.load_costs import LoadCosts, measure_load_costs
from runtime.measure import generate_offloaded
from runtime.models import LoadedModel, Sampling, host_memory_bytes
from runtime.offloading import model_name, offloaded
from runtime.predict_costs import network_prediction_ns
from runtime.records import PassRecord
from runtime.speculative import Drafting
from runtime.steadiness import Probes, around_passes, probed, reference_ns, steady_only
from simulator.pass_summary import PassTimes
from simulator.policies.config import OffloadConfig, parse_config
from trace_capture.errors import ModelError
from trace_capture.hardware import CpuThreadCosts, DeviceProfile, HardwareProfile, LinkProfile, MeasuredCosts, Quantity
from trace_capture.trace import Phase

Progress = Callable[[int, int], None]
TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens per pass at which compute is measured."""
_DECODE_TOKENS = 24


def calibrate(
    loaded: LoadedModel,
    text: str,
    *,
    h2d_bytes_per_s: float | None = None,
    copy_to_compute_ratio: float | None = None,
    latency_ns: int = 20_000,
    vectors_path: Path | None = None,
    estimator_path: Path | None = None,
    drafting: Drafting | None = None,
    copy_to_cpu_ratio: float | None = None,
    cpu_threads: Sequence[int] = (1,),
    name: str = "this-machine",
    repeats: int = 3,
    progress: Progress | None = None,
) -> HardwareProfile:
    """Measure compute, bookkeeping and link of this machine with one model.

    Args:
        loaded: an untouched model on the CPU (emulated device) or on CUDA.
        text: some text to route; long enough for the largest token count, else that count is left out.
        h2d_bytes_per_s: rate to pace the emulated link to.
        copy_to_compute_ratio: instead of a rate: pace the link so that copying a token's experts on demand takes
            this many times its compute, as on real hardware (the paper's A6000 has 141 ms : 13 ms = 11).
        latency_ns: time per copy on the emulated link beside its bytes.
        vectors_path: default vectors, to measure what a prediction costs.
        estimator_path: trained estimator, to measure what its predictions cost; by default the file beside the model,
            if there is one.
        drafting: draft model, to measure what speculative decoding costs.
        copy_to_cpu_ratio: pace the emulated device's CPU side so that copying an expert takes this many times as long
            as running it there, as on real hardware, where cores and link read the same memory; None: no pacing.
        cpu_threads: measure experts on the CPU with each of these numbers of threads; one is always measured.
        name: of the profile.
        repeats: generations per token count.
        progress: called with (steps done, steps in all).

    Returns:
        a profile with `measured` filled for this model.

    Raises:
        ModelError: the text is too short, or the model cannot be offloaded.
    """
    ids = _calibration_ids(loaded, text)
    counts = [count for count in TOKEN_COUNTS if count <= ids.shape[1]]
    steps = len(counts) + 3
    tick = _Ticker(progress, steps)
    tables = _measure_compute(loaded, ids, counts, repeats, tick)
    compute_ns = tables.num_layers * (tables.dense_ns[0] + tables.experts_ns[0]) + tables.overhead_ns[0]
    rate = h2d_bytes_per_s or _rate_for(copy_to_compute_ratio or 11.0, compute_ns, tables.bytes_per_token)
    on_cpu = partial(measure_cpu_costs, loaded, ids, counts, rate, latency_ns, tables.reference_ns)
    with_one_thread = on_cpu(1)._asdict()
    more = sorted(set(cpu_threads) - {1})
    by_threads = tuple(CpuThreadCosts(threads=count, **on_cpu(count)._asdict()) for count in more)
    tick()
    loads = measure_load_costs(
        loaded, ids, rate, latency_ns, reference_ns=tables.reference_ns, vectors_path=vectors_path
    )
    tick()
    costs = MeasuredCosts(
        model=model_name(loaded.model),
        tokens=tuple(counts),
        dense_ns=tuple(tables.dense_ns),
        experts_ns=tuple(tables.experts_ns),
        **with_one_thread,
        cpu_by_threads=by_threads,
        pass_overhead_ns=tuple(tables.overhead_ns),
        decide_ns=tables.decide_ns,
        decide_first_load_ns=loads.first_load_ns,
        decide_per_load_ns=loads.per_load_ns,
        predict_ns=loads.predict_ns,
        predict_by_source_ns=network_prediction_ns(loaded, ids, vectors_path, estimator_path),
        stall_ns=loads.stall_ns,
        wakeup_ns=loads.wakeup_ns,
        probe_ns=tables.reference_ns,
        samples=tables.samples,
    )
    if drafting is not None:
        speculative = measure_draft_costs(loaded, ids, drafting, costs)
        costs = costs.model_copy(update=speculative._asdict())
    if copy_to_cpu_ratio is not None:
        paced_ns = (latency_ns + tables.bytes_per_expert / loads.bytes_per_s * 1e9) / copy_to_cpu_ratio
        costs = costs.model_copy(update={"cpu_paced_ns": paced_ns})
    profile = _profile(loaded, name, costs, loads, rate, latency_ns)
    tick()
    return profile


def typical(values: Iterable[float]) -> float:
    """The mean without the highest hundredth, which on a shared machine is somebody else's work."""
    ordered = sorted(values)
    return fmean(ordered[: max(1, len(ordered) - len(ordered) // 100)])


def _calibration_ids(loaded: LoadedModel, text: str) -> Tensor:
    """Token ids [1, T] of the text's beginning, short enough for the model to continue.

    Raises:
        ModelError: the text or the model's context is too short.
    """
    context = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    length = min(TOKEN_COUNTS[-1], context - _DECODE_TOKENS)
    windows = loaded.windows(text, length) if length > 0 else []
    found = int(windows[0].shape[1]) if windows else 0
    if found < TOKEN_COUNTS[2]:
        raise ModelError(
            f"calibration needs a text of at least {TOKEN_COUNTS[2]} tokens and a context of {_DECODE_TOKENS} more, "
            f"got {found} tokens; give a longer --text"
        )
    return windows[0]


class _Tables(NamedTuple):
    """Compute times by token count."""

    dense_ns: list[float]
    experts_ns: list[float]
    overhead_ns: list[float]
    decide_ns: float
    bytes_per_token: int
    bytes_per_expert: float
    num_layers: int
    samples: int
    reference_ns: float
    """Usual duration of the fixed work before a pass."""


class _Ticker:
    def __init__(self, progress: Progress | None, steps: int) -> None:
        self._progress, self._steps, self._done = progress, steps, 0

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._steps)


def resident_config(loaded: LoadedModel) -> OffloadConfig:
    """Every expert on the device, behind a link fast enough not to matter."""
    return parse_config({"cache": {"budget_ratio": 1.0}, "device": {"h2d_bytes_per_s": 1e12, "latency_ns": 0}})


def _measure_compute(
    loaded: LoadedModel, ids: Tensor, counts: Sequence[int], repeats: int, tick: Callable[[], None]
) -> _Tables:
    """Generate from prompts of each length on a fully resident engine, warm; all at the usual speed of the machine."""
    sampling = Sampling(temperature=0.8, ignore_eos=True)  # drawing a token is part of a pass
    decode: list[tuple[_Pass, Probes]] = []
    prefill: dict[int, list[tuple[_Pass, Probes]]] = {count: [] for count in counts[1:]}
    with offloaded(loaded.model, resident_config(loaded)) as engine, probed(loaded.model) as seen:
        engine.link.times_parts = True
        generate_offloaded(engine, loaded, ids, _DECODE_TOKENS, sampling)  # warm: load experts, build kernels
        for count in counts[1:]:
            for _ in range(repeats):
                before = len(engine.passes)
                times = generate_offloaded(engine, loaded, ids[:, :count], _DECODE_TOKENS, sampling, seen)
                passes = list(zip(engine.passes[before:], times, strict=True))
                items = list(zip(passes, around_passes(seen[before:]), strict=True))
                prefill[count] += [item for item in items if item[0][1].phase == Phase.PREFILL]
                decode += [item for item in items[2:] if item[0][1].phase == Phase.DECODE]
            tick()
        shape = engine.shape
    usual_ns = reference_ns([probes for _, probes in decode])
    tables = [steady_only(items, usual_ns) for items in (decode, *prefill.values())]
    layers = [layer for record, _ in tables[0].items for layer in record.layers]
    tick()
    return _Tables(
        [_mean_dense(table.items) / table.slowdown for table in tables],
        [_mean_experts(table.items) / table.slowdown for table in tables],
        [_mean_overhead(table.items) / table.slowdown for table in tables],
        typical(t.landed_ns - t.entered_ns - (t.predicted_ns - t.decided_ns) for t in layers) / tables[0].slowdown,
        shape.bytes_per_token,
        fmean(shape.expert_bytes),
        shape.num_moe_layers,
        len(tables[0].items),
        usual_ns,
    )


_Pass = tuple[PassRecord, PassTimes]


def _mean_dense(passes: Sequence[_Pass]) -> float:
    gaps = [b.entered_ns - a.done_ns for r, _ in passes for a, b in zip(r.layers, r.layers[1:], strict=False)]
    return typical(gaps) if gaps else typical(r.layers[0].entered_ns - r.began_ns for r, _ in passes)


def _mean_experts(passes: Sequence[_Pass]) -> float:
    return typical(layer.done_ns - layer.landed_ns for record, _ in passes for layer in record.layers)


def _mean_overhead(passes: Sequence[_Pass]) -> float:
    return typical(times.terms_ns["overhead"] for _, times in passes)


def _rate_for(ratio: float, compute_ns: float, bytes_per_token: int) -> float:
    return bytes_per_token / (ratio * compute_ns) * 1e9


def _profile(
    loaded: LoadedModel, name: str, costs: MeasuredCosts, loads: LoadCosts, rate: float, latency_ns: int
) -> HardwareProfile:
    device, emulated = next(loaded.model.parameters()).device, not loaded.on_cuda
    how = f"calibration with {costs.model}, {costs.samples} decode passes"
    paced = "paced emulated link" if emulated else "pinned copies on a CUDA stream"
    memory_rate, flops = _device_rates(device)

    def measured(value: float, source: str = how) -> Quantity:
        return Quantity(value=float(f"{value:.6g}"), kind="measured", source=source)

    return HardwareProfile(
        name=name,
        description=f"{'Emulated device' if emulated else torch.cuda.get_device_name(device)}: {how}",
        emulated=emulated,
        link=LinkProfile(
            name="emulated link" if emulated else "PCIe",
            h2d_bytes_per_s=measured(loads.bytes_per_s, f"{paced}, set to {rate:.6g} bytes/s"),
            latency_ns=measured(latency_ns, f"{paced}, as set"),
            issue_ns=measured(0.0, "contained in measured.decide_per_load_ns"),
            wakeup_ns=measured(
                max(loads.wakeup_ns, default=0.0), "after a long stall; by length in measured.wakeup_ns"
            ),
        ),
        device=DeviceProfile(
            name="emulated device (CPU)" if emulated else torch.cuda.get_device_name(device),
            memory_bytes=measured(_memory_bytes(device), "operating system"),
            memory_bytes_per_s=measured(memory_rate, "64 MiB copy"),
            flops_per_s=measured(flops, "512 x 512 x 512 float32 product"),
            launch_ns=measured(0.0, "contained in the measured tables"),
        ),
        measured=costs,
    )


def _device_rates(device: torch.device) -> tuple[float, float]:
    """Bytes/s of a large copy (read and write counted once each) and float32 operations/s of a product."""
    block = torch.zeros(1 << 24, device=device)
    matrix = torch.ones(512, 512, device=device)
    copy_s = _best_seconds(lambda: block.clone())
    product_s = _best_seconds(lambda: matrix @ matrix)
    return 2 * block.numel() * 4 / copy_s, 2 * 512**3 / product_s


def _best_seconds(work: Callable[[], Tensor]) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        result = work()
        if result.device.type == "cuda":
            torch.cuda.synchronize(result.device)
        best = min(best, time.perf_counter() - start)
    return best


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes()
