"""The live engine: carries the plans of an `OffloadCore` out on a real model.

The simulated twin is `simulator/machine.py`: the same calls in the same order, once per MoE layer of a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from time import perf_counter_ns

import torch
from torch import Tensor

from runtime.device_experts import DeviceExperts
from runtime.host_experts import HostExperts, HostJob
from runtime.kernels import Routed
from runtime.layer_run import Foreseen, LayerRun
from runtime.link import CopyJob, EmulatedLink, ThreadedLink
from runtime.recall import Recall
from runtime.records import LayerTimes, PassRecord
from runtime.slots import SlotPool, StaleSlotError
from runtime.store import ExpertStore
from runtime.turns import Turns
from simulator.policies.balancer import ExpertTimes
from simulator.policies.cache import Key
from simulator.policies.capacity import Capacity
from simulator.policies.config import OffloadConfig
from simulator.policies.core import OffloadCore
from simulator.policies.plans import Load, Wave
from simulator.policies.window import DraftingWindow
from simulator.routing_drift import RoutingWatch
from trace_capture.hooks import MoeSite, Predictor
from trace_capture.model_shape import ModelShape

_NO_DRAFTING = (0, 0, 0)
"""Of the drafting before a pass: when it began; how long planning loads, and then making drafts, took."""


class Engine:
    """Runs the experts of an offloaded model from slots.

    Made by `runtime.offload`; its public face is the counters of `core`, the records of passes and the link's spans.

    Args:
        sites: Mixture-of-Experts layers of the model.
        shape: counts and bytes.
        config: what was chosen.
        store: experts in host memory.
        pools: one slot pool per partition of `capacity`.
        capacity: partitions.
        link: executes loads.
        core: decides.
        implementation: the experts implementation that the untouched model uses.
        predictor: names the next layer's experts, where the prefetch policy wants that.
        times: with which the core was made.
    """

    def __init__(
        self,
        sites: Sequence[MoeSite],
        shape: ModelShape,
        config: OffloadConfig,
        store: ExpertStore,
        pools: Sequence[SlotPool],
        capacity: Capacity,
        link: ThreadedLink,
        core: OffloadCore,
        implementation: str | None,
        predictor: Predictor | None,
        times: ExpertTimes | None = None,
    ) -> None:
        self.shape = shape
        self.config = config
        self.core = core
        self.link = link
        self.store = store
        self.pools = pools
        self.passes: list[PassRecord] = []
        self._pool_of_layer = [pools[partition] for partition in capacity.partition_of_layer]
        self._predictor = predictor
        self._times = times
        self._window = DraftingWindow(config.utility)
        self._serial = config.device.serial
        self._device = DeviceExperts(sites, self._pool_of_layer, implementation)
        pace_ns = config.device.cpu_expert_ns if isinstance(link, EmulatedLink) else 0
        self._host = None
        if config.cpu.is_used:
            self._host = HostExperts(sites, store.banks, implementation, config.cpu.live_threads, pace_ns)
        self.pairs_on_device = 0
        """(token, expert) pairs that the device has computed; each pair is computed once, here or on the CPU."""
        self.pairs_on_cpu = 0
        self._announced: PassRecord | None = None
        self._drafting = _NO_DRAFTING
        self._evicted: list[Key] = []
        self._foreseen: Foreseen | None = None
        self._broken = False
        self.preloaded: tuple[Key, ...] = ()
        """Experts that were on the device before the first pass."""
        self.turns = Turns()
        self._recall = [Recall() for _ in sites]
        self._unjudged: list[tuple[int, list[list[int]], Tensor]] = []
        self.verified: list[int] | None = None
        """Debug check, slow: set to [0] * L to compare every expert with its bank at every use; counts the uses."""
        self.is_reading_prompt = False
        """Whether passes belong to a prompt although they find tokens in the cache, as in a chunked prefill."""
        self.watch: RoutingWatch | None = None
        """Is told where each generated token was routed; only the first of a verify pass, which is certain."""
        self.speculate_in_prefill = False
        """For evaluation: treat every pass as decode, so that whole texts can be scored under speculation."""

    @property
    def recall(self) -> list[Recall]:
        """How often predictions for each MoE layer [L] were right; nothing is predicted for the first."""
        self._judge()
        return self._recall

    def use_kernels(self, implementation: str | None) -> None:
        """Run the device's experts with the kernels of this experts implementation from now on."""
        self._device.use(implementation)

    def preload(self) -> None:
        """Bring experts to the device before the first pass, where the configuration says so.

        Raises:
            LinkError: a copy failed.
        """
        loads = self.core.preload()
        self.preloaded = tuple(load.key for load in loads)
        self._submit(loads)
        if loads:
            self.link.wait(self.preloaded)
            self._drain()

    def announce_pass(self, is_prefill: bool, tokens: int) -> None:
        """A forward pass of the model is about to begin."""
        now_ns = perf_counter_ns()
        began_ns, planned_ns, drafted_ns = self._drafting
        self._drafting = _NO_DRAFTING
        self._announced = PassRecord(began_ns or now_ns, is_prefill, tokens, drafted_ns, planned_ns)

    def drafting_begins(self, reads_prompt: bool) -> None:
        """See `runtime.speculative.DraftListener`: a pass begins with the drafts that are made for it, and meanwhile
        the link loads what is planned now.

        Raises:
            LinkError: a copy failed.
        """
        began_ns = perf_counter_ns()
        if self.core.plans_when_drafting and not reads_prompt:
            self._plan_loads()
        self._drafting = began_ns, perf_counter_ns() - began_ns, 0

    def verify_begins(self, drafted: int) -> None:
        """See `runtime.speculative.DraftListener`."""
        began_ns, planned_ns, _ = self._drafting
        self._drafting = began_ns, planned_ns, perf_counter_ns() - began_ns - planned_ns

    def drafts_judged(self, accepted: int) -> None:
        """See `runtime.speculative.DraftListener`."""
        self.passes[-1].accepted_drafts = accepted

    def run_layer(self, layer: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The routed experts of one layer: hidden [T, H], ids and weights [T, K] -> [T, H].

        Raises:
            LinkError: a copy failed.
        """
        try:
            return self._run_layer(layer, hidden, top_k_index, top_k_weights)
        except BaseException:
            self._broken = True
            self.turns.give()
            raise

    def _run_layer(self, layer: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        entered_ns = perf_counter_ns()
        if layer == 0:
            self._begin_pass(hidden.shape[0])
        top_k_index, top_k_weights, rows = self._executed(layer, top_k_index, top_k_weights)
        run = LayerRun(layer, Routed(hidden, rows, top_k_weights), top_k_index)
        counts: dict[int, int] = {}
        for expert in chain.from_iterable(run.routed.rows):
            counts[expert] = counts.get(expert, 0) + 1
        run.num_asked = len(counts)
        known = {expert: tokens for expert, tokens in counts.items() if expert < self.shape.num_experts}
        self._route(layer, known)
        core = self.core
        first_uses = core.first_uses
        while (wave := core.next_wave()) is not None:
            self._run_wave(run, wave)
            core.wave_done()
        num_pairs = sum(known.values())
        self.link.settle()
        device_done_ns = perf_counter_ns() if run.job is not None else None
        output = run.output if run.output is not None else self._joined(run, num_pairs)
        dropped = core.layer_done()
        for key in dropped:
            self._pool_of_layer[key[0]].release(key)
        evicted, self._evicted = tuple(self._evicted), []
        done_ns = perf_counter_ns()
        cpu_ns = (run.job.began_ns, run.job.ended_ns) if run.job is not None else None
        moments = (entered_ns, *run.moments_ns, device_done_ns or done_ns, done_ns)
        self.passes[-1].layers.append(LayerTimes(*moments, run.num_loads, evicted, dropped, tuple(first_uses), cpu_ns))
        return output

    def _run_wave(self, run: LayerRun, wave: Wave) -> None:
        """Carry one wave of a layer out: the CPU's part is begun, the device's done when this returns."""
        layer = run.layer
        run.num_loads += len(wave.loads)
        if wave.cpu_experts:
            run.job = self._start_on_cpu(run, wave.cpu_experts)
        self._submit(wave.loads)
        if run.submitted_ns is None:
            run.submitted_ns = self._prefetch(layer, run.index, run.routed.weights)
        if wave.wait:
            self.link.wait(wave.wait)
            self._drain()
        run.landed_ns = perf_counter_ns()
        if self.verified is not None:
            for expert in wave.experts:
                self._verify_slot((layer, expert))
            self.verified[layer] += len(wave.experts)
        if len(wave.experts) == run.num_asked:
            run.output = self._device.run_whole(layer, wave.experts, run.routed, run.index)
            self.pairs_on_device += run.index.numel()
        elif wave.experts:
            run.parts = run.parts or self._device.parts_of(layer, run.routed)
            self._device.add(run.parts, layer, wave.experts)

    def close(self) -> None:
        """Stop the link and the CPU's thread."""
        self.link.close()
        if self._host is not None:
            self._host.close()

    def verify_residency(self) -> None:
        """Debug check: every landed expert's slot holds exactly the bytes of that expert.

        Raises:
            StaleSlotError: a slot holds something else.
        """
        for key in self.core.resident():
            if self.core.is_landed(key):
                self._verify_slot(key)

    def _begin_pass(self, tokens: int) -> None:
        if self._broken:
            self._start_afresh()
        record = self._announced or PassRecord(perf_counter_ns(), tokens > 1, tokens)
        self._announced = None
        self._foreseen = None
        self._judge()
        if self.speculate_in_prefill:
            record.is_prefill = False
        if self.core.plans_when_drafting and not record.is_prefill and not record.planned_ns:
            self._plan_loads()  # nothing was drafted
        self.passes.append(record)
        self.core.begin_pass(record.is_prefill)

    def _plan_loads(self) -> None:
        """Load for the pass to come what the core finds useful, while it is drafted."""
        if self._broken:
            self._start_afresh()
        if self.passes and not (last := self.passes[-1]).is_prefill:
            self._window.ended(last.drafting_ns, perf_counter_ns() - last.began_ns)
        self._drain()
        self._submit(self.core.drafting_begins(self._window.expected_ns))

    def _start_afresh(self) -> None:
        """A pass was broken off somewhere between a plan and its end: empty the slots and forget what was planned."""
        self.link.abandon()
        old = self.core
        self.core = OffloadCore.from_config(self.config, self.shape, old.log, times=self._times)
        self.core.tally = old.tally
        self.core.tally.restarted()
        for pool in self.pools:
            pool.clear()
        self._evicted = []
        self._broken = False
        self.preload()

    def _executed(self, layer: int, top_k_index: Tensor, top_k_weights: Tensor) -> Foreseen:
        """What a layer runs: its router's choice, or in mode `commit` what was predicted for it; in that mode the host
        does not wait for the router."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and self.core.modes[layer] == "commit":
            self._unjudged.append((layer, foreseen.rows, top_k_index))
            return foreseen
        rows = top_k_index.tolist()
        if foreseen is not None:
            self._recall[layer].add(foreseen.rows, rows)
        if self.watch is not None and not self.passes[-1].is_prefill:
            self.watch.routed(layer, rows[0], len(rows) == 1)
        return Foreseen(top_k_index, top_k_weights, rows)

    def _judge(self) -> None:
        """Hold committed predictions against what the routers chose."""
        for layer, rows, chosen in self._unjudged:
            self._recall[layer].add(rows, chosen.tolist())
        self._unjudged.clear()

    def _route(self, layer: int, experts: dict[int, int]) -> None:
        """Tell the core what the router chose (expert -> tokens), and withdraw queued loads that turned out wrong."""
        self._drain()
        tokens = list(experts.values()) if self.core.needs_token_counts else ()
        for key in self.core.layer_routed(layer, list(experts), tokens):
            if self.link.cancel(key):
                self.core.cancelled(key)
                self._pool_of_layer[key[0]].release(key)

    def _prefetch(self, layer: int, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[int, int, int]:
        """Foresee the next layer and submit its loads; the moments decided, predicted, submitted."""
        decided_ns = predicted_ns = perf_counter_ns()
        predicted: Sequence[int] = ()
        in_decode = not self.passes[-1].is_prefill and layer + 1 < self.shape.num_moe_layers
        if self._predictor is not None and in_decode:
            ids, weights = self._predictor.predict(layer, top_k_index, top_k_weights)
            rows = ids.tolist()
            self._foreseen = Foreseen(ids.to(top_k_index.dtype), weights.to(top_k_weights.dtype), rows)
            predicted = list(dict.fromkeys(chain.from_iterable(rows)))
            predicted_ns = perf_counter_ns()
        self._submit(self.core.plan_prefetch(predicted))
        return decided_ns, predicted_ns, perf_counter_ns()

    def _submit(self, loads: Sequence[Load]) -> None:
        """Give each load its slot and hand the copies to the link; in serial mode wait for them."""
        if not loads:
            return
        jobs = []
        for load in loads:
            for key in load.evicts:
                self._pool_of_layer[key[0]].release(key)
                self._evicted.append(key)
            pool = self._pool_of_layer[load.key[0]]
            slot = pool.take(load.key)
            pairs = list(zip(pool.views[slot], self.store.sources(load.key), strict=True))
            stamp = pool.stamp_of(slot)
            jobs.append(CopyJob(load.key, load.num_bytes, load.reason, load.priority, pairs, stamp))
        self.link.submit(jobs)
        if self._serial:
            self.link.wait([load.key for load in loads])
            self._drain()

    def _drain(self) -> None:
        for key in self.link.drain():
            self.core.landed(key)

    def _verify_slot(self, key: Key) -> None:
        pool = self._pool_of_layer[key[0]]
        slot = pool.checked_slot(key)
        for name, tensor in pool.tensors.items():
            source = self.store.banks[key[0]][name][key[1]]
            if not torch.equal(tensor[slot].cpu(), source.cpu()):
                raise StaleSlotError(
                    f"slot {slot} does not hold the numbers of expert {key[1]} of MoE layer {key[0]} ({name})"
                )

    def _start_on_cpu(self, run: LayerRun, experts: Sequence[int]) -> HostJob:
        """Let the CPU begin its part of a layer; in serial mode wait for it."""
        if self._host is None:
            raise RuntimeError("the core sends experts to the CPU, and the configuration has no CPU side")
        job = self._host.start(run.layer, experts, run.routed)
        if self._serial:
            self._host.wait(job)
        return job

    def _joined(self, run: LayerRun, num_pairs: int) -> Tensor:
        """The output of a layer that ran in parts, the CPU's among them: [T, H].

        Raises:
            HostError: the CPU's part failed.
        """
        parts = run.parts or self._device.parts_of(run.layer, run.routed)
        self.pairs_on_device += parts.computed
        if run.job is not None and self._host is not None:
            outputs = self._host.wait(run.job)
            parts.put(run.job.pairs.places, outputs.to(run.routed.hidden.device))
            self.pairs_on_cpu += len(run.job.pairs.places)
        if parts.computed != num_pairs:
            raise RuntimeError(f"MoE layer {run.layer} computed {parts.computed} of {num_pairs} (token, expert) pairs")
        return parts.total()
