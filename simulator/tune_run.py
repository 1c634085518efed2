"""One run of the tuner: grid, search, smaller budgets, confirmation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from simulator.cost_model import CostModel
from simulator.hot_experts import with_hot_experts
from simulator.policies.capacity import even_slots
from simulator.policies.config import CacheConfig, DeviceConfig, OffloadConfig
from simulator.replay import simulate
from simulator.result_store import ResultStore
from simulator.slot_split import SlotSplit, split_slots
from simulator.tune import Finalists, TuneOptions, TuneResult, split_trace, verdict
from simulator.tune_cpu import CpuThreads, Named, cpu_threads_for, num_with_cpu_misses, with_cpu_layers, with_cpu_misses
from simulator.tune_front import Candidate
from simulator.tune_goal import Goal, figures_of
from simulator.tune_grid import Scope, choices_of, grid, policies_for, sources_for, splits_for
from simulator.tune_replays import Cancelled, Part, Progress, Replays, Steps
from simulator.tune_space import EIGHTHS, Choices, Space
from simulator.tune_study import search
from trace_capture.errors import ConfigError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.files import text_digest
from trace_capture.hardware import HardwareProfile
from trace_capture.rewindow import rewindow
from trace_capture.run import Run
from trace_capture.statistics import GENERATING, lru_hit_curve
from trace_capture.trace import Trace
from trace_capture.versions import software_versions

_NO_CPU = (
    "experts on the CPU were not tried: the emulated device is this CPU itself, so that they would cost nothing more "
    "than on the device; 'calibrate --copy-to-cpu RATIO' paces them"
)
_SHARES = (2, 4, 6)
"""Eighths of the budget that the best configuration is also replayed with, for the front."""


class Tuning:
    """See `simulator.tune.tune`, whose arguments these are."""

    def __init__(
        self,
        trace: Trace,
        hardware: HardwareProfile,
        budget_bytes: int,
        device: DeviceConfig,
        scopes: Sequence[Scope],
        options: TuneOptions,
        progress: Progress | None,
        cancelled: Cancelled | None,
        profile: Trace | ExpertCounts | None = None,
    ) -> None:
        self.trace = trace
        self.hardware = hardware
        self.budget_bytes = budget_bytes
        self.device = device
        self.scopes = scopes
        self.options = options
        self.goal = Goal(options.objective, budget_bytes)
        self.costs = CostModel(hardware, trace.shape)
        self.gammas = _gammas(options.drafts)
        train, held_out = split_trace(trace)
        self.train = {gamma: _part(self._drafted(train, gamma)) for gamma in self.gammas}
        self.held_out = {gamma: self._drafted(held_out, gamma) for gamma in self.gammas}
        self.base = self.gammas[0]
        self.profile = profile or self.train[self.base].trace
        self.steps = Steps(progress, cancelled)
        store = None if options.study is None else ResultStore(options.study)
        self.replays = Replays(hardware, store, options.jobs, options.cluster, self.steps)
        self._copy_ns = [self.costs.copy_ns(size) for size in trace.shape.expert_bytes]
        self._hits = lru_hit_curve(self.train[self.base].trace, GENERATING)
        self.split = self._split(budget_bytes, 0)
        self.threads = CpuThreads() if self._device_is_the_cpu else cpu_threads_for(hardware, trace.shape)
        self.candidates: list[Candidate] = []
        self._seen: set[str] = set()

    def run(self) -> TuneResult:
        """Grid, search, smaller budgets, confirmation."""
        try:
            return self._run()
        finally:
            self.replays.close()

    def _run(self) -> TuneResult:
        space = self._space()
        first = self._grid()
        grid_best = self.candidates[0]
        if self.options.objective == "memory":
            limit_ms = (1 + self.options.slowdown_ratio) * min(one.train_tpot_ms for one in self.candidates)
            self.goal = replace(self.goal, limit_ms=limit_ms)
        if self.options.trials:
            known = [(choices, self.goal.score(one.figures)) for choices, one in first]
            search(
                space,
                known,
                lambda proposed: self._try_choices(space, proposed),
                trials=self.options.trials,
                seed=self.options.seed,
                path=self.options.study,
                name=self._study_name(),
            )
        self.candidates.sort(key=self._rank)
        self._with_less_memory()
        finalists = self._confirm(grid_best)
        ranked = sorted(self.candidates, key=self._rank)
        return verdict(self.trace, self.hardware, self.goal, ranked, finalists, self.split, self.options)

    @property
    def _device_is_the_cpu(self) -> bool:
        """Whether the CPU of an emulated device is the device itself, as fast, and reached without a link."""
        measured = self.hardware.measured
        return self.hardware.emulated and self.costs.is_measured and measured is not None and not measured.cpu_paced_ns

    def _grid(self) -> list[tuple[Choices, Candidate]]:
        """Replay the grid; what a study calls each configuration, the best first."""
        train = self.train[self.base].trace
        planned = grid(train, self.budget_bytes, self.split, self.scopes, self.device, self.profile)
        counts = self.threads.counts
        on_cpu = with_cpu_layers(train, self.budget_bytes, self.device) if counts else []
        num_cpu = len(on_cpu) + num_with_cpu_misses(len(planned)) + 2 * (len(counts) - 1) if counts else 0
        self.steps.total = len(planned) + num_cpu + self.options.trials + len(self._shares()) + 3
        pairs = self._try_named(planned)
        if counts:
            on_cpu += with_cpu_misses(self._best_of(pairs))
            pairs += self._try_named(self.threads.chosen(on_cpu))
            pairs += self._try_named(self.threads.others(self._best_of(pairs)))
        self.candidates.sort(key=self._rank)
        return sorted(pairs, key=lambda pair: self._rank(pair[1]))

    def _best_of(self, pairs: Sequence[tuple[Choices, Candidate]]) -> list[Named]:
        """What was tried, the best first."""
        return [(one.split, one.config) for _, one in sorted(pairs, key=lambda pair: self._rank(pair[1]))]

    def _try_named(self, named: Sequence[Named]) -> list[tuple[Choices, Candidate]]:
        part = self.train[self.base]
        found = self.replays.figures([(part, config) for _, config in named])
        pairs = []
        for (split, config), figures in zip(named, found, strict=True):
            if figures is None:
                raise ConfigError(f"'{config.title}' cannot be replayed on this machine; simulate it to see why")
            candidate = Candidate(config, split, figures, self.base)
            self._add(candidate)
            pairs.append((choices_of(split, config, self.base), candidate))
        return pairs

    def _try_choices(self, space: Space, proposed: Sequence[Choices]) -> list[float]:
        """Scores of choices; those that are impossible have an infinite one."""
        configs: list[tuple[Choices, OffloadConfig] | None] = []
        for choices in proposed:
            try:
                configs.append((choices, space.config_of(choices)))
            except ConfigError:
                configs.append(None)
                self.steps.step()
        possible = [item for item in configs if item is not None]
        found = iter(self.replays.figures([(self.train[item[0]["gamma"]], item[1]) for item in possible]))
        scores = []
        for item in configs:
            figures = next(found) if item is not None else None
            scores.append(self.goal.score(figures))
            if item is not None and figures is not None:
                choices, config = item
                kl_nats = space.kl_nats(choices)
                self._add(Candidate(config, choices["split"], figures, choices["gamma"], kl_nats))
        return scores

    def _add(self, candidate: Candidate) -> None:
        """Keep a candidate, of those that are the same the first."""
        chosen = candidate.config.model_dump(mode="json", exclude={"label"})
        key = json.dumps([candidate.gamma, chosen], sort_keys=True)
        if key not in self._seen:
            self._seen.add(key)
            self.candidates.append(candidate)

    def _shares(self) -> list[int]:
        """Smaller budgets, in eighths, that hold every layer's top-k."""
        need_bytes = self.trace.shape.top_k * sum(self.trace.shape.expert_bytes)
        return [share for share in _SHARES if self.budget_bytes * share // EIGHTHS >= need_bytes]

    def _with_less_memory(self) -> None:
        """The best configuration with less of the budget, for the front; none of them is the winner by speed."""
        best = self.candidates[0]
        wanted = []
        for share in self._shares():
            budget_bytes = self.budget_bytes * share // EIGHTHS
            cache = self._smaller(best, budget_bytes)
            label = f"{best.config.title}, {share} eighths of the budget"
            config = best.config.model_copy(update={"cache": cache, "label": label})
            wanted.append(with_hot_experts(config, self.profile, self.trace.shape))
        part = self.train[best.gamma]
        for config, figures in zip(wanted, self.replays.figures([(part, config) for config in wanted]), strict=True):
            if figures is not None:
                self._add(replace(best, config=config, figures=figures))

    def _smaller(self, best: Candidate, budget_bytes: int) -> CacheConfig:
        """The cache of a candidate with another budget; what it keeps hot is counted anew where it needs that."""
        cache, shape = best.config.cache, self.trace.shape
        sizes = {"slots_per_layer": None, "budget_bytes": None, "budget_ratio": None, "hot_experts": None}
        plain = cache.model_copy(update=sizes | {"policy": "lru" if cache.policy == "resident" else cache.policy})
        if best.split == "pool":
            return plain.model_copy(update={"budget_bytes": budget_bytes})
        cpu_layers = best.config.cpu.whole_layers(shape.num_moe_layers)
        if best.split == "ILP":
            slots = self._split(budget_bytes, len(cpu_layers)).slots
        else:
            slots = tuple(even_slots(budget_bytes, shape, cpu_layers))
        return plain.model_copy(update={"slots_per_layer": slots})

    def _confirm(self, grid_best: Candidate) -> Finalists:
        """Replay baseline, winner, runner-up and the grid's best on the held-out part."""
        even = CacheConfig(slots_per_layer=tuple(even_slots(self.budget_bytes, self.trace.shape)))
        plain = OffloadConfig(label="plain LRU, even split", cache=even, device=self.device)
        winner, *others = sorted(self.candidates, key=self._rank)
        baseline = self._held_out(plain, self.base)
        ranked = [(winner, self._held_out(winner.config, winner.gamma))]
        runner_up = self._held_out(others[0].config, others[0].gamma) if others else None
        if grid_best is not winner:
            same = runner_up is not None and others[0] is grid_best
            run = runner_up if same and runner_up else self._held_out(grid_best.config, grid_best.gamma, counts=False)
            ranked.append((grid_best, run))
        goal = self.goal
        if self.options.objective == "memory":
            tpot_ms = figures_of(ranked[-1][1], self.trace.shape).tpot_ms
            goal = replace(goal, limit_ms=(1 + self.options.slowdown_ratio) * tpot_ms)
        notes = [_NO_CPU] if self._device_is_the_cpu else [self.threads.origin] if self.threads.origin else []
        return Finalists(baseline, tuple(ranked), goal, runner_up, notes)

    def _held_out(self, config: OffloadConfig, gamma: int | None, *, counts: bool = True) -> Run:
        self.steps.check()
        run = simulate(self.held_out[gamma], self.hardware, config, record_spans=True)
        if counts:
            self.steps.step()
        return run

    def _rank(self, candidate: Candidate) -> tuple[float, float, int]:
        """Better ones first; of equally good ones those that leave more cores free."""
        figures, threads = candidate.figures, candidate.config.cpu.used_threads or 0
        return self.goal.score(figures), self.goal.speed_ms(figures), threads

    def _space(self) -> Space:
        train = self.train[self.base].trace
        has_drafts = train.info.draft is not None or bool(self.options.drafts)
        reads_prompts = self.options.objective in ("ttft", "throughput")
        return Space(
            train=train,
            profile=self.profile,
            policies=policies_for(train, self.budget_bytes, has_drafts=has_drafts),
            splits=splits_for(self.scopes),
            sources=sources_for(train),
            budget_bytes=self.budget_bytes,
            device=self.device,
            ilp_slots=lambda budget_bytes, cpu_layers: self._split(budget_bytes, cpu_layers).slots,
            cpu_threads=self.threads.counts,
            with_prefill=reads_prompts,
            with_budget=self.options.objective == "memory",
            gammas=self.gammas,
            commit={cost.source: cost for cost in self.options.commit},
            quality_nats=self.options.quality_nats,
        )

    def _split(self, budget_bytes: int, cpu_layers: int) -> SlotSplit:
        """The integer program's answer for the layers that are on the device, solved once for all runs of a study."""

        def solved() -> object:
            shape, hits = self.trace.shape, self._hits
            if cpu_layers >= shape.num_moe_layers:
                return asdict(SlotSplit((0,) * shape.num_moe_layers, 0.0, 0.0, "none", True, 0.0))
            rest = {"moe_layer_ids": shape.moe_layer_ids[cpu_layers:], "expert_bytes": shape.expert_bytes[cpu_layers:]}
            layers = shape.model_copy(update=rest) if cpu_layers else shape
            found = split_slots(hits[cpu_layers:], self._copy_ns[cpu_layers:], layers, budget_bytes)
            return asdict(replace(found, slots=(0,) * cpu_layers + found.slots))

        inputs = [self.train[self.base].digest, self._copy_ns, budget_bytes, cpu_layers]
        known = self.replays.remembered("slots", inputs, solved)
        return SlotSplit(**known | {"slots": tuple(known["slots"])})

    def _drafted(self, part: Trace, gamma: int | None) -> Trace:
        if gamma is None:
            return part
        return rewindow(part, gamma, self.options.acceptance_ratio, draft_bytes=self.options.draft_bytes)

    def _study_name(self) -> str:
        """By everything that the trials depend on, so that one file may hold several studies."""
        inputs = {
            "trace": _part(self.trace).digest,
            "hardware": self.hardware.digest,
            "budget_bytes": self.budget_bytes,
            "profile": self.profile.digest,
            "device": self.device.model_dump(mode="json"),
            "scopes": list(self.scopes),
            "cpu_threads": list(self.threads.counts),
            "options": self.options.as_json(),
            "versions": software_versions("simpy", "optuna"),
        }
        digest = text_digest(json.dumps(inputs, sort_keys=True)).removeprefix("sha256:")
        return f"{self.options.objective}-{self.trace.shape.name}-{digest[:16]}"


def _part(trace: Trace) -> Part:
    """With a digest that also tells how drafts are made."""
    draft = trace.info.draft
    return Part(trace, trace.digest if draft is None else text_digest(trace.digest + draft.model_dump_json()))


def _gammas(drafts: int | None) -> tuple[int | None, ...]:
    """Drafts per pass to try: none, powers of two, and as many as asked for."""
    if drafts is None:
        return (None,)
    powers = [1 << power for power in range(drafts.bit_length())]
    return tuple(sorted({0, drafts, *(power for power in powers if power < drafts)}))
