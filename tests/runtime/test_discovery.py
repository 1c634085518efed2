"""Sites, shapes and the quasi-hidden state: checks that hold by construction where routers and norms are right."""

from __future__ import annotations

import pytest
import torch

from runtime.default_vectors import DefaultVectors
from runtime.predictors import QuasiHidden
from trace_capture.hooks import RoutingRecorder, discover, model_shape

PROMPT = torch.arange(3, 23)[None]


def run_with_residuals(model: torch.nn.Module, vectors: torch.Tensor):
    """One forward; residual in front of each MoE norm, routing and output of each layer."""
    sites = discover(model)
    residuals, routed, outputs = {}, {}, {}
    handles = []
    for site in sites:
        source = site.norm or site.router
        handles.append(
            source.register_forward_pre_hook(lambda _, args, i=site.index: residuals.__setitem__(i, args[0]))
        )
        handles.append(
            site.router.register_forward_hook(lambda _, __, out, i=site.index: routed.__setitem__(i, out[1:]))
        )
        handles.append(site.experts.register_forward_hook(lambda _, __, out, i=site.index: outputs.__setitem__(i, out)))
    with torch.no_grad():
        model(PROMPT.to(model.device))
    for handle in handles:
        handle.remove()
    return sites, residuals, routed, outputs


def test_the_true_router_input_reproduces_native_routing(any_model: torch.nn.Module) -> None:
    sites, residuals, routed, _ = run_with_residuals(any_model, torch.zeros(0))
    for site in sites:
        with torch.no_grad():
            ids, weights = site.route(residuals[site.index])
        assert torch.equal(ids, routed[site.index][1].reshape(ids.shape))
        assert torch.allclose(weights, routed[site.index][0].reshape(weights.shape))


def test_the_true_step_in_place_of_the_default_vector_predicts_everything(any_model: torch.nn.Module) -> None:
    """With d_l replaced by what the stream really gains until the next router, recall is 100 %."""
    sites, residuals, routed, _ = run_with_residuals(any_model, torch.zeros(0))
    for before, after in zip(sites, sites[1:], strict=False):
        step = residuals[after.index] - residuals[before.index]
        with torch.no_grad():
            ids, _ = after.route(residuals[before.index] + step)
        assert torch.equal(ids.sort().values, routed[after.index][1].reshape(ids.shape).sort().values)


def test_shapes_count_every_weight_once(any_model: torch.nn.Module) -> None:
    sites = discover(any_model)
    shape = model_shape(any_model, sites, "tiny")
    assert shape.top_k == 2
    assert shape.num_experts == 8
    layers = [p for name, p in any_model.named_parameters() if ".layers." in name]
    in_layers = sum(p.numel() * p.element_size() for p in layers)
    assert shape.total_expert_bytes + sum(shape.dense_bytes) == in_layers


def test_dense_first_layers_are_not_sites(tiny) -> None:
    sites = discover(tiny("glm4_moe"))
    assert [(site.index, site.decoder_layer) for site in sites] == [(0, 1), (1, 2), (2, 3)]


def test_cache_bytes_are_those_that_transformers_keeps(tiny) -> None:
    for model_type, counts in (("qwen3_moe", "heads"), ("deepseek_v2", "latent")):
        model = tiny(model_type)
        shape = model_shape(model, discover(model), "x")
        with torch.no_grad():
            cache = getattr(model(PROMPT.to(model.device), use_cache=True), "past_key_values")  # noqa: B009
        kept = sum(kv.numel() * kv.element_size() for layer in cache.layers for kv in (layer.keys, layer.values))
        sizes, width = model.config, 16 + 8 + 16  # older transformers kept keys and values of all heads
        expanded = 4 * PROMPT.shape[1] * sizes.num_hidden_layers * sizes.num_attention_heads * width
        assert shape.kv_counts == counts
        assert shape.kv_bytes_per_token * PROMPT.shape[1] == kept or (counts == "latent" and kept == expanded)


def test_default_vectors_are_direct_means_and_unseen_pairs_are_zero(tiny) -> None:
    model = tiny("mixtral")
    sites = discover(model)
    vectors = DefaultVectors.empty(len(sites), 8, 64)
    rows = []
    hidden_of_site: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = [
        site.experts.register_forward_pre_hook(lambda _, a, i=site.index: hidden_of_site.__setitem__(i, (a[0], a[1])))
        for site in sites
    ]
    with RoutingRecorder(model, sites, rows.append, observer=vectors) as recorder, torch.no_grad():
        recorder.begin_sequence(0)
        model(PROMPT[:, :5])
    for handle in handles:
        handle.remove()
    means = vectors.means()
    hidden, ids = hidden_of_site[1]
    for expert in range(8):
        token_rows = hidden[(ids == expert).any(dim=1)]
        if not len(token_rows):
            assert vectors.counts[1, expert] == 0
            assert not means[1, expert].any()
            continue
        gate_up, down = sites[1].experts.gate_up_proj[expert], sites[1].experts.down_proj[expert]
        gate, up = (token_rows @ gate_up.T).chunk(2, dim=-1)
        expected = ((torch.nn.functional.silu(gate) * up) @ down.T).mean(dim=0)
        assert torch.allclose(means[1, expert], expected.detach(), atol=1e-6)
    assert (vectors.counts == 0).any(), "every pair was seen, so the zero rule was not tested"


def test_the_predictor_adds_gate_weighted_default_vectors(tiny) -> None:
    model = tiny("qwen3_moe")
    sites, residuals, routed, _ = run_with_residuals(model, torch.zeros(0))
    torch.manual_seed(3)
    vectors = torch.randn(len(sites), 8, 64)
    predictor = QuasiHidden(sites, vectors)
    handles = predictor.attach()
    with torch.no_grad():
        model(PROMPT)
        weights, ids = routed[0][0], routed[0][1]
        found, _ = predictor.predict(0, ids, weights)
        default = torch.stack(
            [sum(w * vectors[0, e] for w, e in zip(ws, es, strict=True)) for ws, es in zip(weights, ids, strict=True)]
        )
        expected, _ = sites[1].route(residuals[0].reshape(-1, 64) + default)
    for handle in handles:
        handle.remove()
    assert torch.equal(found, expected)


def test_models_with_batches_are_refused_by_capture(tiny) -> None:
    model = tiny("mixtral")
    recorder = RoutingRecorder(model, discover(model), lambda rows: None)
    with recorder, pytest.raises(ValueError, match="batch size 1"), torch.no_grad():
        model(torch.zeros(2, 3, dtype=torch.long))
