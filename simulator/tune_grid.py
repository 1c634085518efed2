"""The tuner's grid: every cache policy with every split and every prefetch source, and what a study calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from simulator.hot_experts import with_hot_experts
from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.capacity import even_slots
from simulator.policies.config import CacheConfig, DeviceConfig, OffloadConfig, PrefetchConfig
from simulator.policies.prefetch import PREFETCH_POLICIES, make_prefetch_policy
from simulator.policies.utility_config import UtilityConfig
from simulator.slot_split import SlotSplit
from simulator.tune_cpu import Named
from simulator.tune_space import EIGHTHS, Choices
from trace_capture.expert_counts import ExpertCounts
from trace_capture.trace import Trace

Scope = Literal["layer", "global"]

NOT_WORTH_TRYING = ("none", "random", "belady")
"""Registered cache policies that are baselines or bounds and not candidates."""


def grid(
    train: Trace,
    budget_bytes: int,
    split: SlotSplit,
    scopes: Sequence[Scope],
    device: DeviceConfig,
    profile: Trace | ExpertCounts,
) -> list[Named]:
    """Every cache with every prefetch source, named by its split; what is hot is counted on the profile."""
    draft = train.info.draft
    utility = UtilityConfig(gamma=draft.gamma) if draft is not None else UtilityConfig()
    policies = policies_for(train, budget_bytes, has_drafts=draft is not None)
    result = []
    for name, cache in _caches(train, budget_bytes, split, scopes, policies):
        for source in sources_for(train):
            if (cache.policy, source) == ("static", "popularity"):
                continue  # what is popular is there already
            prefetch = PrefetchConfig(source=source)
            label = _label(name, cache, prefetch)
            config = OffloadConfig(label=label, cache=cache, prefetch=prefetch, utility=utility, device=device)
            result.append((name, with_hot_experts(config, profile, train.shape)))
    return result


def policies_for(trace: Trace, budget_bytes: int, *, has_drafts: bool) -> tuple[str, ...]:
    """Registered cache policies that are worth trying with a budget, those by utility where passes verify drafts."""
    fits = budget_bytes >= trace.shape.total_expert_bytes
    policies = [name for name in CACHE_POLICIES if name not in NOT_WORTH_TRYING and (fits or name != "resident")]
    return tuple(name for name in policies if has_drafts or not CACHE_POLICIES[name].needs_utility)


def sources_for(trace: Trace) -> tuple[str, ...]:
    """Prefetch sources that need no predictions, or whose predictions the trace has."""
    policies = {name: make_prefetch_policy(name) for name in PREFETCH_POLICIES}
    return tuple(
        name
        for name, policy in policies.items()
        if not policy.needs_future and (policy.prediction is None or policy.prediction in trace.predicted)
    )


def splits_for(scopes: Sequence[Scope]) -> tuple[str, ...]:
    """How a budget may be split."""
    return (*(("even", "ILP") if "layer" in scopes else ()), *(("pool",) if "global" in scopes else ()))


def choices_of(split: str, config: OffloadConfig, gamma: int | None) -> Choices:
    """A configuration of the grid as a choice from a `simulator.tune_space.Space`."""
    source, cpu = config.prefetch.source, config.cpu
    return {
        "cache.policy": config.cache.policy,
        "split": split,
        "gamma": gamma,
        "budget.eighths": EIGHTHS,
        "prefetch.source": source,
        "prefetch.max_experts": 0,
        "prefetch.verify_layers": 0,
        f"prefetch.commit_layers.{source}": 0,
        "cpu.policy": cpu.policy,
        "cpu.layers": cpu.layers or 0,
        "cpu.threads": cpu.threads,
        "cpu.admissions": cpu.admissions,
        "cpu.max_tokens": cpu.max_tokens,
        "utility.signal": config.utility.signal,
        "utility.boundaries": config.utility.boundaries,
        "utility.up": 0,
        "utility.down": 0,
        "prefill.strategy": "on-demand",
        "prefill.micro_batch": 0,
    }


def _caches(
    trace: Trace, budget_bytes: int, split: SlotSplit, scopes: Sequence[Scope], policies: Sequence[str]
) -> list[tuple[str, CacheConfig]]:
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


def _label(split: str, cache: CacheConfig, prefetch: PrefetchConfig) -> str:
    ahead = "" if prefetch.source == "none" else f", prefetch {prefetch.source}"
    where = "one pool" if split == "pool" else f"{split} split"
    return f"{cache.policy}, {where}{ahead}"
