"""The device: attention by kind and context, router, shared experts, routed experts, head, launches."""

from __future__ import annotations

from collections.abc import Iterable

from simulator.costs.rates import positive, value_or
from trace_capture.hardware import HardwareProfile
from trace_capture.model_shape import AttentionKind, ModelShape

_Group = tuple[int, ...]


class DeviceCosts:
    """Times from a data sheet: the larger of bytes over memory rate and operations over throughput, plus launches.

    Two operations per weight and token. Attention reads the cache of its kind and the recurrent state, and multiplies
    every new token with what it attends to. One launch per decoder layer, one more for the MLP of a layer without
    experts and one more for linear attention, whose recurrence is a group of kernels of its own.

    Raises:
        ProfileError: a rate that is needed is zero.
    """

    def __init__(self, profile: HardwareProfile, shape: ModelShape) -> None:
        device = profile.device
        read_ratio = value_or(device.read_ratio, 1.0)
        self._bytes_per_s = read_ratio * positive(device.memory_bytes_per_s, "device.memory_bytes_per_s", profile)
        self._flops_per_s = positive(device.flops_per_s, "device.flops_per_s", profile)
        self.launch_ns = round(device.launch_ns.value)
        self._shape = shape
        self._expert_weight_bytes = shape.bytes_per_weight
        self._dense_weight_bytes = shape.dense_bytes_per_weight
        groups = [self._group_of(layer) for layer in range(shape.num_moe_layers)]
        self._example = {group: layer for layer, group in reversed(list(enumerate(groups)))}
        self._groups = groups
        self._at = (0, 0)
        self._memo: dict[_Group, int] = {}

    def dense_ns(self, layer: int, tokens: int, context: int) -> int:
        """One layer beside its routed experts: the sum of `dense_parts_ns`."""
        if self._at != (tokens, context):
            self._at = tokens, context
            self._memo.clear()
        group = self._groups[layer]
        if group not in self._memo:
            self._memo[group] = sum(self.dense_parts_ns(self._example[group], tokens, context).values())
        return self._memo[group]

    def dense_parts_ns(self, layer: int, tokens: int, context: int) -> dict[str, int]:
        """One layer beside its routed experts by parts: attention, router, shared and launch.

        `dense` instead of the first three where the shape does not tell them apart.
        """
        shape = self._shape
        cache_bytes, flops = self._cache_work(layer, tokens, context)
        launches = self._dense_launches(layer) * self.launch_ns
        if not shape.attention_bytes:
            dense_ns = self._dense_roofline(shape.dense_bytes[layer], tokens, cache_bytes, flops)
            return {"dense": round(dense_ns + launches) - launches, "launch": launches}
        return {
            "attention": round(self._dense_roofline(shape.attention_bytes[layer], tokens, cache_bytes, flops)),
            "router": round(self._dense_roofline(shape.router_bytes[layer], tokens)),
            "shared": round(self._dense_roofline(shape.shared_bytes[layer], tokens)),
            "launch": launches,
        }

    def experts_ns(self, layer: int, experts: int, rows_per_expert: float) -> int:
        """`experts` routed experts of a layer, in one group of kernels."""
        weight_bytes = experts * self._shape.expert_bytes[layer]
        flops = 2.0 * rows_per_expert * weight_bytes / self._expert_weight_bytes
        return round(self._roofline(weight_bytes, flops) + self.launch_ns)

    def head_ns(self, rows: int) -> int:
        """Final norm and language-model head for so many rows."""
        return round(self._dense_roofline(self._shape.head_bytes, rows) + self.launch_ns)

    def _cache_work(self, layer: int, tokens: int, context: int) -> tuple[float, float]:
        """Bytes of cache and state that attention of a layer reads and writes, and its operations beside weights."""
        shape = self._shape
        if not shape.attention:
            return shape.kv_bytes_per_token / shape.num_layers * context, 0.0
        num_bytes, flops = 0.0, 0.0
        for kind, count in self._mechanisms(layer):
            num_bytes += count * (kind.kv_bytes_per_token * kind.read_tokens(context) + 2 * kind.state_bytes)
            flops += count * (kind.flops_per_pair * kind.pairs(tokens, context) + kind.flops_per_token * tokens)
        return num_bytes, flops

    def _mechanisms(self, layer: int) -> Iterable[tuple[AttentionKind, int]]:
        """Kinds of attention in the decoder layers counted with a MoE layer, and in how many of them."""
        decoder_layers = set(self._shape.decoder_layers_of(layer))
        for kind in self._shape.attention:
            count = len(decoder_layers.intersection(kind.layers))
            if count:
                yield kind, count

    def _dense_launches(self, layer: int) -> int:
        shape = self._shape
        if not shape.attention:
            return 1
        linear = sum(count for kind, count in self._mechanisms(layer) if kind.kind == "linear")
        return 2 * len(shape.decoder_layers_of(layer)) - 1 + linear

    def _group_of(self, layer: int) -> _Group:
        """Layers with equal numbers cost the same."""
        shape = self._shape
        parts = shape.attention_bytes, shape.router_bytes, shape.shared_bytes
        sizes = [part[layer] for part in parts] if shape.attention_bytes else [shape.dense_bytes[layer]]
        decoder_layers = shape.decoder_layers_of(layer)
        held = set(decoder_layers)
        return (*sizes, len(decoder_layers), *(len(held.intersection(kind.layers)) for kind in shape.attention))

    def _dense_roofline(
        self, weight_bytes: float, rows: float, other_bytes: float = 0, other_flops: float = 0
    ) -> float:
        flops = 2.0 * rows * weight_bytes / self._dense_weight_bytes + other_flops
        return self._roofline(weight_bytes + other_bytes, flops)

    def _roofline(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self._bytes_per_s, flops / self._flops_per_s) * 1e9
