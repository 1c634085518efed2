"""The tuner: replay candidates on one part of a trace, confirm the winner on the other, and say what it promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from simulator.policies.capacity import plan_capacity
from simulator.policies.config import DeviceConfig, OffloadConfig, Provenance
from simulator.routing_drift import routing_reference
from simulator.slot_split import SlotSplit
from simulator.tune_front import Candidate, FrontPoint, pareto_front
from simulator.tune_goal import Goal, figures_of
from simulator.tune_grid import NOT_WORTH_TRYING as NOT_WORTH_TRYING
from simulator.tune_grid import Scope
from simulator.tune_quality import CommitCost
from simulator.tune_replays import Cancelled, Progress
from simulator.validation.families import strategy_family
from trace_capture.errors import TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Run
from trace_capture.statistics import GENERATING
from trace_capture.trace import Phase, Trace
from trace_capture.versions import software_versions


@dataclass(frozen=True)
class TuneOptions:
    """How to search.

    Attributes:
        objective: `tpot`, `ttft`, `throughput` or `memory`; see `simulator.tune_goal.Goal`.
        trials: proposals of the optimiser beyond the grid; 0 for the grid alone.
        seed: of the optimiser.
        study: SQLite file that keeps the study and all replays, so that a search that was broken off goes on.
        jobs: processes that replay; -1 for one per core. The result does not depend on it.
        cluster: instead of processes: `dask`, `ray`, or either with `:ADDRESS`. Nor does it depend on this.
        slowdown_ratio: for `memory`: the time per token may be so much above the best of the full budget.
        commit: what layers cost that commit, by prefetch source; nothing commits without.
        quality_nats: budget of divergence per token for layers that commit.
        drafts: try up to so many drafts per verify pass (`trace_capture.rewindow`); None: passes as captured.
        acceptance_ratio: of single drafts.
        draft_bytes: weights of the draft model.
    """

    objective: str = "tpot"
    trials: int = 0
    seed: int = 0
    study: Path | None = None
    jobs: int = 1
    cluster: str | None = None
    slowdown_ratio: float = 0.1
    commit: tuple[CommitCost, ...] = ()
    quality_nats: float = 0.0
    drafts: int | None = None
    acceptance_ratio: float = 0.7
    draft_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """What the outcome of a number of trials depends on."""
        costs = [[cost.source, [repr(value) for value in cost.kl_nats]] for cost in self.commit]
        names = ("objective", "seed", "slowdown_ratio", "quality_nats", "drafts", "acceptance_ratio", "draft_bytes")
        return {name: getattr(self, name) for name in names} | {"commit": costs}


@dataclass(frozen=True)
class TuneResult:
    """What tuning found.

    Attributes:
        config: the configuration to use, with its provenance and the TPOT predicted on held-out tokens.
        candidates: all that were simulated, the best on the training part first.
        chosen: `config` on the held-out part, with spans.
        baseline: plain LRU with evenly split slots and no prefetch, same budget, on the held-out part.
        runner_up: the second of `candidates` on the held-out part; None when there was one candidate.
        regret_ms: held-out TPOT over the larger of compute and of the copies that a perfect eviction still needs;
            no policy could save more.
        split: the integer program's answer for the whole budget.
        front: Pareto front of speed, device memory and quality on the training part.
        objective: what was looked for.
        trials: proposals beyond the grid.
        notes: what a reader should know, a sentence each.
    """

    config: OffloadConfig
    candidates: tuple[Candidate, ...]
    chosen: Run
    baseline: Run
    runner_up: Run | None
    regret_ms: float
    split: SlotSplit
    front: tuple[FrontPoint, ...] = ()
    objective: str = "tpot"
    trials: int = 0
    notes: tuple[str, ...] = ()


def tune(
    trace: Trace,
    hardware: HardwareProfile,
    *,
    budget_bytes: int,
    device: DeviceConfig = DeviceConfig(),  # noqa: B008
    scopes: Sequence[Scope] = ("layer",),
    options: TuneOptions = TuneOptions(),  # noqa: B008
    progress: Progress | None = None,
    cancelled: Cancelled | None = None,
    profile: Trace | ExpertCounts | None = None,
) -> TuneResult:
    """Find the best configuration for a trace, a machine and a budget of device memory.

    First a grid: every split of the budget (even, integer program, one pool) with every cache policy and every prefetch
    source the trace has predictions for. Where the machine's profile knows what experts cost on the CPU, the best of
    them are tried again with misses on the CPU, and so are whole layers there with the budget for the others; not
    where an emulated device is the CPU itself, which could then only win. Then
    Optuna proposes `options.trials` more from a wider space (`simulator.tune_space`), starting from the grid's results,
    so that more trials never do worse on the training part. The winner is confirmed on the held-out part: it must beat
    the grid's best and plain LRU there, or gives way to them. A choice of up to four on held-out tokens favours the
    promise a little.

    Args:
        trace: routing of the workload to tune for. Its last third of sequences is held out; of a single sequence,
            the last third of its decode passes, replayed after its prefill. Each part starts with an empty cache.
        hardware: the machine.
        budget_bytes: device memory for experts.
        device: goes into the configuration as it is.
        scopes: `layer` for slots of each layer's own; add `global` to try one pool for all, which the live engine
            supports at the price of gathering weights at every call.
        options: how to search.
        progress: called with (simulations done, all simulations).
        cancelled: asked between simulations; True stops.
        profile: a trace or counts that tell which experts are popular; by default the training part does.

    Returns:
        The same for the same inputs and as many trials, whatever the number of jobs and however often it was broken
        off, unless the integer program runs into its time limit.

    Raises:
        ConfigError: the budget does not hold every layer's top-k, or an option is wrong.
        TraceError: there are too few decode passes to hold some out.
        ProfileError: the profile lacks a rate that is needed.
        TuningStopped: `cancelled` said so.
    """
    from simulator.tune_run import Tuning

    return Tuning(trace, hardware, budget_bytes, device, scopes, options, progress, cancelled, profile).run()


def split_trace(trace: Trace) -> tuple[Trace, Trace]:
    """The training part and the held-out part of a trace; see `tune`.

    Raises:
        TraceError: fewer than three decode passes in a single sequence, or a part without decode passes.
    """
    sequences = trace.sequences()
    if len(sequences) > 1:
        held = np.isin(trace.sequence, sequences[-max(1, len(sequences) // 3) :])
        parts = trace.rows(~held), trace.rows(held)
    else:
        decode = [item for item in trace.passes if item.phase != Phase.PREFILL]
        if len(decode) < 3:
            raise TraceError(f"the trace has {len(decode)} decode passes, too few to tune on; capture more tokens")
        first_held = decode[-(len(decode) // 3)].start
        prefill = trace.phase == Phase.PREFILL
        held = np.arange(trace.num_tokens) >= first_held
        parts = trace.rows(prefill | ~held), trace.rows(prefill | held)
    for name, part in zip(("training", "held-out"), parts, strict=True):
        if not np.isin(part.phase, GENERATING).any():
            raise TraceError(f"the {name} part of the trace has no decode passes; capture more tokens per prompt")
    return parts


@dataclass(frozen=True)
class Finalists:
    """Runs on the held-out part.

    Attributes:
        baseline: plain LRU, even split.
        ranked: candidates with their runs: the winner on the training part, the grid's best if that is another one.
        goal: what decides between them.
        runner_up: of the training part.
    """

    baseline: Run
    ranked: tuple[tuple[Candidate, Run], ...]
    goal: Goal
    runner_up: Run | None = None
    notes: list[str] = field(default_factory=list)


def verdict(
    trace: Trace,
    hardware: HardwareProfile,
    goal: Goal,
    candidates: list[Candidate],
    finalists: Finalists,
    split: SlotSplit,
    options: TuneOptions,
) -> TuneResult:
    """The result: which finalist, what it promises, and what to know about it."""
    shape = trace.shape
    chosen, config, gamma, kl_nats = _best(finalists, trace)
    notes = list(finalists.notes)
    if not split.is_proven:
        notes.append(f"the slot split was stopped by its time limit, up to {split.gap_ms:.3f} ms off the best")
    if kl_nats:
        notes.append(
            f"layers that commit change the output: KL {kl_nats:.4f} nats per token by estimate, shares of what all "
            "layers cost together added up; evaluate this configuration itself (evaluate --modes config)"
        )
    cpu_layers = config.cpu.whole_layers(shape.num_moe_layers)
    if plan_capacity(config.cache, shape, cpu_layers).total_bytes > hardware.device.memory_bytes.value > 0:
        notes.append(f"the budget is more than the {hardware.device.memory_bytes.value:,.0f} bytes of {hardware.name}")
    notes += [note for note in chosen.info.notes if note not in notes]
    provenance = Provenance(
        model=shape.name,
        trace_digest=trace.digest,
        hardware=hardware.name,
        hardware_digest=hardware.digest,
        predicted_tpot_ms=chosen.metrics.tpot_ms,
        predicted_hit_rate=chosen.metrics.decode_hit_rate,
        family=strategy_family(config, shape),
        error_band=chosen.info.error_band,
        candidates=len(candidates),
        objective=goal.objective,
        gamma=gamma,
        acceptance_ratio=options.acceptance_ratio if gamma else None,
        draft_bytes=options.draft_bytes if gamma else 0,
        expected_kl_nats=kl_nats,
        versions=software_versions("simpy", "pulp", "highspy", "optuna"),
        routing=routing_reference(trace),
    )
    return TuneResult(
        config=config.model_copy(update={"provenance": provenance}),
        candidates=tuple(candidates),
        chosen=chosen,
        baseline=finalists.baseline,
        runner_up=finalists.runner_up,
        regret_ms=chosen.metrics.tpot_ms - chosen.info.bounds["max_ms"],
        split=split,
        front=pareto_front(candidates, goal, config),
        objective=goal.objective,
        trials=options.trials,
        notes=tuple(notes),
    )


def _best(finalists: Finalists, trace: Trace) -> tuple[Run, OffloadConfig, int | None, float]:
    """Run, configuration, drafts per pass and estimated divergence of the finalist that does best on held-out tokens,
    the winner of the training part where others are no better; notes say when it is another."""
    winner = finalists.ranked[0][1]

    def held_out_score(run: Run) -> float:
        return finalists.goal.score(figures_of(run, trace.shape))

    candidate, run = min(finalists.ranked, key=lambda item: held_out_score(item[1]))
    if candidate is not finalists.ranked[0][0]:
        finalists.notes.append(
            f"the winner on the training part ({winner.info.label}) does worse than the grid's best on held-out "
            f"tokens, {winner.metrics.tpot_ms:.3f} ms per token, so the grid's best was chosen"
        )
    if held_out_score(finalists.baseline) >= held_out_score(run):
        return run, candidate.config, candidate.gamma, candidate.kl_nats
    loss_ms = run.metrics.tpot_ms - finalists.baseline.metrics.tpot_ms
    finalists.notes.append(
        f"the winner on the training part ({run.info.label}) is {loss_ms:.3f} ms per token slower than plain LRU on "
        "held-out tokens, so plain LRU with an even split was chosen"
    )
    gamma = finalists.ranked[-1][0].gamma
    return finalists.baseline, OffloadConfig.model_validate(finalists.baseline.info.config), gamma, 0.0
