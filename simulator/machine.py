"""The SimPy machine: carries the plans of an `OffloadCore` out in simulated integer nanoseconds.

The live twin is `runtime/engine.py`: the same calls in the same order. Per layer there are at most three events
(host work, a stall, compute) and one per copy.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from simulator.cost_model import TERMS, CostModel
from simulator.link import SimulatedLink
from simulator.policies.cache import Key
from simulator.policies.core import Load, OffloadCore, Wave
from trace_capture.run import Span
from trace_capture.trace import Pass, Phase, Trace

Process = Generator[simpy.Event, Any, None]


@dataclass
class PassTimes:
    """Duration of one pass and its parts, by `TERMS`."""

    phase: Phase
    sequence: int
    tokens: int
    terms_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TERMS, 0))

    @property
    def total_ns(self) -> int:
        """The pass from its start to its end."""
        return sum(self.terms_ns.values())


class Machine:
    """Replays a trace on a modelled link and device.

    Args:
        trace: routing, and predictions if the prefetch policy needs them.
        costs: durations.
        core: decisions.
        serial: wait for every load where it is issued, as `DeviceConfig.serial`.
        record_spans: keep the timeline.

    Raises:
        TraceError: the trace lacks the predictions that the prefetch policy needs.
    """

    def __init__(
        self, trace: Trace, costs: CostModel, core: OffloadCore, serial: bool = False, record_spans: bool = False
    ) -> None:
        self._trace = trace
        self._costs = costs
        self._core = core
        self._serial = serial
        self._prediction = core.prefetch.prediction
        if self._prediction is not None:
            trace.predictions(self._prediction)
        self._env = simpy.Environment(initial_time=0)
        self._link = SimulatedLink(self._env, costs.copy_ns)
        self._record_spans = record_spans
        self._host_spans: list[Span] = []
        self._terms: dict[str, int] = {}
        self.passes: list[PassTimes] = []

    def run(self) -> None:
        """Replay the whole trace."""
        self._env.run(self._env.process(self._replay()))

    def spans(self) -> list[Span]:
        """The timeline: compute, host and link, each in order of start."""
        spans = list(self._host_spans)
        for copy, pass_id in zip(self._link.copies, self._pass_of_copies(), strict=True):
            layer, expert = copy.load.key
            spans.append(
                Span("link", "load", copy.start_ns, copy.end_ns, pass_id, layer, expert, copy.load.num_bytes, copy.load.reason)
            )
        return sorted(spans, key=lambda span: (span.start_ns, span.track))

    def _pass_of_copies(self) -> list[int]:
        """The pass during which each copy began."""
        starts = [span.start_ns for span in self._host_spans if span.kind == "overhead"]
        ids = [span.pass_id for span in self._host_spans if span.kind == "overhead"]
        result, place = [], 0
        for copy in self._link.copies:
            while place + 1 < len(starts) and starts[place + 1] <= copy.start_ns:
                place += 1
            result.append(ids[place] if ids else -1)
        return result

    def _replay(self) -> Process:
        for item in self._trace.passes:
            times = PassTimes(item.phase, item.sequence, item.stop - item.start)
            self._terms = times.terms_ns
            self._core.begin_pass(item.phase == Phase.PREFILL)
            yield from self._spend("overhead", "host", self._costs.compute.overhead_ns(times.tokens), item, -1)
            context = int(self._trace.position[item.start])
            for layer, experts in self._trace.iter_layers(item):
                dense_ns = self._costs.compute.dense_ns(layer, times.tokens, context)
                yield from self._spend("dense", "device", dense_ns, item, layer)
                if experts:
                    yield from self._layer(item, layer, experts)
            self.passes.append(times)

    def _layer(self, item: Pass, layer: int, experts: list[int]) -> Process:
        core, compute = self._core, self._costs.compute
        self._drain()
        for key in core.layer_routed(layer, experts):
            if self._link.cancel(key):
                core.cancelled(key)
        first = True
        tokens = item.stop - item.start
        while (wave := core.next_wave()) is not None:
            yield from self._host_work(item, layer, wave, first)
            first = False
            yield from self._wait(item, layer, wave.wait)
            if wave.experts:
                experts_ns = compute.experts_ns(layer, tokens, len(wave.experts), len(experts))
                yield from self._spend("experts", "device", experts_ns, item, layer)
            core.wave_done()
        core.layer_done()

    def _host_work(self, item: Pass, layer: int, wave: Wave, first: bool) -> Process:
        """Decide and submit loads, then predict and submit prefetches, all on the host thread."""
        start_ns = int(self._env.now)
        decide_ns = self._costs.compute.decide_ns(len(wave.loads))
        self._terms["decide"] += decide_ns
        end_ns = yield from self._issue(wave.loads, start_ns + decide_ns, item, layer)
        if first:
            predicted, predict_ns = self._predict(item, layer)
            self._terms["predict"] += predict_ns
            end_ns = yield from self._issue(self._core.plan_prefetch(predicted), end_ns + predict_ns, item, layer)
        if end_ns > self._env.now:
            self._span("host", "decide", int(self._env.now), end_ns, item, layer)
            yield self._env.timeout(end_ns - int(self._env.now))

    def _issue(self, loads: Sequence[Load], from_ns: int, item: Pass, layer: int) -> Generator[simpy.Event, Any, int]:
        """Submit loads one after the other; gives when the host is done with it. In serial mode waits for them."""
        end_ns = from_ns
        for load in loads:
            end_ns += self._costs.issue_ns
            self._link.submit(load, end_ns)
        self._terms["issue"] += end_ns - from_ns
        if self._serial and loads:
            yield self._env.timeout(end_ns - int(self._env.now))
            yield from self._wait(item, layer, [load.key for load in loads])
            return int(self._env.now)
        return end_ns

    def _predict(self, item: Pass, layer: int) -> tuple[list[int], int]:
        """Predicted experts of the next layer, and what the prediction costs."""
        target = layer + 1
        if self._prediction is None or item.phase == Phase.PREFILL or target >= self._trace.shape.num_moe_layers:
            return [], 0
        predicted = self._trace.active_experts(item.start, item.stop, target, self._prediction)
        return predicted, self._costs.compute.predict_ns(layer)

    def _wait(self, item: Pass, layer: int, keys: Sequence[Key]) -> Process:
        """Wait for copies and hand the landings to the core."""
        waiting = [key for key in keys if not self._core.is_landed(key)]
        if not waiting:
            return
        barrier = self._link.barrier(waiting)
        if barrier is not None:
            start_ns = int(self._env.now)
            yield barrier
            if self._costs.wakeup_ns:
                yield self._env.timeout(self._costs.wakeup_ns)
            self._terms["stall"] += int(self._env.now) - start_ns
            self._span("device", "stall", start_ns, int(self._env.now), item, layer)
        self._drain()

    def _drain(self) -> None:
        for key in self._link.drain():
            self._core.landed(key)

    def _spend(self, term: str, track: str, duration_ns: int, item: Pass, layer: int) -> Process:
        self._terms[term] += duration_ns
        start_ns = int(self._env.now)
        self._span(track, term, start_ns, start_ns + duration_ns, item, layer)
        if duration_ns:
            yield self._env.timeout(duration_ns)

    def _span(self, track: str, kind: str, start_ns: int, end_ns: int, item: Pass, layer: int) -> None:
        if self._record_spans:
            self._host_spans.append(Span(track, kind, start_ns, end_ns, item.pass_id, layer))
