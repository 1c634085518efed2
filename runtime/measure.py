"""Run prompts on the live engine and make a `Run` of it: the same figures, terms and spans as a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
from torch import Tensor

from runtime.engine import Engine
from runtime.models import GREEDY, LoadedModel, Sampling
from runtime.offloading import offloaded
from runtime.records import LayerTimes, PassRecord
from runtime.speculative import Drafting, watch_drafts
from runtime.steadiness import Probe, Probes, around_passes, probed
from simulator.pass_summary import PassSummary, PassTimes
from simulator.policies.config import OffloadConfig
from simulator.routing_drift import RoutingWatch
from simulator.spans import FirstUse, mark_uses
from simulator.stalls import split_recorded_stall
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Run, RunInfo, Span
from trace_capture.trace import Phase
from trace_capture.versions import software_versions

Progress = Callable[[int, int], None]
_HOST_TIMES = (
    "parts of a token's time are as the host saw them: kernels and copies run on behind it, so a stall or an expert's "
    "time may stand under what came after it; the times per token are whole"
)
_EMULATED = "emulated link: copies are paced to the configured rate, not those of a PCIe link"
_SHARED_CORES = (
    "the emulated device and the CPU's experts are threads of one processor: that they overlap is real, the gain of a "
    "GPU is not in these figures"
)


def measure(
    loaded: LoadedModel,
    prompts: Sequence[str],
    config: OffloadConfig,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    drafting: Drafting | None = None,
    first_sequence: int = 0,
    hardware: HardwareProfile | None = None,
    trace_digest: str = "",
    vectors_path: Path | None = None,
    estimator_path: Path | None = None,
    record_spans: bool = True,
    warmup_passes: int = 0,
    probes: list[Probes] | None = None,
    watch: RoutingWatch | None = None,
    progress: Progress | None = None,
) -> Run:
    """Offload the model, continue the prompts one after the other, put the model back.

    Args:
        loaded: an untouched model.
        prompts, max_new_tokens, sampling: the workload.
        config: offload configuration.
        drafting: decode speculatively.
        first_sequence: number of the first prompt, which shifts its seed: with the numbers and seed of a capture the
            run makes the very tokens of that trace.
        hardware: profile to name in the record, and whose times decisions go by.
        trace_digest: of the trace whose tokens this run makes again, if it does.
        vectors_path: default vectors for prefetch by the quasi-hidden state.
        estimator_path: trained estimator for prefetch by `estimator` or `hybrid`.
        record_spans: keep the timeline.
        warmup_passes: so many decode passes at the start are run and left out of all figures.
        probes: if given, the machine's speed is probed before every pass (`runtime.steadiness`), and the probes around
            each decode pass are appended.
        watch: if given, sums up where the generated tokens are routed.
        progress: called with (prompts done, prompts in all).

    Returns:
        a run of kind `measured`.

    Raises:
        ModelError, ConfigError: as `offload`.
        TraceError: the run has no more decode passes than the warm-up.
    """
    encoded = [loaded.encode(prompt, max_new_tokens) for prompt in prompts]
    texts: list[str] = []
    options: dict[str, Any] = {"default_vectors": vectors_path, "estimator": estimator_path, "hardware": hardware}
    with (
        offloaded(loaded.model, config, **options) as engine,
        watch_drafts(loaded.model, [engine]),
        probed(loaded.model, probes is not None) as seen,
    ):
        engine.watch = watch
        engine.core.tally.warmup_passes = warmup_passes
        if record_spans:
            engine.link.spans = []
        ends_ns: list[int] = []
        sequence_of_pass: list[int] = []
        for offset, ids in enumerate(encoded):
            _begin_prompt(watch)
            texts.append(loaded.generate(ids, max_new_tokens, sampling, first_sequence + offset, drafting))
            ends_ns.append(perf_counter_ns())
            sequence_of_pass += [first_sequence + offset] * (len(engine.passes) - len(sequence_of_pass))
            if progress is not None:
                progress(offset + 1, len(encoded))
        passes = _pass_times(engine.passes, sequence_of_pass, ends_ns, seen)
        spans = _spans(engine, passes) if record_spans else ()
        if probes is not None:
            around = zip(passes, around_passes(seen), strict=True)
            probes += [each for times, each in around if times.phase != Phase.PREFILL][warmup_passes:]
        busy_ns = _explain_stalls(engine.passes, passes, spans, warmup_passes)
        core = engine.core
        summary = PassSummary(warmup_passes, passes)
        metrics = summary.metrics(core.prefill_counters, core.decode_counters, busy_ns)
        preloaded_experts = len(engine.preloaded)
        store_note = engine.store.note
        is_emulated = type(engine.link).__name__ == "EmulatedLink"
    info = RunInfo(
        kind="measured",
        label=config.title,
        emulated=is_emulated,
        model=engine.shape.name,
        hardware=hardware.name if hardware else "this machine",
        hardware_digest=hardware.digest if hardware else "",
        trace_digest=trace_digest,
        config=config.model_dump(mode="json", exclude_none=True),
        versions=software_versions("torch", "transformers"),
        warmup_passes=warmup_passes,
        preloaded_experts=preloaded_experts,
        metrics=metrics,
        notes=_notes(is_emulated, config, store_note),
    )
    return Run(info, summary.decode_ns, spans, tuple(texts), summary.passes)


def _begin_prompt(watch: RoutingWatch | None) -> None:
    if watch is not None:
        watch.begin_prompt()


def _notes(is_emulated: bool, config: OffloadConfig, store_note: str) -> list[str]:
    """What a reader of the figures should know."""
    notes = [_EMULATED if is_emulated else _HOST_TIMES]
    if is_emulated and config.cpu.is_used:
        notes.append(_SHARED_CORES)
    return [*notes, store_note] if store_note else notes


def generate_offloaded(
    engine: Engine,
    loaded: LoadedModel,
    ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    probes: Sequence[Probe] = (),
    drafting: Drafting | None = None,
) -> list[PassTimes]:
    """Continue one encoded prompt on an offloaded model; the times of its passes, without the `probes` between them,
    one for every pass of the engine so far."""
    before = len(engine.passes)
    with watch_drafts(loaded.model, [engine]):
        loaded.generate(ids, max_new_tokens, sampling, 0, drafting)
    end_ns = perf_counter_ns()
    records = engine.passes[before:]
    return _pass_times(records, [0] * len(records), [end_ns], probes[before:])


def _pass_times(
    records: Sequence[PassRecord], sequences: Sequence[int], ends_ns: Sequence[int], probes: Sequence[Probe] = ()
) -> list[PassTimes]:
    """Durations of passes by term. A pass lasts until the next one of its prompt, or the probe before that, begins, or
    its prompt ends."""
    begins_ns = [record.began_ns for record in records]
    if probes:
        begins_ns = [min(began, probe.began_ns) for began, probe in zip(begins_ns, probes, strict=True)]
    result = []
    finished = 0
    for place, (record, sequence) in enumerate(zip(records, sequences, strict=True)):
        is_last = place + 1 == len(records) or sequences[place + 1] != sequence
        end_ns = ends_ns[finished] if is_last else begins_ns[place + 1]
        finished += is_last
        if probes and probes[place].began_ns > record.began_ns:  # between drafting and the pass
            end_ns -= probes[place].ended_ns - probes[place].began_ns
        phase = Phase.PREFILL if record.is_prefill else Phase.DECODE if record.tokens == 1 else Phase.VERIFY
        times = PassTimes(phase, sequence, record.tokens, 1 + record.accepted_drafts)
        times.terms_ns.update(_terms(record, end_ns))
        result.append(times)
    return result


def _terms(record: PassRecord, end_ns: int) -> dict[str, int]:
    """The parts of one pass. The first layer's dense part cannot be told from the embedding in front of it, so it is
    taken to be the median of the other layers'."""
    layers = record.layers
    gaps = [after.entered_ns - before.done_ns for before, after in zip(layers, layers[1:], strict=False)]
    first_gap = layers[0].entered_ns - record.began_ns - record.planned_ns - record.drafting_ns
    first_dense = min(round(median(gaps)), first_gap) if gaps else first_gap
    terms = {
        "dense": sum(gaps) + first_dense,
        "experts": sum(layer.device_done_ns - layer.landed_ns for layer in layers),
        "cpu_experts": sum(layer.done_ns - layer.device_done_ns for layer in layers),
        "decide": record.planned_ns
        + sum(layer.decided_ns - layer.entered_ns + layer.submitted_ns - layer.predicted_ns for layer in layers),
        "issue": 0,
        "predict": sum(layer.predicted_ns - layer.decided_ns for layer in layers),
        "stall": sum(layer.landed_ns - layer.submitted_ns for layer in layers),
        "drafting": record.drafting_ns,
    }
    terms["overhead"] = end_ns - record.began_ns - sum(terms.values())
    return terms


