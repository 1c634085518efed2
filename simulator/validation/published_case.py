"""A published row with its machine, its model and the costs of both, ready for its terms to be added up."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from simulator.cost_model import CostModel
from simulator.validation.published_engines import EngineTraits, engine_traits
from simulator.validation.published_machine import COPIES_PER_EXPERT, Machine, find_machine
from simulator.validation.published_models import ModelCounts, find_counts, precision_of, sized_shape
from simulator.validation.published_rows import PublishedRow, first_number
from trace_capture.model_shape import ModelShape

HIT_ODDS = 14.0
"""Odds of a hit over the odds of a random expert being held, under replacement by recency. Held share -> hit rate, both
in %, in published replays and counters: 9.4 -> 58.9, 12.5 -> 64.1 and 67, 15.6 -> 68.1, 19 -> 74.1 to 88.7, 25 -> 67
and 81, 38 -> 89.4, 63 -> 96.2 (DeepSeek-V4-Flash, Qwen3.8-Flash-Next, Qwen3-30B): odds of 6 to 34, most of 12 to 15."""
STATIC_ODDS = 2.0
"""The same for experts held by popularity: the load is nearly even, the hottest is 2.5 times the mean."""
DEFAULT_CONTEXT = 512
FREE_BYTES = 0.8e9
"""Per card: buffers of the runtime and of activations."""
USABLE_MEMORY_RATIO = 0.94
RESERVED_CONTEXT = 16_000
UNSTATED_HELD_RATIO = 0.5
"""Largest share that a cache of unknown size is taken to hold: more, and nobody would call it offloading."""


@dataclass
class Case:
    """All that is known of a row, while its terms are added up."""

    row: PublishedRow
    traits: EngineTraits
    machine: Machine
    shape: ModelShape
    counts: ModelCounts
    costs: CostModel
    precision_given: bool
    assumed: list[str] = field(default_factory=list)
    """What the row does not say."""

    @property
    def layers(self) -> int:
        """Layers with experts."""
        return self.shape.num_moe_layers

    @property
    def offloaded_layers(self) -> float | None:
        """Layers whose experts are not on the card for good, as the row says; never more than there are."""
        stated = self.row.offloaded_layers
        return None if stated is None else min(stated, float(self.layers))

    @property
    def context(self) -> int:
        """Tokens in the cache, a short chat's where the row does not say."""
        return self.row.context_tokens or DEFAULT_CONTEXT

    @property
    def ranks(self) -> int:
        """Cards that share every matrix; layers split over cards run one after the other."""
        shared = re.search(r"\b(tp|ep)[ =]?\d|tensor.parallel", self.row.text)
        return self.machine.devices if shared else 1


def find_case(row: PublishedRow) -> Case | str:
    """Machine, model and costs of a row, or what is missing."""
    counts = find_counts(row.model)
    if counts is None:
        return f"no shape of model '{row.model}'"
    traits = engine_traits(row.engine)
    machine = find_machine(row, traits)
    if machine is None:
        return f"no data sheet of card '{row.gpu}'" if row.gpu else "card not named"
    precision = precision_of(row, counts, gguf=traits.reads_gguf, native=traits.family in ("transformers", "vllm"))
    shape = sized_shape(counts, precision, _forced_top_k(row, counts))
    case = Case(row, traits, machine, shape, counts, CostModel(machine.profile, shape), precision.given)
    case.assumed.extend(machine.assumed)
    if not precision.given:
        case.assumed.append("precision")
    return case


def expected_hit_rate(held_ratio: float, odds: float = HIT_ODDS) -> float:
    """Hit rate of a cache that holds a share of a layer's experts: odds(hit) = `odds` x odds(held)."""
    return odds * held_ratio / (1 + (odds - 1) * held_ratio)


def memory_for_experts(case: Case) -> float:
    """Bytes of device memory left for experts. A stated use is taken as it is, else what a card can give."""
    shape, used_mb = case.shape, first_number(r"vram (\d+) mi?b", case.row.text)
    total = case.machine.device_memory_bytes * USABLE_MEMORY_RATIO if used_mb is None else used_mb * 2**20
    context = max(case.context, RESERVED_CONTEXT)
    dense = sum(shape.dense_bytes) + shape.head_bytes + shape.kv_bytes_per_token * context
    return max(0.0, total - dense - FREE_BYTES * case.machine.devices)


def is_whole_layer_split(row: PublishedRow) -> bool:
    """Whether decoder layers are split with all they hold, instead of experts apart from the rest."""
    words = ("whole-layer", "no expert split", "naive", "old tensor")
    return row.engine.lower() == "ollama" or any(word in row.setting.lower() for word in words)


def whole_layer_share(case: Case) -> float:
    """Share of decoder layers that fit on the card whole."""
    whole = case.shape.total_expert_bytes + sum(case.shape.dense_bytes)
    return min(1.0, max(0.0, 0.9 * case.machine.device_memory_bytes - FREE_BYTES) / whole)


def hit_rate(case: Case) -> float:
    """The row's own, else what the share of experts that is held lets expect."""
    row = case.row
    if row.hit_rate is not None:
        return row.hit_rate
    held = held_ratio(case)
    if case.traits.family == "ktransformers" and not re.search("dynamic (placement|update|expert)", row.text):
        return expected_hit_rate(held, STATIC_ODDS if "frequency" in row.text else 1.0)
    return expected_hit_rate(held)


def held_ratio(case: Case) -> float:
    """Share of a layer's experts that a cache holds: by its slots, else as much as device memory has room for."""
    row, shape, slots = case.row, case.shape, case.row.cache_slots
    if row.strategy == "on_demand" or (row.strategy == "prefetch" and slots is None and not case.traits.caches):
        return 0.0
    if slots is not None:
        unit = row.cache_slots_unit.lower()
        if unit.startswith(("gib", "gb")):
            return min(1.0, slots * 2**30 / shape.total_expert_bytes)
        if unit.startswith("cells"):
            slots /= COPIES_PER_EXPERT
        elif unit.startswith("total") or slots > shape.num_experts:
            slots /= case.layers
        return min(1.0, slots / shape.num_experts)
    ratio = stated_ratio(row)
    if ratio is not None:
        return min(1.0, ratio)
    case.assumed.append("cache size")
    return min(memory_for_experts(case) / shape.total_expert_bytes, UNSTATED_HELD_RATIO)


def stated_ratio(row: PublishedRow) -> float | None:
    """Share of all experts that the setting says is held."""
    percent = first_number(r"(\d+(?:\.\d+)?) ?% (?:cache ratio|of experts on gpu)", row.setting.lower())
    return None if percent is None else percent / 100


def _forced_top_k(row: PublishedRow, counts: ModelCounts) -> int | None:
    forced = first_number(r"(\d+) experts per token|top_k forced to (\d+)|expert_used_count=int:(\d+)", row.setting)
    return None if not forced else min(int(forced), counts.experts)
