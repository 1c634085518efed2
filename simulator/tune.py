"""The tuner: replay candidates on one part of a trace, confirm the winner on the other, and say what it promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from simulator.cost_model import CostModel
from simulator.hot_experts import with_hot_experts
from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.capacity import even_slots, plan_capacity
from simulator.policies.config import CacheConfig, DeviceConfig, OffloadConfig, PrefetchConfig, Provenance
from simulator.policies.prefetch import PREFETCH_POLICIES, make_prefetch_policy
from simulator.replay import simulate
from simulator.slot_split import SlotSplit, split_slots
from simulator.tune_cpu import num_with_cpu_misses, with_cpu_layers, with_cpu_misses
from simulator.validation.families import strategy_family
from trace_capture.errors import TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Run
from trace_capture.statistics import GENERATING, lru_hit_curve
from trace_capture.trace import Phase, Trace
from trace_capture.versions import software_versions

Scope = Literal["layer", "global"]
Progress = Callable[[int, int], None]

NOT_WORTH_TRYING = ("none", "random", "belady")
"""Registered cache policies that are baselines or bounds and not candidates."""


@dataclass(frozen=True)
class Candidate:
    """One configuration and how it did on the training part.

    Attributes:
        config: what was simulated.
        split: `even`, `ILP` or `pool`.
        train_tpot_ms: time per output token.
        train_hit_rate: over decode passes.
    """

    config: OffloadConfig
    split: str
    train_tpot_ms: float
    train_hit_rate: float


@dataclass(frozen=True)
class TuneResult:
    """What tuning found.

    Attributes:
        config: the configuration to use, with its provenance and the TPOT predicted on held-out tokens.
        candidates: all that were simulated, the fastest on the training part first.
        chosen: `config` on the held-out part, with spans.
        baseline: plain LRU with evenly split slots and no prefetch, same budget, on the held-out part.
        runner_up: the second of `candidates` on the held-out part; None when there was one candidate.
        regret_ms: held-out TPOT over the larger of compute and of the copies that a perfect eviction still needs;
            no policy could save more.
        split: the integer program's answer.
        notes: what a reader should know, a sentence each.
    """

    config: OffloadConfig
    candidates: tuple[Candidate, ...]
    chosen: Run
    baseline: Run
    runner_up: Run | None
    regret_ms: float
    split: SlotSplit
    notes: tuple[str, ...]


def tune(
    trace: Trace,
    hardware: HardwareProfile,
    *,
    budget_bytes: int,
    device: DeviceConfig = DeviceConfig(),  # noqa: B008
    scopes: Sequence[Scope] = ("layer",),
    progress: Progress | None = None,
    profile: Trace | ExpertCounts | None = None,
) -> TuneResult:
    """Find the fastest configuration for a trace, a machine and a budget of device memory.

    Candidates are every split of the budget (even, integer program, one pool) with every cache policy and every
    prefetch source the trace has predictions for. Where the machine's profile knows what experts cost on the CPU, the
    best of them are tried again with misses on the CPU, and so are whole layers there with the budget for the others.
    All are ranked on the training part; the winner must then beat plain LRU on the held-out part, or plain LRU is the
    answer.

    Args:
        trace: routing of the workload to tune for. Its last third of sequences is held out; of a single sequence,
            the last third of its decode passes, replayed after its prefill. Each part starts with an empty cache.
        hardware: the machine.
        budget_bytes: device memory for experts.
        device: goes into the configuration as it is.
        scopes: `layer` for slots of each layer's own; add `global` to try one pool for all, which the live engine
            supports at the price of gathering weights at every call.
        progress: called with (simulations done, all simulations).
        profile: a trace or counts that tell which experts are popular; by default the training part does.

    Returns:
        The same for the same inputs.

    Raises:
        ConfigError: the budget does not hold every layer's top-k.
        TraceError: there are too few decode passes to hold some out.
        ProfileError: the profile lacks a rate that is needed.
    """
    train, held_out = split_trace(trace)
    costs = CostModel(hardware, trace.shape)
    copy_ns = [costs.copy_ns(size) for size in trace.shape.expert_bytes]
    split = split_slots(lru_hit_curve(train, GENERATING), copy_ns, trace.shape, budget_bytes)
    planned = _plan(train, _caches(trace, budget_bytes, split, scopes), device, profile or train)
    even = CacheConfig(slots_per_layer=tuple(even_slots(budget_bytes, trace.shape)))
    plain = OffloadConfig(label="plain LRU, even split", cache=even, device=device)
    has_cpu = costs.is_measured or hardware.host is not None
    on_cpu = with_cpu_layers(trace, budget_bytes, device) if has_cpu else []
    report = _Steps(len(planned) + len(on_cpu) + has_cpu * num_with_cpu_misses(len(planned)) + 3, progress)
    candidates = [_replay(train, hardware, name, config, report) for name, config in planned]
    if has_cpu:
        best = sorted(candidates, key=_by_speed)
        on_cpu += with_cpu_misses([(candidate.split, candidate.config) for candidate in best])
        candidates += [_replay(train, hardware, name, config, report) for name, config in on_cpu]
    candidates.sort(key=_by_speed)
    runs = [_confirm(held_out, hardware, config, report) for config in [plain, *(c.config for c in candidates[:2])]]
    return _verdict(trace, hardware, candidates, runs, split)


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


def _by_speed(candidate: Candidate) -> float:
    return candidate.train_tpot_ms


class _Steps:
    """Counts simulations for the progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def step(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def _caches(
    trace: Trace, budget_bytes: int, split: SlotSplit, scopes: Sequence[Scope]
) -> list[tuple[str, CacheConfig]]:
    fits = budget_bytes >= trace.shape.total_expert_bytes
    policies = [name for name in CACHE_POLICIES if name not in NOT_WORTH_TRYING and (fits or name != "resident")]
    policies = [name for name in policies if trace.info.draft or not CACHE_POLICIES[name].needs_utility]
    result: list[tuple[str, CacheConfig]] = []
    if "layer" in scopes:
        even = tuple(even_slots(budget_bytes, trace.shape))
        splits = {"even": even} if even == split.slots else {"even": even, "ILP": split.slots}
        result += [
            (name, CacheConfig(policy=policy, slots_per_layer=slots))
            for name, slots in splits.items()
            for policy in policies
        ]
    if "global" in scopes:
        result += [
            ("pool", CacheConfig(policy=policy, scope="global", budget_bytes=budget_bytes)) for policy in policies
        ]
    return result


def _plan(
    train: Trace, caches: Sequence[tuple[str, CacheConfig]], device: DeviceConfig, profile: Trace | ExpertCounts
) -> list[tuple[str, OffloadConfig]]:
    """Every cache with every prefetch source, named by its split; what is hot is counted on the profile."""
    result = []
    for name, cache in caches:
        for source in _sources(train):
            if (cache.policy, source.source) == ("static", "popularity"):
                continue  # what is popular is there already
            config = OffloadConfig(label=_label(name, cache, source), cache=cache, prefetch=source, device=device)
            result.append((name, with_hot_experts(config, profile, train.shape)))
    return result


def _sources(trace: Trace) -> list[PrefetchConfig]:
    """Prefetch sources that need no predictions, or whose predictions the trace has."""
    policies = {name: make_prefetch_policy(name) for name in PREFETCH_POLICIES}
    return [
        PrefetchConfig(source=name)
        for name, policy in policies.items()
        if not policy.needs_future and (policy.prediction is None or policy.prediction in trace.predicted)
    ]


def _label(split: str, cache: CacheConfig, prefetch: PrefetchConfig) -> str:
    ahead = "" if prefetch.source == "none" else f", prefetch {prefetch.source}"
    where = "one pool" if split == "pool" else f"{split} split"
    return f"{cache.policy}, {where}{ahead}"


def _replay(train: Trace, hardware: HardwareProfile, split: str, config: OffloadConfig, report: _Steps) -> Candidate:
    metrics = simulate(train, hardware, config, bounds=False).metrics
    report.step()
    return Candidate(config, split, metrics.tpot_ms, metrics.decode_hit_rate)


def _confirm(held_out: Trace, hardware: HardwareProfile, config: OffloadConfig, report: _Steps) -> Run:
    run = simulate(held_out, hardware, config, record_spans=True)
    report.step()
    return run


def _verdict(
    trace: Trace, hardware: HardwareProfile, candidates: list[Candidate], runs: list[Run], split: SlotSplit
) -> TuneResult:
    baseline, winner = runs[:2]
    runner_up = runs[2] if len(runs) > 2 else None
    notes = []
    chosen, config = winner, candidates[0].config
    gain_ms = baseline.metrics.tpot_ms - winner.metrics.tpot_ms
    if gain_ms < 0:
        chosen, config = baseline, OffloadConfig.model_validate(baseline.info.config)
        notes.append(
            f"the winner on the training part ({winner.info.label}) is {-gain_ms:.3f} ms per token slower than plain "
            "LRU on held-out tokens, so plain LRU with an even split was chosen"
        )
    if not split.is_proven:
        notes.append(f"the slot split was stopped by its time limit, up to {split.gap_ms:.3f} ms off the best")
    cpu_layers = config.cpu.whole_layers(trace.shape.num_moe_layers)
    if plan_capacity(config.cache, trace.shape, cpu_layers).total_bytes > hardware.device.memory_bytes.value > 0:
        notes.append(f"the budget is more than the {hardware.device.memory_bytes.value:,.0f} bytes of {hardware.name}")
    notes += [note for note in chosen.info.notes if note not in notes]
    provenance = Provenance(
        model=trace.shape.name,
        trace_digest=trace.digest,
        hardware=hardware.name,
        hardware_digest=hardware.digest,
        predicted_tpot_ms=chosen.metrics.tpot_ms,
        predicted_hit_rate=chosen.metrics.decode_hit_rate,
        family=strategy_family(config, trace.shape),
        error_band=chosen.info.error_band,
        candidates=len(candidates),
        versions=software_versions("simpy", "pulp", "highspy"),
    )
    return TuneResult(
        config=config.model_copy(update={"provenance": provenance}),
        candidates=tuple(candidates),
        chosen=chosen,
        baseline=baseline,
        runner_up=runner_up,
        regret_ms=chosen.metrics.tpot_ms - chosen.info.bounds["max_ms"],
        split=split,
        notes=tuple(notes),
    )
