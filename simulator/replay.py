"""`simulate`: one trace, one machine, one configuration in; a `Run` out."""

from __future__ import annotations

from typing import Any

from simulator.bounds import tpot_bounds
from simulator.cost_model import CostModel
from simulator.costs.link import disk_ratio
from simulator.executed import executed_routing
from simulator.expert_times import times_for
from simulator.hot_experts import needs_hot_experts, with_hot_experts
from simulator.machine import Machine
from simulator.micro_batch import split_prefill
from simulator.pass_summary import PassSummary
from simulator.policies.belady import future_uses
from simulator.policies.cache import CACHE_POLICIES, Key
from simulator.policies.config import OffloadConfig
from simulator.policies.core import OffloadCore
from simulator.policies.plans import Counters
from simulator.policies.window import DraftingWindow
from simulator.validation.families import prediction_band
from trace_capture.band import ErrorBand
from trace_capture.errors import TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.hardware import HardwareProfile
from trace_capture.rewindow import KIND
from trace_capture.run import Run, RunInfo
from trace_capture.trace import Trace
from trace_capture.versions import software_versions

_HINDSIGHT = "hot experts were counted on the replayed trace itself, which no run could know; give another as profile"


def simulate(
    trace: Trace,
    hardware: HardwareProfile,
    config: OffloadConfig,
    *,
    record_spans: bool = False,
    bounds: bool = True,
    log: list[tuple[Any, ...]] | None = None,
    profile: Trace | ExpertCounts | None = None,
    warmup_passes: int = 0,
) -> Run:
    """Replay a trace with the policies of a configuration on a machine.

    Args:
        trace: routing of a real or synthetic workload.
        hardware: link and device; its measured compute times are used for the model they were measured with.
        config: cache, prefetch and budget.
        record_spans: keep the timeline in the run.
        bounds: also work out what no policy could beat (`RunInfo.bounds`), which takes about as long again, and what
            stalls and dense layers consist of (`Metrics.stall_parts_ms`, `Metrics.dense_parts_ms`).
        log: if given, every call to the offload core and every plan is appended to it.
        profile: the trace to count hot experts on, or their counts, where the configuration needs them and has none;
            by default the replayed one itself, which is hindsight.
        warmup_passes: so many decode passes at the start are replayed and left out of all figures.

    Returns:
        A run of kind `simulated`; times are whole nanoseconds and the same for the same inputs.

    Raises:
        ConfigError: the budget does not hold a layer's top-k, or the profile is of a model of another size.
        TraceError: the trace is empty, lacks predictions that the configuration needs, or has no more decode passes
            than the warm-up.
        ProfileError: the profile lacks a rate that is needed.
    """
    if trace.num_tokens == 0:
        raise TraceError("the trace has no rows, so there is nothing to replay; capture it again")
    costs = CostModel(hardware, trace.shape, config.cpu.used_threads)
    source, trace = trace, split_prefill(trace, config.prefill.micro_batch)
    counted = needs_hot_experts(config)
    config = with_hot_experts(config, profile or trace, trace.shape)
    times = times_for(config, hardware, trace.shape)
    core = OffloadCore.from_config(config, trace.shape, log, _future(trace, config), times)
    core.tally.warmup_passes = warmup_passes
    draft = trace.info.draft
    window = DraftingWindow(config.utility, costs.drafting_ns(draft, draft.gamma) if draft else 0)
    summary = PassSummary(warmup_passes)
    options = {"serial": config.device.serial, "record_spans": record_spans, "explain": bounds}
    machine = Machine(trace, costs, core, **options, window=window, ended=summary.add)
    machine.run()
    band = prediction_band(hardware, config, trace.shape, is_measured=costs.is_measured)
    busy_ns = _link_busy_ns(core.decode_counters, costs)
    info = RunInfo(
        kind="simulated",
        label=config.title,
        emulated=hardware.emulated,
        model=trace.shape.name,
        hardware=hardware.name,
        hardware_digest=hardware.digest,
        trace_digest=source.digest,
        config=config.model_dump(mode="json", exclude_none=True),
        versions=software_versions("simpy", "numpy"),
        warmup_passes=warmup_passes,
        preloaded_experts=len(machine.preloaded),
        metrics=summary.metrics(core.prefill_counters, core.decode_counters, busy_ns),
        error_band=band,
        bounds=tpot_bounds(trace, costs, config, warmup_passes) if bounds else {},
        notes=_notes(trace, hardware, costs, band) + ([_HINDSIGHT] if counted and profile is None else []),
    )
    return Run(info, summary.decode_ns, tuple(machine.spans()), passes=summary.passes)


def _future(trace: Trace, config: OffloadConfig) -> dict[Key, list[int]]:
    """All look-ups to come, where the cache policy wants to know them."""
    if not CACHE_POLICIES[config.cache.policy].needs_future:
        return {}
    return future_uses(executed_routing(trace, config).lookups())


def _link_busy_ns(decode: Counters, costs: CostModel) -> float:
    """Time of the copies of all decode passes, back to back."""
    loads = decode.loads
    return loads * costs.copy_ns(round(decode.bytes_loaded / loads)) if loads else 0.0


def _notes(trace: Trace, hardware: HardwareProfile, costs: CostModel, band: ErrorBand | None) -> list[str]:
    notes = []
    if hardware.emulated:
        notes.append("emulated link: copies are paced to the profile's rate, not those of a PCIe link")
    if not costs.is_measured:
        notes.append("compute times come from the data sheet of the profile, not from a measurement")
    if band is None:
        notes.append("no error band: nobody has validated predictions for this model on this profile")
    else:
        notes.append(f"error band of TPOT: {band.text()}; {band.source}")
    share = disk_ratio(hardware, trace.shape)
    if share > 0:
        what = f"{100 * share:.0f} % of the experts' bytes do not fit into the host's memory: "
        disk = hardware.disk
        notes.append(
            what + (f"a load waits that often for the {disk.name}" if disk else "taken as if they did; name --disk")
        )
    if hardware.link.host_memory == "pageable":
        notes.append("pageable memory: that the submitting thread is held while the driver stages is not counted")
    if not trace.info.complete:
        notes.append("the trace was recovered from a capture that did not end")
    if trace.info.draft is not None and trace.info.draft.kind == KIND:
        notes.append("verify passes were made of decode passes: where rejected drafts are routed is assumed")
    if trace.info.draft is not None and not trace.info.draft.weight_bytes:
        notes.append("drafting takes no time here: the trace does not say how large the draft model is")
    notes += [f"imported trace: {note}" for note in trace.info.options.get("notes", [])]
    if trace.info.source == "synthetic":
        notes.append("synthetic trace: routing statistics are assumed, not measured")
    return notes
