"""The SimPy machine: carries the plans of an `OffloadCore` out in simulated integer nanoseconds.

The live twin is `runtime/engine.py`: the same calls in the same order.

Host and device work one after the other, so they are one process with a clock of its own, `_now`, that runs ahead of
the kernel's: what runs beside the process, the link and the CPU's part of a layer, is settled by what was submitted,
and nobody else looks at it. So the process meets the kernel at the end of every pass, which leaves one event per
pass; the times are the same as with an event for every piece of work and every copy.

The CPU's part of a layer runs beside the device and the link, from when it is decided, and the layer ends when both
parts are there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy

from simulator.cost_model import CostModel
from simulator.durations import Durations
from simulator.executed import executed_experts
from simulator.link import SimulatedLink
from simulator.pass_reader import PassReader
from simulator.pass_summary import PassTimes
from simulator.policies.core import OffloadCore
from simulator.policies.eviction import Key
from simulator.policies.plans import Load, Wave
from simulator.policies.utility_config import UtilityConfig
from simulator.policies.window import DraftingWindow
from simulator.predictions import predictions_of
from simulator.spans import FirstUse, mark_uses
from simulator.stalls import split_stall
from trace_capture.run import Span
from trace_capture.trace import Pass, Phase, Trace

Process = Generator[simpy.Event, Any, None]


class Spent:
    """Terms of a pass that grow in every layer."""

    __slots__ = ("decide_ns", "experts_ns", "issue_ns", "predict_ns", "stall_ns")

    def __init__(self) -> None:
        self.predict_ns = 0
        self.decide_ns = 0
        self.issue_ns = 0
        self.stall_ns = 0
        self.experts_ns = 0


class Machine:
    """Replays a trace on a modelled link and device.

    Args:
        trace: routing, and predictions if the prefetch policy needs them.
        costs: durations.
        core: decisions.
        serial: wait for every load where it is issued, as `DeviceConfig.serial`.
        record_spans: keep the timeline.
        explain: tell what the link was busy with in stalls (`PassTimes.stall_ns`), and what dense layers consist of.
        window: how long loads planned when drafting begins can hide.
        ended: is given every pass as it ends; without it they are kept in `passes`.

    Raises:
        TraceError: the trace lacks the predictions that the prefetch policy needs.
    """

    def __init__(
        self,
        trace: Trace,
        costs: CostModel,
        core: OffloadCore,
        serial: bool = False,
        record_spans: bool = False,
        explain: bool = False,
        window: DraftingWindow | None = None,
        ended: Callable[[PassTimes], object] | None = None,
    ) -> None:
        self._trace = trace
        self._core = core
        self._serial = serial
        self._routed = PassReader(trace)
        self._predict = predictions_of(trace, core.prefetch)
        self._costs = Durations(costs, trace.shape)
        self._predict_ns = self._costs.predict_ns(core.prefetch.prediction or "")
        self._utility_ns = self._costs.decide_utility_ns if core.plans_when_drafting else 0
        self._window = window or DraftingWindow(UtilityConfig())
        self._env = simpy.Environment(initial_time=0)
        self._link = SimulatedLink(self._costs.copy_ns, self._costs.issue_ns, record_spans, explain)
        self._record_spans = record_spans
        self._explain = explain
        self._host_spans: list[Span] = []
        self._uses: list[FirstUse] = []
        self._terms: dict[str, int] = {}
        self._stalls: dict[str, int] = {}
        self._experts: Sequence[int] = ()
        self._num_tokens = 0
        self._tokens: list[list[int]] = []
        self._spent = Spent()
        self._now = 0
        self._began_ns = 0
        self._cpu_began_ns = self._cpu_end_ns = 0
        self.passes: list[PassTimes] = []
        self._ended = ended
        self.preloaded: list[Key] = []

    def run(self) -> None:
        """Replay the whole trace, from a device that holds what the core preloads."""
        self._preload()
        self._env.run(self._env.process(self._replay()))

    def _preload(self) -> None:
        """What is on the device when the clock starts; in the timeline these loads take no time."""
        first = self._trace.passes[0].pass_id
        for load in self._core.preload():
            self._core.landed(load.key)
            self.preloaded.append(load.key)
            if self._record_spans:
                self._host_spans.append(Span("link", "load", 0, 0, first, *load.key, load.num_bytes, load.reason))

    def spans(self) -> list[Span]:
        """The timeline: compute, host and link, each in order of start."""
        loads = []
        for copy, pass_id in zip(self._link.copies, self._pass_of_copies(), strict=True):
            load = copy.load
            times = copy.start_ns, copy.end_ns
            loads.append(Span("link", "load", *times, pass_id, *load.key, load.num_bytes, load.reason, copy.submit_ns))
        spans = self._host_spans + mark_uses(loads, self._uses)
        return sorted(spans, key=lambda span: (span.start_ns, span.track))

    def _pass_of_copies(self) -> list[int]:
        """The pass during which each copy began."""
        begins = [(span.start_ns, span.pass_id) for span in self._host_spans if span.kind == "overhead"]
        starts = [start_ns for start_ns, _ in begins]
        return [begins[max(0, bisect_right(starts, copy.start_ns) - 1)][1] for copy in self._link.copies]

    def _replay(self) -> Process:
        for item in self._trace.passes:
            times = self._pass(item)
            if item.phase != Phase.PREFILL:
                self._window.ended(times.terms_ns["drafting"], times.total_ns)
            if self._ended is None:
                self.passes.append(times)
            else:
                self._ended(times)
            yield self._env.timeout(self._now - self._env.now)

    def _pass(self, item: Pass) -> PassTimes:
        """One forward pass."""
        tokens, context = item.stop - item.start, int(self._trace.position[item.start])
        times = self._begin_pass(item, tokens, context)
        dense_ns = self._costs.dense_of_layers_ns(tokens, context)
        predicted = self._predict(item)
        executed = executed_experts(self._routed.read(item), predicted, self._core.modes)
        if self._core.needs_token_counts:
            self._tokens = self._token_counts(item, executed)
        for layer in range(len(executed)):
            began_ns = self._now
            self._now = began_ns + dense_ns[layer]
            if self._record_spans:
                self._span("device", "dense", began_ns, self._now, item, layer)
            experts = executed[layer]
            if experts:
                self._layer(item, layer, experts, predicted[layer + 1] if layer + 1 < len(predicted) else None)
        self._end_pass(times, sum(dense_ns))
        return times

    def _begin_pass(self, item: Pass, tokens: int, context: int) -> PassTimes:
        """What comes before the first layer, and what a pass costs beside its layers."""
        times = PassTimes(item.phase, item.sequence, tokens, self._trace.output_tokens(item))
        self._terms, self._stalls, self._num_tokens = times.terms_ns, times.stall_ns, tokens
        if self._core.plans_when_drafting and item.phase != Phase.PREFILL:
            self._plan_loads(item)
        self._core.begin_pass(item.phase == Phase.PREFILL)
        if item.phase == Phase.VERIFY:
            draft = self._trace.info.draft
            self._spend("overhead", "host", self._costs.verify_overhead_ns(draft, tokens), item, -1)
            self._spend("drafting", "device", self._costs.drafting_ns(draft, tokens - 1), item, -1)
        else:
            self._spend("overhead", "host", self._costs.overhead_ns(tokens), item, -1)
        if self._explain:
            times.dense_ns = self._costs.dense_parts_ns(tokens, context)
        return times

    def _end_pass(self, times: PassTimes, dense_ns: int) -> None:
        """Hand over what was added up layer by layer."""
        spent, terms_ns = self._spent, times.terms_ns
        self._spent = Spent()
        terms_ns["dense"] = dense_ns
        terms_ns["predict"] = spent.predict_ns
        terms_ns["decide"] = spent.decide_ns
        terms_ns["issue"] = spent.issue_ns
        terms_ns["stall"] = spent.stall_ns
        terms_ns["experts"] = spent.experts_ns

    def _plan_loads(self, item: Pass) -> None:
        """When drafting begins: plan what is loaded meanwhile."""
        self._catch_up()
        self._began_ns = self._now
        loads = self._core.drafting_begins(self._window.expected_ns)
        plan_ns = self._costs.plan_ns + self._costs.submit_ns(len(loads))
        self._spent.decide_ns += plan_ns
        self._now += plan_ns
        self._issue(loads, item, -1)
        self._end_host_work(item, -1)

    def _token_counts(self, item: Pass, executed: list[list[int]]) -> list[list[int]]:
        """Tokens of a pass for each expert that it runs, in the same order; of an oracle's guess one each."""
        routed = self._trace.pass_counts(item)
        source = self._core.prefetch.prediction
        if source is None or "commit" not in self._core.modes:
            return [list(counts.values()) for counts in routed]
        if source in self._trace.predicted:
            predicted = self._trace.pass_counts(item, source)
        else:
            predicted = [dict.fromkeys(experts, 1) for experts in executed]
        pairs = zip(executed, routed, predicted, strict=True)
        return [list((counts if list(counts) == experts else guess).values()) for experts, counts, guess in pairs]

    def _layer(self, item: Pass, layer: int, experts: list[int], ahead: list[int] | None) -> None:
        """One layer, with what is foreseen of the next one, if something is."""
        core, link = self._core, self._link
        self._catch_up()
        for key in core.layer_routed(layer, experts, self._tokens[layer] if self._tokens else ()):
            if link.cancel(key):
                core.cancelled(key)
        self._experts = experts
        if self._record_spans:
            self._record_uses(item, layer)
        is_first = True
        while (wave := core.next_wave()) is not None:
            if link.ends_ns <= self._now:
                link.advance(self._now)
            self._host_work(item, layer, wave, ahead, is_first)
            is_first = False
            if wave.wait:
                self._wait(item, layer, wave.wait)
            if wave.experts:
                self._compute_experts(item, layer, len(wave.experts))
            core.wave_done()
        if self._cpu_end_ns:
            self._join(item, layer)
        dropped = core.layer_done()
        if dropped:
            self._record_evictions(dropped, self._now, item)

    def _compute_experts(self, item: Pass, layer: int, count: int) -> None:
        """Run so many of the layer's experts on the device."""
        start_ns = self._now
        self._now += self._costs.experts_ns(layer, self._num_tokens, count, len(self._experts))
        if self._cpu_end_ns:
            self._now += self._costs.sharing.device_ns
        self._spent.experts_ns += self._now - start_ns
        if self._record_spans:
            self._span("device", "experts", start_ns, self._now, item, layer)

    def _catch_up(self) -> None:
        """Bring the link up to this process's own time and tell the core what has landed."""
        link = self._link
        if link.ends_ns <= self._now:
            link.advance(self._now)
        if link.landed:
            self._core.all_landed(link.drain())

    def _host_work(self, item: Pass, layer: int, wave: Wave, ahead: list[int] | None, is_first: bool) -> None:
        """Decide and submit loads, then predict and submit prefetches, all on the host thread."""
        self._began_ns = self._now
        decide_ns = self._costs.decide_ns(len(wave.loads))
        if is_first:
            decide_ns += self._utility_ns
        if wave.cpu_experts:
            decide_ns += self._costs.sharing.start_ns
        self._spent.decide_ns += decide_ns
        self._now += decide_ns
        if wave.cpu_experts:
            self._start_cpu(item, layer, wave)
        if wave.loads:
            self._issue(wave.loads, item, layer)
        if is_first:
            self._prefetch(item, layer, ahead)
        if self._record_spans:
            self._end_host_work(item, layer)

    def _prefetch(self, item: Pass, layer: int, ahead: list[int] | None) -> None:
        """Predict the next layer's experts and submit the loads that follow. The CPU's part of the layer then runs
        beside all copies that are queued."""
        if ahead is not None:
            predict_ns = self._predict_ns[layer]
            self._spent.predict_ns += predict_ns
            self._now += predict_ns
        loads = self._core.plan_prefetch(ahead or ())
        if loads:
            plan_ns = self._costs.submit_ns(len(loads))
            self._spent.decide_ns += plan_ns
            self._now += plan_ns
            self._issue(loads, item, layer)
        if self._cpu_end_ns:
            self._share_memory(layer)

    def _start_cpu(self, item: Pass, layer: int, wave: Wave) -> None:
        """The CPU begins its part of the layer. In serial mode waits for it."""
        tokens, active = self._num_tokens, len(self._experts)
        self._cpu_began_ns = self._now
        self._cpu_end_ns = self._now + self._costs.cpu_experts_ns(layer, tokens, len(wave.cpu_experts), active)
        self._cpu_end_ns += self._costs.sharing.cpu_ns if wave.experts else 0
        if self._serial:
            self._end_host_work(item, layer)
            self._join(item, layer)
            self._began_ns = self._now

    def _share_memory(self, layer: int) -> None:
        """Stretch the CPU's part and the copies that run beside it, which read the same memory.

        Both are taken to begin together and to go on without a gap, copies as far as they are queued now; the one
        that ends first sets the other free. Copies of later waves do not slow a CPU part that has begun.
        """
        cpu_ratio, copy_ratio = self._costs.contention(layer)
        if cpu_ratio == copy_ratio == 1.0:
            return
        alone_ns = self._cpu_end_ns - self._cpu_began_ns
        together_ns = min(round(alone_ns * cpu_ratio), round(self._link.backlog_ns(self._cpu_began_ns) * copy_ratio))
        self._cpu_end_ns = self._cpu_began_ns + together_ns + round(alone_ns - together_ns / cpu_ratio)
        self._link.slow_down(self._cpu_began_ns, self._cpu_end_ns, copy_ratio)

    def _join(self, item: Pass, layer: int) -> None:
        """Wait until the CPU's part of the layer is there."""
        waited_ns = self._cpu_end_ns - self._now
        if self._record_spans:
            times = self._cpu_began_ns, self._cpu_end_ns
            self._host_spans.append(Span("cpu", "experts", *times, item.pass_id, layer))
        self._cpu_end_ns = 0
        if waited_ns > 0:
            self._spend("cpu_experts", "device", waited_ns, item, layer)

    def _issue(self, loads: Sequence[Load], item: Pass, layer: int) -> None:
        """Submit loads one after the other. In serial mode waits for them."""
        if self._record_spans:
            evicted = [key for load in loads for key in load.evicts]
            self._record_evictions(evicted, self._began_ns, item)
        now_ns = self._now
        self._now = self._link.submit(loads, now_ns)
        self._spent.issue_ns += self._now - now_ns
        if self._serial:
            self._end_host_work(item, layer)
            self._wait(item, layer, [load.key for load in loads])
            self._began_ns = self._now

    def _end_host_work(self, item: Pass, layer: int) -> None:
        if self._now > self._began_ns:
            self._span("host", "decide", self._began_ns, self._now, item, layer)

    def _wait(self, item: Pass, layer: int, keys: Sequence[Key]) -> None:
        """Wait for copies and hand the landings to the core."""
        if self._serial:
            keys = [key for key in keys if not self._core.is_landed(key)]
        landed_ns, stalled_ns = self._link.land(keys), self._now
        if landed_ns > stalled_ns:
            wakeup_ns = self._costs.wakeup_ns(landed_ns - stalled_ns)
            self._now = landed_ns + wakeup_ns
            self._spent.stall_ns += self._now - stalled_ns
            if self._explain:
                self._explain_stall(layer, keys, stalled_ns, landed_ns, wakeup_ns)
            if self._record_spans:
                self._span("device", "stall", stalled_ns, self._now, item, layer)
        self._catch_up()

    def _explain_stall(self, layer: int, keys: Sequence[Key], stalled_ns: int, landed_ns: int, wakeup_ns: int) -> None:
        """Tell what the link was busy with."""
        awaited = [key for key in keys if key[0] == layer and key[1] in self._experts]
        split_stall(self._stalls, stalled_ns, landed_ns, self._link.landings, awaited)
        self._stalls["wakeup"] = self._stalls.get("wakeup", 0) + wakeup_ns

    def _spend(self, term: str, track: str, duration_ns: int, item: Pass, layer: int) -> None:
        start_ns = self._now
        self._now += duration_ns
        self._terms[term] += duration_ns
        if self._record_spans:
            self._host_spans.append(Span(track, term, start_ns, self._now, item.pass_id, layer))

    def _span(self, track: str, kind: str, start_ns: int, end_ns: int, item: Pass, layer: int) -> None:
        if self._record_spans:
            self._host_spans.append(Span(track, kind, start_ns, end_ns, item.pass_id, layer))

    def _record_uses(self, item: Pass, layer: int) -> None:
        """What was prefetched for a layer and is asked for now."""
        self._uses += [FirstUse(item.pass_id, (layer, expert)) for expert in self._core.first_uses]

    def _record_evictions(self, keys: Sequence[Key], at_ns: int, item: Pass) -> None:
        """Evictions are moments, shown where the host work that decided them began."""
        if self._record_spans:
            for layer, expert in keys:
                size = self._trace.shape.expert_bytes[layer]
                self._host_spans.append(Span("host", "evict", at_ns, at_ns, item.pass_id, layer, expert, size))
