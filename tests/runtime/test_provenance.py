"""Every executed expert is the right one, of the right load: the last layer too, for every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.engine import Engine
from runtime.link import CopyJob
from runtime.offloading import offload, offloaded, unload
from runtime.slots import SlotPool, StaleSlotError
from simulator.policies.config import OffloadConfig, parse_config

PROMPT = torch.arange(3, 27)[None]
NEW_TOKENS = 12


def config(policy: str = "none", source: str = "quasi-hidden", mode: str = "commit") -> OffloadConfig:
    """The paper's own setting by default: no cache, speculative execution."""
    raw = {"cache": {"budget_ratio": 0.5, "policy": policy}, "prefetch": {"source": source, "mode": mode}}
    return parse_config(raw | {"device": {"h2d_bytes_per_s": 1e10, "latency_ns": 0}})


def vectors(layers: int = 4) -> torch.Tensor:
    return 3 * torch.randn(layers, 8, 64, generator=torch.Generator().manual_seed(1))


def greedy(model: torch.nn.Module) -> torch.Tensor:
    ids = PROMPT.to(model.device)
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)


@pytest.mark.parametrize(("policy", "mode"), [("none", "commit"), ("none", "verify"), ("lru", "hint")])
def test_every_executed_expert_has_its_own_numbers_in_every_layer(
    any_model: torch.nn.Module, policy: str, mode: str
) -> None:
    with offloaded(any_model, config(policy, mode=mode), default_vectors=vectors()) as engine:
        used = [0] * engine.shape.num_moe_layers
        engine.verified = list(used)

        def count(index: torch.Tensor, layer: int) -> None:
            used[layer] += len(index.unique())

        watch(engine, count)
        greedy(any_model)
        compared = engine.verified
    assert compared == used, "an expert ran without being compared, or the reverse"
    assert min(used) >= (NEW_TOKENS - 1) * 2, "the last layer is compared for every token"


def watch(engine: Engine, count: Any) -> None:
    """Count what every layer executes, behind the choice between routed and predicted experts."""
    executed = engine._executed

    def counted(layer: int, index: torch.Tensor, weights: torch.Tensor) -> Any:
        result = executed(layer, index, weights)
        count(result.ids, layer)
        return result

    engine._executed = counted  # type: ignore[method-assign]


def test_each_load_has_a_version_of_its_own(tiny: Any) -> None:
    model = tiny("mixtral")
    with offloaded(model, config(source="none", mode="hint")) as engine:
        greedy(model)
        loads = engine.core.prefill_counters.demand_loads + engine.core.decode_counters.demand_loads
        assert sum(sum(pool._versions) for pool in engine.pools) == loads
        assert all(pool.given == [None] * pool.num_slots for pool in engine.pools), "no cache keeps nothing"
        last = [tag for pool in engine.pools for tag in pool.written if tag is not None]
        assert len(set(last)) == len(last)


def test_a_last_layer_that_is_not_refreshed_is_caught(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake of the released code: bookkeeping takes the last layer to be on the device, and no copy is made."""
    model = tiny("qwen3_moe")
    engine = offload(model, config(), default_vectors=vectors())
    serve, forgotten = engine.link.submit, []

    def forgetful(jobs: list[CopyJob]) -> None:
        for job in jobs:
            if job.key[0] == 3 and len(engine.passes) == 4:
                job.pairs, job.stamp = (), None
                forgotten.append(job.key)
        serve(jobs)

    monkeypatch.setattr(engine.link, "submit", forgetful)
    try:
        with pytest.raises(StaleSlotError, match="of MoE layer 3"):
            greedy(model)
    finally:
        unload(model)
    assert len(forgotten) == 2 and len(engine.passes) == 4, "it was caught in the very pass"


def test_a_slot_with_another_experts_numbers_is_caught_where_it_is_used(tiny: Any) -> None:
    model = tiny("mixtral")
    with offloaded(model, config("lru", "none", "hint")) as engine:
        greedy(model)
        tensor = engine.pools[0].tensors["down_proj"]
        tensor[[0, 1]] = tensor[[1, 0]].clone()
        with pytest.raises(StaleSlotError, match="does not hold the numbers of expert"):
            engine.verify_residency()
        engine.verified = [0] * engine.shape.num_moe_layers
        with pytest.raises(StaleSlotError, match="of MoE layer 0"):
            greedy(model)
        engine.verified = None
        greedy(model)
        engine.verify_residency()


def test_the_copy_of_an_earlier_load_does_not_pass_for_the_later_one() -> None:
    pool = SlotPool({"down_proj": torch.zeros(8, 3)}, 1, torch.device("cpu"))
    slot = pool.take((2, 5))
    first = pool.stamp_of(slot)
    with pytest.raises(StaleSlotError, match="holds None"):
        pool.checked_slot((2, 5))
    first()
    assert pool.checked_slot((2, 5)) == slot
    pool.release((2, 5))
    assert pool.take((2, 5)) == slot
    first()
    with pytest.raises(StaleSlotError, match=r"version=2.*holds .*version=1"):
        pool.checked_slot((2, 5))
    pool.stamp_of(slot)()
    assert pool.checked_slot((2, 5)) == slot
