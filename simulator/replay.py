"""`simulate`: one trace, one machine, one configuration in; a `Run` out."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.bounds import tpot_bounds
from simulator.cost_model import TERMS, CostModel
from simulator.machine import Machine, PassTimes
from simulator.policies.config import OffloadConfig
from simulator.policies.core import OffloadCore
from simulator.policies.plans import Counters
from simulator.stalls import STALL_PARTS
from trace_capture.errors import TraceError
from trace_capture.hardware import HardwareProfile
from trace_capture.rewindow import KIND
from trace_capture.run import Metrics, Run, RunInfo
from trace_capture.trace import Phase, Trace
from trace_capture.versions import software_versions


def simulate(
    trace: Trace,
    hardware: HardwareProfile,
    config: OffloadConfig,
    *,
    record_spans: bool = False,
    bounds: bool = True,
    log: list[tuple[Any, ...]] | None = None,
) -> Run:
    """Replay a trace with the policies of a configuration on a machine.

    Args:
        trace: routing of a real or synthetic workload.
        hardware: link and device; its measured compute times are used for the model they were measured with.
        config: cache, prefetch and budget.
        record_spans: keep the timeline in the run.
        bounds: also work out what no policy could beat (`RunInfo.bounds`), which takes about as long again, and what
            stalls waited for (`Metrics.stall_parts_ms`).
        log: if given, every call to the offload core and every plan is appended to it.

    Returns:
        A run of kind `simulated`; times are whole nanoseconds and the same for the same inputs.

    Raises:
        ConfigError: the budget does not hold a layer's top-k.
        TraceError: the trace is empty or lacks predictions that the configuration needs.
        ProfileError: the profile lacks a rate that is needed.
    """
    if trace.num_tokens == 0:
        raise TraceError("the trace has no rows, so there is nothing to replay; capture it again")
    costs = CostModel(hardware, trace.shape)
    core = OffloadCore.from_config(config, trace.shape, log)
    machine = Machine(trace, costs, core, serial=config.device.serial, record_spans=record_spans, split_stalls=bounds)
    machine.run()
    busy_ns = _link_busy_ns(core.decode_counters, costs)
    info = RunInfo(
        kind="simulated",
        label=config.title,
        emulated=hardware.emulated,
        model=trace.shape.name,
        hardware=hardware.name,
        hardware_digest=hardware.digest,
        trace_digest=trace.digest,
        config=config.model_dump(mode="json", exclude_none=True),
        versions=software_versions("simpy", "numpy"),
        metrics=summarise(machine.passes, core.prefill_counters, core.decode_counters, busy_ns),
        error_band_ratio=hardware.error_band_ratio,
        bounds=tpot_bounds(trace, costs, config) if bounds else {},
        notes=_notes(trace, hardware, costs),
    )
    decode_ns = [times.total_ns for times in machine.passes if times.phase != Phase.PREFILL]
    return Run(info, np.asarray(decode_ns, dtype=np.int64), tuple(machine.spans()))


def summarise(passes: list[PassTimes], prefill: Counters, decode: Counters, link_busy_ns: float = 0.0) -> Metrics:
    """The metrics of a run from its passes, the counters of its core, and the time of its copies in decode."""
    first = [times for times in passes if times.phase == Phase.PREFILL]
    later = [times for times in passes if times.phase != Phase.PREFILL]
    tokens = sum(times.output_tokens for times in later)
    verify = [times for times in later if times.phase == Phase.VERIFY]
    lookups = prefill.lookups + decode.lookups
    hits = prefill.hits + decode.hits
    loads = _loads(prefill) + _loads(decode)
    total_ns = sum(times.total_ns for times in later)
    per_token_ns = [times.total_ns / times.output_tokens for times in later for _ in range(times.output_tokens)]
    return Metrics(
        prefill_tokens=sum(times.tokens for times in first),
        decode_tokens=tokens,
        drafted_tokens=sum(times.tokens - 1 for times in verify),
        accepted_drafts=sum(times.output_tokens - 1 for times in verify),
        ttft_ms=_mean([times.total_ns for times in first]) / 1e6,
        tpot_ms=total_ns / tokens / 1e6 if tokens else 0.0,
        tpot_p90_ms=float(np.percentile(per_token_ns, 90)) / 1e6 if per_token_ns else 0.0,
        tpot_terms_ms={
            name: sum(times.terms_ns[name] for times in later) / tokens / 1e6 if tokens else 0.0 for name in TERMS
        },
        stall_parts_ms=_stall_parts_ms(later, tokens),
        link_busy_ms=link_busy_ns / tokens / 1e6 if tokens else 0.0,
        tokens_per_s=tokens / total_ns * 1e9 if total_ns else 0.0,
        lookups=lookups,
        hits=hits,
        late_prefetches=prefill.late + decode.late,
        hit_rate=hits / lookups if lookups else 0.0,
        decode_hit_rate=decode.hits / decode.lookups if decode.lookups else 0.0,
        loads=loads,
        demand_loads=prefill.demand_loads + decode.demand_loads,
        prefetch_loads=prefill.prefetch_loads + decode.prefetch_loads,
        prefetch_used=prefill.prefetch_used + decode.prefetch_used,
        cpu_runs=prefill.cpu_runs + decode.cpu_runs,
        admission_loads=prefill.admission_loads + decode.admission_loads,
        evictions=prefill.evictions + decode.evictions,
        bytes_loaded=prefill.bytes_loaded + decode.bytes_loaded,
        bytes_per_token=decode.bytes_loaded / tokens if tokens else 0.0,
    )


def _stall_parts_ms(passes: list[PassTimes], tokens: int) -> dict[str, float]:
    """Parts of the stalls of decode passes per token; empty where they were not told apart."""
    if not any(times.stall_ns for times in passes):
        return {}
    return {name: sum(times.stall_ns.get(name, 0) for times in passes) / tokens / 1e6 for name in STALL_PARTS}


def _link_busy_ns(decode: Counters, costs: CostModel) -> float:
    """Time of the copies of all decode passes, back to back."""
    loads = _loads(decode)
    return loads * costs.copy_ns(round(decode.bytes_loaded / loads)) if loads else 0.0


def _loads(counters: Counters) -> int:
    return counters.demand_loads + counters.prefetch_loads + counters.admission_loads


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _notes(trace: Trace, hardware: HardwareProfile, costs: CostModel) -> list[str]:
    notes = []
    if hardware.emulated:
        notes.append("emulated link: copies are paced to the profile's rate, not those of a PCIe link")
    if not costs.is_measured:
        notes.append("compute times come from the data sheet of the profile, not from a measurement")
    if hardware.error_band_ratio is None:
        notes.append("no error band: nobody has validated predictions on this profile")
    if not trace.info.complete:
        notes.append("the trace was recovered from a capture that did not end")
    if trace.info.draft is not None and trace.info.draft.kind == KIND:
        notes.append("verify passes were made of decode passes: where rejected drafts are routed is assumed")
    if trace.info.draft is not None and not trace.info.draft.weight_bytes:
        notes.append("drafting takes no time here: the trace does not say how large the draft model is")
    if trace.info.source == "synthetic":
        notes.append("synthetic trace: routing statistics are assumed, not measured")
    return notes