def _spans(engine: Engine, passes: Sequence[PassTimes]) -> tuple[Span, ...]:
    """The timeline, relative to the first pass."""
    records = engine.passes
    if not records:
        return ()
    zero = records[0].began_ns
    spans: list[Span] = []
    for pass_id, record in enumerate(records):
        drafting_ns = record.began_ns + record.planned_ns
        previous_ns = drafting_ns + record.drafting_ns
        if record.planned_ns:
            spans.append(Span("host", "decide", record.began_ns - zero, drafting_ns - zero, pass_id, -1))
        if record.drafting_ns:
            spans.append(Span("device", "drafting", drafting_ns - zero, previous_ns - zero, pass_id, -1))
        for layer, times in enumerate(record.layers):
            pieces = [
                ("device", "dense", previous_ns, times.entered_ns),
                ("host", "decide", times.entered_ns, times.submitted_ns),
                ("device", "stall", times.submitted_ns, times.landed_ns),
                ("device", "experts", times.landed_ns, times.device_done_ns),
                ("device", "cpu_experts", times.device_done_ns, times.done_ns),
                *([("cpu", "experts", *times.cpu_ns)] if times.cpu_ns else []),
            ]
            for track, kind, start_ns, end_ns in pieces:
                if end_ns > start_ns and not (kind == "stall" and times.num_loads == 0 and end_ns - start_ns < 5_000):
                    spans.append(Span(track, kind, start_ns - zero, end_ns - zero, pass_id, layer))
            previous_ns = times.done_ns
            spans += _evictions(engine, pass_id, times, zero)
        end_ns = record.began_ns + passes[pass_id].total_ns
        spans.append(Span("host", "overhead", previous_ns - zero, end_ns - zero, pass_id, -1))
    return tuple(sorted(spans + _copies(engine, zero), key=lambda span: (span.start_ns, span.track)))


