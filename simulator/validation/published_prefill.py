"""Predicted prefill rate of a published operating point, for ranking settings.

A prompt passes in micro-batches. In each, nearly all experts of a layer are asked for, so those that are not on the
card cross the link once per micro-batch (or are worked through on the CPU by engines that do so), and the card computes
on all tokens. Without staging copies and compute follow one another; prefetching engines do both at once.

Prefill is ranked, not held to an error: sources seldom give prompt and micro-batch together.
"""

from __future__ import annotations

import math

from simulator.validation.published_case import (
    Case,
    find_case,
    held_ratio,
    is_whole_layer_split,
    memory_for_experts,
    stated_ratio,
    whole_layer_share,
)
from simulator.validation.published_rows import PublishedRow, first_number
from simulator.validation.published_scope import out_of_scope

COMPUTE_RATIO = 0.4
"""Share of a card's dense throughput that kernels over quantised experts reach."""
MICRO_BATCH_GGUF, MICRO_BATCH = 512, 8192
SHORT_PROMPT, LONG_PROMPT, DEFAULT_PROMPT = 128, 2048, 512
_RESERVED_PER_TOKEN = 60e3
"""Bytes of device memory that one token of a micro-batch needs for activations and staging."""
_SPILL_BYTES_PER_S = 4e9
"""Device memory beyond what the card has, read over the link by the driver."""


def predict_prefill_per_s(row: PublishedRow) -> float | None:
    """Tokens per second of the prompt, with the engine as fast as the terms allow; None for rows that have no measured
    prefill rate, are out of scope or lack a part."""
    if row.prefill_per_s is None or out_of_scope(row) is not None:
        return None
    case = find_case(row)
    if isinstance(case, str):
        return None
    batch = _micro_batch(case)
    prompt = _prompt_tokens(row)
    passes, tokens = math.ceil(prompt / batch), min(prompt, batch)
    away = _away_layers(case)
    copy_ns, compute_ns = _away_ns(case, away, tokens), _device_ns(case, away, tokens)
    both = max(copy_ns, compute_ns) if row.strategy == "prefetch" else copy_ns + compute_ns
    return 1e9 * prompt / (passes * (both + _spill_ns(case, away, tokens)))


def _prompt_tokens(row: PublishedRow) -> int:
    """As stated; where it is not, at least one micro-batch of a stated size, which nobody sets for shorter prompts."""
    if row.context_tokens:
        return row.context_tokens
    setting = row.setting.lower()
    usual = SHORT_PROMPT if "short" in setting else LONG_PROMPT if "long" in setting else DEFAULT_PROMPT
    return max(usual, int(_stated_batch(row) or 0))


def _micro_batch(case: Case) -> int:
    return int(_stated_batch(case.row) or (MICRO_BATCH_GGUF if case.traits.reads_gguf else MICRO_BATCH))


def _stated_batch(row: PublishedRow) -> float | None:
    return first_number(r"ubatch (\d+)|-ub (\d+)|chunk (\d+)", row.text)


def _away_layers(case: Case) -> float:
    """Layers' worth of experts that are not on the card."""
    row, layers = case.row, float(case.layers)
    if row.strategy == "all_resident":
        return 0.0
    if row.strategy in ("cpu_only", "cpu_experts", "on_demand"):
        return layers if case.offloaded_layers is None else case.offloaded_layers
    if row.strategy in ("layer_split", "speculative") and row.cache_slots is None:
        if is_whole_layer_split(row):
            return layers * (1 - whole_layer_share(case))
        if case.offloaded_layers is not None:
            return case.offloaded_layers
        ratio = stated_ratio(row)
        held = ratio if ratio is not None else memory_for_experts(case) / case.shape.total_expert_bytes
        return layers * max(0.0, 1 - held)
    return (layers if case.offloaded_layers is None else case.offloaded_layers) * (1 - held_ratio(case))


def _touched(case: Case, tokens: int) -> int:
    """Experts of a layer that `tokens` tokens ask for, if they chose evenly."""
    experts, share = case.shape.num_experts, case.shape.top_k / case.shape.num_experts
    return max(1, min(experts, round(experts * (1 - (1 - share) ** tokens))))


def _away_ns(case: Case, away: float, tokens: int) -> float:
    """Experts of `away` layers: over the link, or on the CPU."""
    touched, compute = _touched(case, tokens), case.costs.compute
    on_cpu = compute.cpu_experts_ns(0, tokens, touched, touched)
    if case.row.strategy == "cpu_only" or case.traits.prefills_on_cpu:
        slow = 2 if "no repack" in case.row.text else 1
        return away * on_cpu * slow
    return away * case.costs.copy_ns(touched * case.shape.expert_bytes[0])


def _device_ns(case: Case, away: float, tokens: int) -> float:
    """Everything that runs on the card, or on the CPU where there is none."""
    touched, compute, shape = _touched(case, tokens), case.costs.compute, case.shape
    if case.row.strategy == "cpu_only":
        per_expert = compute.cpu_experts_ns(0, tokens, 1, 1)
        return per_expert * (sum(shape.dense_bytes) + shape.head_bytes) / shape.expert_bytes[0]
    here = case.layers if not case.traits.prefills_on_cpu else case.layers - away
    work = case.layers * compute.dense_ns(0, tokens, case.context) + here * compute.experts_ns(
        0, tokens, touched, touched
    )
    return (work / COMPUTE_RATIO + compute.overhead_ns(1)) / case.ranks


def _spill_ns(case: Case, away: float, tokens: int) -> float:
    """What a stated placement and a micro-batch need beyond the card's memory is read over the link in every pass."""
    shape = case.shape
    if case.offloaded_layers is None and case.row.cache_slots is None:
        return 0.0
    experts = (case.layers - away) * shape.num_experts * shape.expert_bytes[0]
    needed = experts + _RESERVED_PER_TOKEN * tokens * math.sqrt(shape.hidden_size or 2048) / 45
    return max(0.0, needed - memory_for_experts(case)) / _SPILL_BYTES_PER_S * 1e9
