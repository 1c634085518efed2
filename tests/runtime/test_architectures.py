"""Every architecture that transformers registers with fused experts: exact when offloaded, its routers foreseen.

Models are tiny, random and built from configurations that `tiny_models` finds; nothing here lists architectures by
hand but the exceptions, and those must fail for the reason given.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from runtime import offload, offloaded, unload
from runtime.capture import measure_default_vectors
from runtime.models import LoadedModel
from simulator.policies.config import OffloadConfig, parse_config
from tests.runtime.tiny_models import HIDDEN, NUM_EXPERTS, UNDECORATED, architectures, tiny_model, tiny_undecorated
from trace_capture.errors import ModelError
from trace_capture.hooks import MoeSite, discover, model_shape

EXCEPTIONS = {"inkling2_loop_text": "runs the experts of a layer several times per forward pass"}
"""Model types that are refused, and the words they are refused with."""
MODEL_TYPES = [one.model_type for one in architectures()]
SUPPORTED = [name for name in MODEL_TYPES if name not in EXCEPTIONS]
PROMPT = torch.arange(3, 15)[None]


def config(**settings: object) -> OffloadConfig:
    """A quarter of the experts fits."""
    device = {"h2d_bytes_per_s": 4e9, "latency_ns": 0}
    return parse_config({"cache": {"budget_ratio": 0.25}, "device": device} | settings)


def prefill(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


def greedy(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=8, do_sample=False)


def test_transformers_registers_at_least_forty() -> None:
    assert len(SUPPORTED) >= 40
    assert {"mixtral", "gpt_oss", "deepseek_v3", "gemma4", "granitemoe", "jamba"} <= set(SUPPORTED)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_a_quarter_of_the_experts_gives_the_same_logits_and_tokens(model_type: str) -> None:
    model = tiny_model(model_type)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits, tokens = prefill(model), greedy(model)
    engine = offload(model, config())
    try:
        assert all(pool.num_slots == NUM_EXPERTS // 4 for pool in engine.pools)
        assert torch.allclose(prefill(model), logits, atol=1e-5, rtol=1e-5)
        assert torch.equal(greedy(model), tokens)
        engine.verify_residency()
        assert engine.core.decode_counters.demand_loads > 0, "nothing was loaded, so nothing was tested"
        change_experts(engine.store.banks, 2.0)
        assert (prefill(model) - logits).abs().max() > 1e-3, "the output does not come from the slots"
        change_experts(engine.store.banks, 0.5)
    finally:
        unload(model)
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
    assert torch.equal(prefill(model), logits)


def change_experts(banks: object, factor: float) -> None:
    for bank in banks:
        bank["down_proj"].mul_(factor)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_prefetch_by_the_quasi_hidden_state_runs_and_stays_exact(model_type: str) -> None:
    model = tiny_model(model_type)
    tokens = greedy(model)
    sites = discover(model)
    shape = model_shape(model, sites, "tiny")
    vectors = measure_default_vectors(LoadedModel(model, None, ""), sites, shape, [PROMPT]).defaults()
    assert vectors.vectors.any(dim=-1).sum() >= len(sites), "no expert has a default vector"
    settings = config(prefetch={"source": "quasi-hidden"})
    with offloaded(model, settings, default_vectors=vectors) as engine:
        assert torch.equal(greedy(model), tokens)
        counters = engine.core.decode_counters
        assert all(engine.recall[site.index].tokens for site in sites[1:]), "nothing was predicted"
        assert len(sites) == 1 or counters.prefetch_loads > 0


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_routers_are_foreseen_from_their_true_input_and_the_true_step(model_type: str) -> None:
    """The true input gives the router's own choice and weights; a stream moved by the true step in place of d_l gives
    all of the next layer's experts."""
    model = tiny_model(model_type)
    sites = discover(model)
    streams, routed = forward_with_streams(model, sites)
    for site in sites:
        weights, ids = routed[site.index]
        with torch.no_grad():
            own_ids, own_weights = site.route(streams[site.index])
        assert torch.equal(own_ids, ids)
        assert torch.equal(own_weights, weights)
    for before, after in zip(sites, sites[1:], strict=False):
        step = streams[after.index] - streams[before.index]
        with torch.no_grad():
            ids, _ = after.route(streams[before.index] + step)
        assert torch.equal(ids.sort().values, routed[after.index][1].sort().values)