def _explain_stalls(
    records: Sequence[PassRecord], passes: Sequence[PassTimes], spans: Sequence[Span], warmup_passes: int
) -> int:
    """Fill in what the stalls of each pass waited for; gives the time of the copies of all decode passes behind the
    warm-up."""
    loads = [span for span in spans if span.kind == "load"]
    if not spans:
        return 0
    zero = records[0].began_ns
    for pass_id, (record, times) in enumerate(zip(records, passes, strict=True)):
        for layer, moments in enumerate(record.layers):
            stall = moments.submitted_ns - zero, moments.landed_ns - zero
            split_recorded_stall(times.stall_ns, *stall, loads, layer, pass_id)
    decode = [place for place, times in enumerate(passes) if times.phase != Phase.PREFILL]
    counted = set(decode[warmup_passes:])
    return sum(span.end_ns - span.start_ns for span in loads if span.pass_id in counted)


def _evictions(engine: Engine, pass_id: int, times: LayerTimes, zero: int) -> list[Span]:
    """Moments at which experts left: where the work that decided it began, or when their layer had run."""
    moments = [(times.entered_ns, key) for key in times.evicted] + [(times.done_ns, key) for key in times.dropped]
    sizes = engine.shape.expert_bytes
    return [
        Span("host", "evict", at_ns - zero, at_ns - zero, pass_id, layer, expert, sizes[layer])
        for at_ns, (layer, expert) in moments
    ]


def _copies(engine: Engine, zero: int) -> list[Span]:
    """The link's track. What was there before the first pass is shown as loads of no length at its start."""
    begins = [record.began_ns for record in engine.passes]
    sizes = engine.shape.expert_bytes
    spans = [Span("link", "load", 0, 0, 0, *key, sizes[key[0]], "preload") for key in engine.preloaded]
    for copy in sorted(engine.link.spans or (), key=lambda copy: copy.start_ns):
        pass_id = max(0, int(np.searchsorted(begins, copy.start_ns, side="right")) - 1)
        layer, expert = copy.key
        span = Span("link", "load", copy.start_ns - zero, copy.end_ns - zero, pass_id, layer, expert, copy.num_bytes)
        spans.append(span._replace(reason=copy.reason, submit_ns=copy.submit_ns - zero))
    uses = [
        FirstUse(pass_id, (layer, expert))
        for pass_id, record in enumerate(engine.passes)
        for layer, times in enumerate(record.layers)
        for expert in times.first_uses
    ]
    return mark_uses(spans, uses)
