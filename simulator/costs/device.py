"""The device: attention by kind and context, router, shared experts, routed experts, head, launches."""

from __future__ import annotations

from typing import NamedTuple

from simulator.costs.rates import positive, value_or
from trace_capture.hardware import HardwareProfile
from trace_capture.model_shape import AttentionKind, ModelShape


class _Layer(NamedTuple):
    """A MoE layer and the dense layers counted with it; equal ones cost the same."""

    sizes: tuple[int, ...]
    """Bytes of attention, router and shared experts; of all together where the shape does not tell them apart."""
    launches: int
    kv_bytes_per_token: float
    """Where no mechanism is known."""
    mechanisms: tuple[tuple[AttentionKind, int], ...]
    """Kinds of attention, and in how many of the decoder layers."""


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
        layers = [_layer_of(shape, layer) for layer in range(shape.num_moe_layers)]
        self._kinds = tuple(dict.fromkeys(layers))
        self._kind_of = [self._kinds.index(layer) for layer in layers]
        self._weights_alone_ns: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        """Router and shared experts, by sizes and tokens: they are asked for in every pass and know no context."""

    def dense_ns(self, layer: int, tokens: int, context: int) -> int:
        """One layer beside its routed experts: the sum of `dense_parts_ns`."""
        return sum(self.dense_parts_ns(layer, tokens, context).values())

    def dense_of_layers_ns(self, tokens: int, context: int) -> list[int]:
        """`dense_ns` of every layer [L]."""
        kinds = [sum(self._parts(kind, tokens, context).values()) for kind in self._kinds]
        return kinds * len(self._kind_of) if len(kinds) == 1 else [kinds[kind] for kind in self._kind_of]

    def dense_parts_ns(self, layer: int, tokens: int, context: int) -> dict[str, int]:
        """One layer beside its routed experts by parts: attention, router, shared and launch.

        `dense` instead of the first three where the shape does not tell them apart.
        """
        return self._parts(self._kinds[self._kind_of[layer]], tokens, context)

    def _parts(self, layer: _Layer, tokens: int, context: int) -> dict[str, int]:
        cache_bytes, flops = layer.kv_bytes_per_token * context, 0.0
        for kind, count in layer.mechanisms:
            cache_bytes += count * (kind.kv_bytes_per_token * kind.read_tokens(context) + 2 * kind.state_bytes)
            flops += count * (kind.flops_per_pair * kind.pairs(tokens, context) + kind.flops_per_token * tokens)
        launches = layer.launches * self.launch_ns
        first, *others = layer.sizes
        first_ns = self._dense_roofline(first, tokens, cache_bytes, flops)
        if not others:
            return {"dense": round(first_ns + launches) - launches, "launch": launches}
        asked = layer.sizes, tokens
        if asked not in self._weights_alone_ns:
            self._weights_alone_ns[asked] = tuple(round(self._dense_roofline(size, tokens)) for size in others)
        router_ns, shared_ns = self._weights_alone_ns[asked]
        return {"attention": round(first_ns), "router": router_ns, "shared": shared_ns, "launch": launches}

    def pass_parts_ns(self, tokens: int, context: int) -> dict[str, int]:
        """`dense_parts_ns` of all layers together."""
        total: dict[str, int] = {}
        for place, layer in enumerate(self._kinds):
            count = self._kind_of.count(place)
            for name, part_ns in self._parts(layer, tokens, context).items():
                total[name] = total.get(name, 0) + count * part_ns
        return total

    def experts_ns(self, layer: int, experts: int, rows_per_expert: float) -> int:
        """`experts` routed experts of a layer, in one group of kernels."""
        weight_bytes = experts * self._shape.expert_bytes[layer]
        flops = 2.0 * rows_per_expert * weight_bytes / self._expert_weight_bytes
        return round(self._roofline(weight_bytes, flops) + self.launch_ns)

    def head_ns(self, rows: int) -> int:
        """Final norm and language-model head for so many rows."""
        return round(self._dense_roofline(self._shape.head_bytes, rows) + self.launch_ns)

    def _dense_roofline(
        self, weight_bytes: float, rows: float, other_bytes: float = 0, other_flops: float = 0
    ) -> float:
        flops = 2.0 * rows * weight_bytes / self._dense_weight_bytes + other_flops
        return self._roofline(weight_bytes + other_bytes, flops)

    def _roofline(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self._bytes_per_s, flops / self._flops_per_s) * 1e9


def _layer_of(shape: ModelShape, layer: int) -> _Layer:
    """What sets the time of a MoE layer, and of the decoder layers counted with it, apart from others'."""
    decoder_layers = shape.decoder_layers_of(layer)
    held = set(decoder_layers)
    mechanisms = [(kind, len(held.intersection(kind.layers))) for kind in shape.attention]
    present = tuple((kind, count) for kind, count in mechanisms if count)
    if not shape.attention:
        return _Layer(_sizes(shape, layer), 1, shape.kv_bytes_per_token / shape.num_layers, ())
    linear = sum(count for kind, count in present if kind.kind == "linear")
    return _Layer(_sizes(shape, layer), 2 * len(decoder_layers) - 1 + linear, 0.0, present)


def _sizes(shape: ModelShape, layer: int) -> tuple[int, ...]:
    if not shape.attention_bytes:
        return (shape.dense_bytes[layer],)
    return shape.attention_bytes[layer], shape.router_bytes[layer], shape.shared_bytes[layer]