def forward_with_streams(
    model: torch.nn.Module, sites: list[MoeSite]
) -> tuple[dict[int, torch.Tensor], dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """One forward pass: the stream in front of each site's norm, and the weights and ids that its router gave."""
    streams, routed = {}, {}
    handles = [handle for site in sites for handle in site.watch()]
    for site in sites:

        def keep_stream(_: object, args: tuple, index: int = site.index) -> None:
            streams[index] = args[0].clone()

        def keep_routing(_: object, __: object, output: tuple, index: int = site.index) -> None:
            routed[index] = tuple(item.reshape(-1, item.shape[-1]).clone() for item in output[1:3])

        handles.append((site.norm or site.router).register_forward_pre_hook(keep_stream))
        handles.append(site.router.register_forward_hook(keep_routing))
    prefill(model)
    for handle in handles:
        handle.remove()
    return streams, routed


@pytest.mark.parametrize(("model_type", "reason"), EXCEPTIONS.items())
def test_exceptions_are_refused_for_their_reason(model_type: str, reason: str) -> None:
    if model_type not in MODEL_TYPES:
        pytest.skip(f"this transformers has no {model_type}")
    with pytest.raises(ModelError, match=reason) as caught:
        offload(tiny_model(model_type), config())
    assert model_type in str(caught.value)


@pytest.mark.skipif("deepseek_v4" not in MODEL_TYPES, reason="this transformers has no deepseek_v4")
def test_a_table_that_names_an_expert_twice_leaks_no_slot() -> None:
    """Routers by token id look experts up in a table, and nothing keeps a table from repeating itself."""
    model = tiny_model("deepseek_v4")
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_((torch.arange(len(table)) % NUM_EXPERTS).unsqueeze(1).expand_as(table))
    tokens = greedy(model)
    with offloaded(model, config(cache={"budget_ratio": 0.25, "scope": "global"})) as engine:
        assert torch.equal(greedy(model), tokens)
        held = [tag[:2] for pool in engine.pools for tag in pool.given if tag is not None]
        assert sorted(held) == sorted(engine.core.resident())


def test_experts_that_text_does_not_reach_run_as_before() -> None:
    """Those of a vision tower, or of a head for speculation."""
    model = tiny_model("mixtral")
    tower = tiny_model("mixtral").model.layers[0].mlp.experts
    model.tower, tower.config = tower, model.config
    hidden, ids, weights = torch.randn(5, HIDDEN), torch.randint(0, NUM_EXPERTS, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        expected = tower(hidden, ids, weights)
        with offloaded(model, config()):
            assert torch.equal(tower(hidden, ids, weights), expected)
        assert torch.equal(tower(hidden, ids, weights), expected)


def test_experts_in_a_latent_space_are_exact_and_have_no_default_vectors() -> None:
    model = tiny_model("nemotron_h", moe_latent_size=16)
    logits, tokens = prefill(model), greedy(model)
    with offloaded(model, config(prefetch={"source": "previous-token"})):
        assert torch.allclose(prefill(model), logits, atol=1e-5, rtol=1e-5)
        assert torch.equal(greedy(model), tokens)
    sites = discover(model)
    shape = model_shape(model, sites, "tiny")
    with pytest.raises(ModelError, match="has no default vectors"):
        measure_default_vectors(LoadedModel(model, None, ""), sites, shape, [PROMPT])


@pytest.mark.parametrize("model_type", UNDECORATED)
def test_experts_outside_the_interface_are_refused_by_name(model_type: str) -> None:
    model = tiny_undecorated(model_type)
    prefill(model)
    with pytest.raises(ModelError, match=rf"model type '{model_type}'\) is not supported yet"):
        offload(model, config())


def test_encoder_decoders_are_refused() -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "num_experts": 4, "vocab_size": 64}
    model = transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(**sizes))
    with pytest.raises(ModelError, match="encoder-decoder"):
        offload(model, config())
