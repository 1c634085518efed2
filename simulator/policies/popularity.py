"""Experts by how often they are asked for: the lists of a configuration, and how they follow from counted load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulator.policies.eviction import Key
from trace_capture.errors import ConfigError

if TYPE_CHECKING:
    from trace_capture.model_shape import ModelShape

HotLists = tuple[tuple[int, ...], ...]
"""Expert ids of each MoE layer, hottest first [L][up to E]."""


def check_hot_experts(hot_experts: HotLists, shape: ModelShape) -> None:
    """Make sure that hot lists are those of a model.

    Raises:
        ConfigError: there are not as many lists as MoE layers, or an id is not one of the model's or is there twice.
    """
    if len(hot_experts) != shape.num_moe_layers:
        raise ConfigError(
            f"hot_experts has {len(hot_experts)} lists, {shape.name} has {shape.num_moe_layers} MoE layers; give one "
            "list for each"
        )
    for layer, ids in zip(shape.moe_layer_ids, hot_experts, strict=True):
        if len(set(ids)) < len(ids) or any(expert >= shape.num_experts for expert in ids):
            raise ConfigError(
                f"hot_experts of layer {layer} must be different numbers below {shape.num_experts}, which "
                f"{list(ids)} are not"
            )


def hot_keys(hot_experts: HotLists | None, shape: ModelShape) -> list[Key] | None:
    """The hot experts of all layers, every layer's hottest first, then every layer's second, and so on.

    Raises:
        ConfigError: see `check_hot_experts`.
    """
    if hot_experts is None:
        return None
    check_hot_experts(hot_experts, shape)
    ranked = [(rank, layer, expert) for layer, ids in enumerate(hot_experts) for rank, expert in enumerate(ids)]
    return [(layer, expert) for _, layer, expert in sorted(ranked)]


def hottest_per_layer(load: Sequence[Sequence[int]], counts: Sequence[int]) -> HotLists:
    """The experts of each layer with the highest load, hottest first; those never asked for are left out.

    Args:
        load: how often each expert was asked for [L, E].
        counts: at most so many per layer [L].
    """
    return tuple(tuple(_by_load(row)[: max(0, count)]) for row, count in zip(load, counts, strict=True))


def hottest_of_all(load: Sequence[Sequence[int]], budget_bytes: int, expert_bytes: Sequence[int]) -> HotLists:
    """The experts of all layers with the highest load per byte that fit a budget together.

    Args:
        load: how often each expert was asked for [L, E].
        budget_bytes: for all of them.
        expert_bytes: bytes of one expert per layer [L].
    """
    ranked = sorted(
        (-count / expert_bytes[layer], layer, expert)
        for layer, row in enumerate(load)
        for expert, count in enumerate(row)
        if count
    )
    chosen: list[list[int]] = [[] for _ in load]
    left = budget_bytes
    for _, layer, expert in ranked:
        if expert_bytes[layer] <= left:
            chosen[layer].append(expert)
            left -= expert_bytes[layer]
    return tuple(tuple(ids) for ids in chosen)


def _by_load(row: Sequence[int]) -> list[int]:
    return sorted((expert for expert, count in enumerate(row) if count), key=lambda expert: (-row[expert], expert))
