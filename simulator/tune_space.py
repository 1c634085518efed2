"""What the search may choose beyond the grid, and the configuration that a choice stands for.

Choices are a flat dictionary by dotted names. Slots per layer are not among them: the integer program sets them for the
budget that a choice leaves to the layers on the device. A mode per layer is two numbers, so that the space does not
grow with the model: so many layers commit, those that cost the least quality; of the others so many verify, those
whose predictions are right most often; the rest hint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulator.hot_experts import with_hot_experts
from simulator.policies.capacity import even_slots
from simulator.policies.config import CacheConfig, DeviceConfig, Mode, OffloadConfig, parse_config
from simulator.policies.placement import PLACEMENT_POLICIES
from simulator.policies.prefetch import make_prefetch_policy
from simulator.policies.utility import BOUNDARY_RULES, UTILITY_SIGNALS
from simulator.tune_cpu import threads_text
from simulator.tune_quality import CommitCost
from trace_capture.expert_counts import ExpertCounts
from trace_capture.statistics import predictor_recall
from trace_capture.trace import Trace

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

Choices = dict[str, Any]
IlpSlots = Callable[[int, int], tuple[int, ...]]
"""Slots per layer for a budget in bytes when so many layers, from the first on, are on the CPU."""
EIGHTHS = 8
_MOST_ADMISSIONS = 8
_MOST_CPU_TOKENS = 8
_MICRO_BATCHES = (0, 16, 64, 256, 1024)
"""Tokens per prefill pass; 0: a prompt is one pass."""


@dataclass(frozen=True)
class Space:
    """Everything that may be chosen for one trace, machine and budget.

    Attributes:
        train: what recall is counted on.
        profile: what hot experts are counted on.
        policies, splits, sources: names; a split is `even`, `ILP` or `pool`.
        budget_bytes: device memory for experts.
        device: goes into every configuration as it is.
        ilp_slots: the integer program.
        cpu_threads: numbers of threads that may run experts on the CPU; empty where it may run none.
        with_prefill: whether the way to read prompts matters.
        with_budget: whether less than the budget may be taken.
        gammas: drafts per verify pass to choose from; (None,) for passes as captured.
        commit: costs by prefetch source; without one for a source nothing commits.
        quality_nats: budget of divergence for layers that commit.
    """

    train: Trace
    profile: Trace | ExpertCounts
    policies: tuple[str, ...]
    splits: tuple[str, ...]
    sources: tuple[str, ...]
    budget_bytes: int
    device: DeviceConfig
    ilp_slots: IlpSlots
    cpu_threads: tuple[int, ...] = ()
    with_prefill: bool = False
    with_budget: bool = False
    gammas: tuple[int | None, ...] = (None,)
    commit: Mapping[str, CommitCost] = field(default_factory=dict)
    quality_nats: float = 0.0

    def choose(self, trial: BaseTrial) -> Choices:
        """Let a trial choose; gives everything that it chose or that there was no choice about."""
        pick = _Picker(trial)
        policy = pick.one_of("cache.policy", self.policies)
        pick.one_of("split", self.splits)
        pick.one_of("gamma", self.gammas)
        if self.with_budget:
            pick.number("budget.eighths", self._fewest_eighths, EIGHTHS)
        self._choose_prefetch(pick, pick.one_of("prefetch.source", self.sources))
        if self.cpu_threads:
            placement = pick.one_of("cpu.policy", tuple(PLACEMENT_POLICIES))
            layers = pick.number("cpu.layers", 0, self.train.shape.num_moe_layers)
            if (placement != "none" or layers) and len(self.cpu_threads) > 1:
                pick.one_of("cpu.threads", self.cpu_threads)
            if placement != "none":
                pick.number("cpu.admissions", 0, _MOST_ADMISSIONS)
            if placement == "threshold":
                pick.number("cpu.max_tokens", 1, _MOST_CPU_TOKENS)
        if policy == "utility":
            pick.one_of("utility.signal", tuple(UTILITY_SIGNALS))
            pick.one_of("utility.boundaries", tuple(BOUNDARY_RULES))
            pick.number("utility.up", 0, self._most_drafts + 1)
            pick.number("utility.down", 0, self._most_drafts + 1)
        if self.with_prefill:
            pick.one_of("prefill.strategy", ("on-demand", "stream"))
            pick.one_of("prefill.micro_batch", _MICRO_BATCHES)
        return pick.choices

    def config_of(self, choices: Choices) -> OffloadConfig:
        """The configuration of choices; what they do not name is as in the grid.

        Raises:
            ConfigError: they do not fit the model or the budget.
        """
        budget_bytes = self.budget_bytes * choices.get("budget.eighths", EIGHTHS) // EIGHTHS
        cpu_layers = choices.get("cpu.layers", 0)
        source = choices["prefetch.source"]
        gamma = self.gamma_of(choices)
        raw: dict[str, Any] = {
            "label": _label(choices),
            "cache": self._cache(choices, budget_bytes, cpu_layers),
            "prefetch": {"source": source, "max_experts": choices.get("prefetch.max_experts") or None},
            "cpu": {
                "policy": choices.get("cpu.policy", "none"),
                "layers": cpu_layers or (),
                "admissions": choices.get("cpu.admissions", 2),
                "max_tokens": choices.get("cpu.max_tokens", 1),
                "threads": choices.get("cpu.threads"),
            },
            "prefill": {
                "strategy": choices.get("prefill.strategy", "on-demand"),
                "micro_batch": choices.get("prefill.micro_batch") or None,
            },
            "device": self.device.model_dump(),
        }
        if choices["cache.policy"] == "utility":
            names = ("signal", "boundaries", "up", "down")
            raw["utility"] = {name: choices.get(f"utility.{name}") for name in names if choices.get(f"utility.{name}")}
        if gamma is not None:
            raw.setdefault("utility", {})["gamma"] = gamma
        if make_prefetch_policy(source).prediction is not None:
            raw["prefetch"]["mode"] = self._modes(choices)
        return with_hot_experts(parse_config(raw, "candidate"), self.profile, self.train.shape)

    def committed(self, choices: Choices) -> list[int]:
        """Layers that commit."""
        source = choices["prefetch.source"]
        if source not in self.commit:
            return []
        return self.commit[source].order[: choices.get(f"prefetch.commit_layers.{source}", 0)]

    def kl_nats(self, choices: Choices) -> float:
        """Estimated divergence of the layers that commit; 0 where none does."""
        layers = self.committed(choices)
        return self.commit[choices["prefetch.source"]].cost_nats(layers) if layers else 0.0

    def gamma_of(self, choices: Choices) -> int | None:
        """Drafts per verify pass that policies are told."""
        draft = self.train.info.draft
        captured = draft.gamma if draft is not None else None
        chosen = choices.get("gamma")
        return captured if chosen is None else int(chosen)

    def _choose_prefetch(self, pick: _Picker, source: str) -> None:
        if source == "none":
            return
        shape = self.train.shape
        pick.number("prefetch.max_experts", 0, min(2 * shape.top_k, shape.num_experts))
        if make_prefetch_policy(source).prediction is None:
            return
        pick.number("prefetch.verify_layers", 0, shape.num_moe_layers - 1)
        if source in self.commit:
            most = self.commit[source].most_layers(self.quality_nats)
            pick.number(f"prefetch.commit_layers.{source}", 0, most)

    def _cache(self, choices: Choices, budget_bytes: int, cpu_layers: int) -> dict[str, Any]:
        policy, split = choices["cache.policy"], choices["split"]
        if split == "pool":
            return CacheConfig(policy=policy, scope="global", budget_bytes=budget_bytes).model_dump(exclude_none=True)
        on_cpu = frozenset(range(cpu_layers))
        even = tuple(even_slots(budget_bytes, self.train.shape, on_cpu))
        slots = even if split == "even" else self.ilp_slots(budget_bytes, cpu_layers)
        return {"policy": policy, "slots_per_layer": slots}

    def _modes(self, choices: Choices) -> Mode | tuple[Mode, ...]:
        layers = self.train.shape.num_moe_layers
        modes: list[Mode] = ["hint"] * layers
        commit = self.committed(choices)
        for layer in commit:
            modes[layer] = "commit"
        others = [layer for layer in self._by_recall(choices["prefetch.source"]) if layer not in commit]
        for layer in others[: choices.get("prefetch.verify_layers", 0)]:
            modes[layer] = "verify"
        return "hint" if set(modes) == {"hint"} else tuple(modes)

    def _by_recall(self, source: str) -> Sequence[int]:
        """Layers with predictions, those first that are right most often."""
        recall = predictor_recall(self.train)[source]
        known = [layer for layer, value in enumerate(recall.tolist()) if not math.isnan(value)]
        return sorted(known, key=lambda layer: (-recall[layer], layer))

    @property
    def _fewest_eighths(self) -> int:
        """The smallest part of the budget that holds every layer's top-k."""
        need_bytes = self.train.shape.top_k * sum(self.train.shape.expert_bytes)
        return min(EIGHTHS, max(1, -(-need_bytes * EIGHTHS // self.budget_bytes)))

    @property
    def _most_drafts(self) -> int:
        return max([gamma or 0 for gamma in self.gammas] + [self.gamma_of({}) or 0])


class _Picker:
    """Asks a trial for a value where there is more than one; notes the answer either way."""

    def __init__(self, trial: BaseTrial) -> None:
        self._trial = trial
        self.choices: Choices = {}

    def one_of(self, name: str, values: Sequence[Any]) -> Any:
        """One of these."""
        self.choices[name] = self._trial.suggest_categorical(name, values) if len(values) > 1 else values[0]
        return self.choices[name]

    def number(self, name: str, low: int, high: int) -> int:
        """A whole number from `low` to `high`."""
        self.choices[name] = self._trial.suggest_int(name, low, high) if high > low else low
        return int(self.choices[name])


def _label(choices: Choices) -> str:
    """What the configuration is called: its choices where they are not the usual ones."""
    split, source = choices["split"], choices["prefetch.source"]
    parts = [choices["cache.policy"], "one pool" if split == "pool" else f"{split} split"]
    if source != "none":
        most = choices.get("prefetch.max_experts", 0)
        parts.append(f"prefetch {source}" + (f" of up to {most}" if most else ""))
    for name in ("verify", "commit"):
        found = (value for key, value in choices.items() if key.startswith(f"prefetch.{name}_layers"))
        parts += [f"{value} layers {name}" for value in found if value]
    if choices.get("cpu.layers"):
        parts.append(f"{choices['cpu.layers']} layers on the CPU")
    if choices.get("cpu.policy", "none") != "none":
        most = f" of up to {choices['cpu.max_tokens']} tokens" if choices["cpu.policy"] == "threshold" else ""
        parts.append(f"misses{most} on the CPU (admitting {choices['cpu.admissions']})")
    if choices["cache.policy"] == "utility" and "utility.signal" in choices:
        parts.append(f"{choices['utility.signal']} signal, {choices['utility.boundaries']} boundaries")
    if choices.get("prefill.strategy") == "stream":
        parts.append("streamed prefill")
    if choices.get("prefill.micro_batch"):
        parts.append(f"prompts by {choices['prefill.micro_batch']} tokens")
    if choices.get("gamma"):
        parts.append(f"{choices['gamma']} draft{'s' * (choices['gamma'] > 1)}")
    if choices.get("budget.eighths", EIGHTHS) != EIGHTHS:
        parts.append(f"{choices['budget.eighths']} eighths of the budget")
    return ", ".join(parts) + threads_text(choices.get("cpu.threads"))
