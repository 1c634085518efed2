"""The nearest placement of engines that keep or give up all experts of a layer at once."""

from __future__ import annotations

from typing import NamedTuple

from simulator.exports.source import ExportSource
from simulator.policies.config import CacheConfig, CpuConfig, OffloadConfig
from simulator.validation.record import Family


class LayerSplit(NamedTuple):
    """Which MoE layers have all their experts on the device, and which none."""

    on_device: tuple[int, ...]
    """MoE layers [L]."""
    elsewhere: tuple[int, ...]
    is_exact: bool
    """Whether the configuration places experts that way itself."""


def split_layers(source: ExportSource, any_layer: bool = True) -> LayerSplit:
    """Whole layers that fit the configuration's budget: those first to which it gives the largest share of slots.

    Layers that the configuration runs on the CPU stay there. Among equal layers the last ones stay on the device, so
    that what leaves is a run from the first on, which all these engines have a short flag for.

    Args:
        source: what to place.
        any_layer: False for an engine that gives up layers from the first on, whichever they are.
    """
    shape, slots = source.shape, source.slots
    candidates = [layer for layer in range(shape.num_moe_layers) if layer not in source.cpu_layers]
    is_ranked = any_layer and slots is not None and not source.is_even
    candidates.sort(key=lambda layer: (-slots[layer] if is_ranked and slots else 0, -layer))
    left, kept = source.budget_bytes, []
    for layer in candidates:
        size = shape.num_experts * shape.expert_bytes[layer]
        if size <= left:
            kept.append(layer)
            left -= size
        elif not any_layer:
            break
    return LayerSplit(
        on_device=tuple(sorted(kept)),
        elsewhere=tuple(layer for layer in range(shape.num_moe_layers) if layer not in kept),
        is_exact=len(kept) == len(candidates) and source.config.prefetch.source == "none",
    )


def first_layers(source: ExportSource, layers: tuple[int, ...]) -> int | None:
    """How many decoder layers from the first on contain exactly these MoE layers; None where they are no such run.

    Dense layers in front count, as they do in llama.cpp's `--n-cpu-moe`.
    """
    if layers != tuple(range(len(layers))):
        return None
    return source.shape.moe_layer_ids[len(layers) - 1] + 1 if layers else 0


def cpu_split_config(source: ExportSource, split: LayerSplit) -> OffloadConfig:
    """A configuration that does what the target does: resident layers, and layers on the CPU altogether."""
    num_experts = source.shape.num_experts
    slots = tuple(num_experts if layer in split.on_device else 0 for layer in range(source.shape.num_moe_layers))
    return OffloadConfig(
        label="whole layers",
        cache=CacheConfig(policy="resident", slots_per_layer=slots),
        cpu=CpuConfig(layers=split.elsewhere, threads=source.config.cpu.used_threads),
        prefill=source.config.prefill.model_copy(update={"strategy": "on-demand"}),
        device=source.config.device,
    )


def split_family(split: LayerSplit) -> Family:
    """What published measurements call such a split."""
    if not split.elsewhere:
        return "all_resident"
    return "layer_split" if split.on_device else "cpu_experts"


def split_notes(source: ExportSource, split: LayerSplit) -> list[str]:
    """How many layers stay, in words."""
    total, kept = source.shape.num_moe_layers, len(split.on_device)
    size = sum(source.shape.num_experts * source.shape.expert_bytes[layer] for layer in split.on_device)
    notes = [
        f"all experts of {kept} of {total} MoE layers are on the device: {_size_text(size)} of the "
        f"{_size_text(source.budget_bytes)} that the configuration gives to experts"
    ]
    if not kept:
        notes.append("the budget holds no whole layer, so all experts leave the device")
    return notes


def _size_text(size: int) -> str:
    """In gibibytes, or mebibytes where that would be none."""
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"
