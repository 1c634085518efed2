"""The offloaded model gives the tokens and logits of the untouched one, for every architecture and setting."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

import runtime.offloading
from runtime import offload, unload
from runtime.offloading import decode_implementation
from simulator.policies.config import OffloadConfig, parse_config

FAST_LINK = {"h2d_bytes_per_s": 2e9, "latency_ns": 0}
SETTINGS = {
    "a quarter per layer": {"cache": {"budget_ratio": 0.3}},
    "half in one pool": {"cache": {"budget_ratio": 0.5, "scope": "global"}},
    "no cache": {"cache": {"budget_ratio": 0.5, "policy": "none"}},
    "lfu with previous token": {
        "cache": {"budget_ratio": 0.5, "policy": "lfu"},
        "prefetch": {"source": "previous-token"},
    },
    "quasi-hidden": {"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "quasi-hidden"}},
}
TOLERANCE = {"cpu": 1e-6, "cuda": 1e-5}
PROMPT = torch.arange(3, 27)[None]


def config(setting: str) -> OffloadConfig:
    return parse_config(SETTINGS[setting] | {"device": FAST_LINK})


def greedy(model: torch.nn.Module) -> torch.Tensor:
    prompt = PROMPT.to(model.device)
    with torch.no_grad():
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)


def prefill(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT.to(model.device)).logits


def vectors(model: torch.nn.Module) -> torch.Tensor:
    return torch.zeros(4, 8, model.config.hidden_size)


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_and_logits_equal_the_untouched_model(any_model: torch.nn.Module, setting: str) -> None:
    logits, tokens = prefill(any_model), greedy(any_model)
    engine = offload(any_model, config(setting), default_vectors=vectors(any_model))
    try:
        assert torch.allclose(prefill(any_model), logits, atol=TOLERANCE[any_model.device.type], rtol=0)
        assert torch.equal(greedy(any_model), tokens)
        engine.verify_residency()
        counters = engine.core.decode_counters
        assert counters.lookups > 0
        assert counters.demand_loads + counters.prefetch_loads > 0, "nothing was loaded, so nothing was tested"
    finally:
        unload(any_model)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_bfloat16_is_bit_equal_in_decode_for_every_stock_kernel(tiny, implementation: str) -> None:
    model = tiny("qwen3_moe").to(torch.bfloat16)
    model.set_experts_implementation(implementation)
    before = _decode_logits(model)
    offload(model, config("a quarter per layer"))
    try:
        after = _decode_logits(model)
    finally:
        unload(model)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _decode_logits(model: torch.nn.Module) -> list[torch.Tensor]:
    """Logits of six one-token passes after a one-token prompt: no layer of these needs waves."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        for token in (5, 9, 5, 77, 30, 31):
            logits.append(model(torch.tensor([[token]]), use_cache=True, **{name: cache}).logits)
    return logits


def test_output_really_comes_from_the_slots(tiny) -> None:
    model = tiny("mixtral")
    logits = prefill(model)
    engine = offload(model, config("a quarter per layer"))
    try:
        for bank in engine.store.banks:
            bank["down_proj"].mul_(1.01)
        changed = prefill(model)
    finally:
        unload(model)
    assert (changed - logits).abs().max() > 1e-4


def test_batches_and_padding_give_the_same_tokens(tiny) -> None:
    model = tiny("qwen3_moe")
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])
    mask = (ids != 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    with torch.no_grad():
        expected = model.generate(ids, **options)
        offload(model, config("half in one pool"))
        found = model.generate(ids, **options)
    unload(model)
    assert torch.equal(found, expected)


def test_assisted_generation_on_an_offloaded_model_gives_the_same_tokens(tiny) -> None:
    model = tiny("qwen3_moe")
    expected = greedy(model)
    engine = offload(model, config("a quarter per layer"))
    try:
        with torch.no_grad():
            found = model.generate(
                PROMPT,
                attention_mask=torch.ones_like(PROMPT),
                max_new_tokens=16,
                do_sample=False,
                prompt_lookup_num_tokens=3,
            )
    finally:
        unload(model)
    assert torch.equal(found, expected)
    assert any(record.tokens > 1 and not record.is_prefill for record in engine.passes), "no pass verified a draft"


def test_decode_runs_the_kernels_that_transformers_would_switch_to(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every device but the CPU `generate` decodes with batched instead of grouped products. Here the rule says so
    for the CPU as well, and the untouched model is switched by hand."""
    assert decode_implementation("grouped_mm", "cuda") == "batched_mm"
    assert decode_implementation("grouped_mm", "cpu") == "grouped_mm"
    assert [decode_implementation(name, "cuda") for name in (None, "eager", "deepgemm")] == [None, "eager", "deepgemm"]
    model = tiny("qwen3_moe").to(torch.bfloat16)
    assert model.config._experts_implementation == "grouped_mm"
    monkeypatch.setattr(runtime.offloading, "decode_implementation", lambda *_: "batched_mm")
    engine = offload(model, config("a quarter per layer"))
    used: list[tuple[bool, str]] = []
    use = engine.use_kernels
    monkeypatch.setattr(engine, "use_kernels", lambda name: (used.append((len(engine.passes), name)), use(name)))
    with torch.no_grad():
        prompt = PROMPT[:, :1]
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    unload(model)
    assert used == [(1, "batched_mm"), (12, "grouped_mm")], "prefill is not decoded, and afterwards all is as before"
    assert "_optimize_model_for_decode" not in vars(model)
    switch = model._optimize_model_for_decode

    @contextmanager
    def by_hand():
        with switch():
            model.set_experts_implementation("batched_mm")
            yield
            model.set_experts_implementation("grouped_mm")

    model.__dict__["_optimize_model_for_decode"] = by_hand
    with torch.no_grad():
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert torch.equal(found, expected)
