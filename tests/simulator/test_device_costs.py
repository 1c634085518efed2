"""The device's terms worked out by hand: one byte or one operation per nanosecond, launches of 7 ns."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.cost_model import CostModel, RooflineCompute
from simulator.costs.device import DeviceCosts
from tests.simulator.builders import make_hardware, make_host, make_shape, quantity
from trace_capture.known_shapes import known_shape
from trace_capture.machine_parts import named_profile
from trace_capture.model_shape import AttentionKind, ModelShape

BYTES_BOUND = make_hardware(memory_bytes_per_s=1e9, flops_per_s=1e18, launch_ns=7.0)
FLOPS_BOUND = make_hardware(memory_bytes_per_s=1e18, flops_per_s=1e9, launch_ns=7.0)


def shape_of(*attention: AttentionKind, layers: int = 1, **fields: Any) -> ModelShape:
    parts = {"attention_bytes": (400,) * layers, "router_bytes": (60,) * layers, "shared_bytes": (540,) * layers}
    return make_shape(layers=layers, attention=attention, dense_bytes=(1000,) * layers, **(parts | fields))


def kind_of(kind: Any, **fields: Any) -> AttentionKind:
    return AttentionKind(kind=kind, layers=(0,), **fields)


def test_parts_of_the_dense_layers_have_names_and_add_up() -> None:
    costs = DeviceCosts(BYTES_BOUND, shape_of(kind_of("full", kv_bytes_per_token=3)))
    parts = costs.dense_parts_ns(0, 1, 100)
    assert parts == {"attention": 400 + 300, "router": 60, "shared": 540, "launch": 7}
    assert costs.dense_ns(0, 1, 100) == sum(parts.values())


def test_shape_without_parts_is_one_part() -> None:
    costs = DeviceCosts(BYTES_BOUND, make_shape(layers=2, kv_bytes_per_token=6))
    assert costs.dense_parts_ns(0, 1, 100) == {"dense": 5000 + 300, "launch": 7}


@pytest.mark.parametrize(
    ("attention", "context", "expected_bytes"),
    [
        (kind_of("full", kv_bytes_per_token=3), 1000, 3000),
        (kind_of("latent", kv_bytes_per_token=2), 1000, 2000),
        (kind_of("sliding", kv_bytes_per_token=3, window=128), 1000, 384),
        (kind_of("sliding", kv_bytes_per_token=3, window=128), 100, 300),
        (kind_of("linear", state_bytes=50), 1000, 100),
        (kind_of("linear", state_bytes=50), 0, 100),
    ],
    ids=["full", "latent", "window filled", "window not filled", "state is read and written", "whatever the context"],
)
def test_cache_that_a_token_reads_by_kind(attention: AttentionKind, context: int, expected_bytes: int) -> None:
    costs = DeviceCosts(BYTES_BOUND, shape_of(attention))
    assert costs.dense_parts_ns(0, 1, context)["attention"] == 400 + expected_bytes
    assert costs.dense_parts_ns(0, 5, context)["attention"] == 400 + expected_bytes, "once per pass"


def test_two_mechanisms_of_one_layer_are_both_paid() -> None:
    sparse = kind_of("sparse", kv_bytes_per_token=4, window=10)
    index = kind_of("index", kv_bytes_per_token=1)
    assert DeviceCosts(BYTES_BOUND, shape_of(sparse, index)).dense_parts_ns(0, 1, 100)["attention"] == 400 + 40 + 100


def test_attention_multiplies_each_new_token_with_what_it_sees() -> None:
    full = DeviceCosts(FLOPS_BOUND, shape_of(kind_of("full", flops_per_pair=11)))
    assert full.dense_parts_ns(0, 1, 9)["attention"] == 400 + 11 * 10, "two operations per weight of two bytes"
    assert full.dense_parts_ns(0, 3, 0)["attention"] == 3 * 400 + 11 * (1 + 2 + 3)
    near = DeviceCosts(FLOPS_BOUND, shape_of(kind_of("sliding", flops_per_pair=11, window=2)))
    assert near.dense_parts_ns(0, 3, 0)["attention"] == 3 * 400 + 11 * (1 + 2 + 2)
    linear = DeviceCosts(FLOPS_BOUND, shape_of(kind_of("linear", flops_per_token=13)))
    assert linear.dense_parts_ns(0, 3, 100)["attention"] == 3 * 400 + 3 * 13


def test_launches_of_dense_layers_and_linear_attention() -> None:
    full, linear = kind_of("full"), kind_of("linear")
    assert DeviceCosts(BYTES_BOUND, shape_of(full)).dense_parts_ns(0, 1, 0)["launch"] == 7
    assert DeviceCosts(BYTES_BOUND, shape_of(linear)).dense_parts_ns(0, 1, 0)["launch"] == 14
    behind_dense = shape_of(full).model_copy(update={"num_layers": 3, "moe_layer_ids": (2,)})
    assert DeviceCosts(BYTES_BOUND, behind_dense).dense_parts_ns(0, 1, 0)["launch"] == 5 * 7, "two layers of two, one"


def test_layers_of_another_kind_cost_differently_and_each_context_anew() -> None:
    attention = (
        AttentionKind(kind="full", layers=(0, 2), kv_bytes_per_token=3),
        AttentionKind(kind="sliding", layers=(1,), kv_bytes_per_token=3, window=10),
    )
    costs = DeviceCosts(BYTES_BOUND, shape_of(*attention, layers=3))
    for context in (5, 100, 1000):
        found = [costs.dense_ns(layer, 1, context) for layer in range(3)]
        assert found == [1007 + 3 * context, 1007 + 3 * min(10, context), 1007 + 3 * context]


def test_formats_of_fewer_bits_cost_fewer_bytes_and_the_same_operations() -> None:
    half = shape_of(hidden_size=10, moe_intermediate_size=50, expert_bytes=3000)
    small = half.with_weights("q4_k")  # 1500 weights of 4.5 bits
    assert DeviceCosts(BYTES_BOUND, half).experts_ns(0, 2, 1) == 6000 + 7
    assert DeviceCosts(BYTES_BOUND, small).experts_ns(0, 2, 1) == 2 * 844 + 7
    assert DeviceCosts(FLOPS_BOUND, half).experts_ns(0, 1, 4) == 4 * 3000 + 7
    assert DeviceCosts(FLOPS_BOUND, small).experts_ns(0, 1, 4) == pytest.approx(4 * 3000 + 7, abs=4)


def test_kernels_reach_their_share_of_the_memory_rate() -> None:
    device = BYTES_BOUND.device.model_copy(update={"read_ratio": quantity(0.5)})
    costs = DeviceCosts(BYTES_BOUND.model_copy(update={"device": device}), make_shape(head_bytes=600))
    assert costs.head_ns(1) == 1200 + 7 and costs.experts_ns(0, 1, 1) == 2000 + 7


def test_bookkeeping_is_a_launch_unless_the_host_says_otherwise() -> None:
    plain = CostModel(BYTES_BOUND, make_shape()).compute
    assert (plain.decide_ns(0), plain.decide_ns(5), plain.predict_ns(0)) == (7, 7, 7)
    host = make_host().model_copy(update={"decide_ns": quantity(40), "decide_per_load_ns": quantity(9)})
    told = CostModel(BYTES_BOUND.model_copy(update={"host": host}), make_shape()).compute
    assert (told.decide_ns(0), told.decide_ns(5)) == (40, 85)


def test_compute_of_the_published_a6000_run() -> None:
    """Speculating Experts: Qwen3-30B-A3B in bfloat16 computes 12.7 ms per token at 1K of context, 22 ms at 64K."""
    shape = known_shape("qwen3-30b-a3b")
    compute = CostModel(named_profile("a6000-pcie4x16"), shape).compute
    assert isinstance(compute, RooflineCompute)

    def token_ms(context: int) -> float:
        layers = [compute.dense_ns(n, 1, context) + compute.experts_ns(n, 1, 8, 8) for n in range(48)]
        return (sum(layers) + compute.overhead_ns(1)) / 1e6

    assert token_ms(1024) == pytest.approx(12.7, rel=0.02)
    assert token_ms(65_536) == pytest.approx(22.0, rel=0.02)
