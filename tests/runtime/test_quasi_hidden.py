"""The quasi-hidden state q_l: what it is made of, and what it must give where its approximations are lifted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.capture import measure_default_vectors
from runtime.default_vectors import LayerDefaults, load_default_vectors, save_default_vectors
from runtime.models import LoadedModel
from runtime.offloading import offloaded
from runtime.predictors import QuasiHidden
from runtime.remainder import block_path
from simulator.policies.config import parse_config
from tests.runtime.tiny_models import HIDDEN, NUM_EXPERTS, SIZES, architectures, tiny_model
from trace_capture.hooks import MoeSite, RoutingRecorder, discover, model_shape

PROMPT = torch.arange(3, 15)[None]
TOKEN = PROMPT[:, :1]
MODEL_TYPES = [one.model_type for one in architectures() if one.model_type != "inkling2_loop_text"]
SEVERAL_STREAMS = {"deepseek_v4", "hy_v4", "qwen4_exp", "qwen4_exp_text"}
"""Their blocks pass on several streams that are mixed in front of the router."""
BLOCKS = [
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "qwen2_moe",
    "qwen3_next",
]


def defaults_of(model: torch.nn.Module, sites: list[MoeSite], ids: torch.Tensor) -> LayerDefaults:
    shape = model_shape(model, sites, "tiny")
    return measure_default_vectors(LoadedModel(model, None, ""), sites, shape, [ids]).defaults()


class Watched:
    """One forward pass under a predictor's hooks: inputs of blocks, routing, and outputs of modules by path."""

    def __init__(self, model: torch.nn.Module, sites: list[MoeSite], ids: torch.Tensor, *paths: str) -> None:
        self.blocks: dict[int, torch.Tensor] = {}
        self.routed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.predictor = QuasiHidden(sites, torch.zeros(len(sites), NUM_EXPERTS, HIDDEN))
        handles = self.predictor.attach()
        for site in sites:

            def keep_block(_: Any, args: Any, kwargs: Any, index: int = site.index) -> None:
                self.blocks[index] = next(item for item in (*args, *kwargs.values()) if item is not None).clone()

            def keep_routing(_: Any, __: Any, output: Any, index: int = site.index) -> None:
                weights, ids = (item.reshape(-1, item.shape[-1]) for item in output[1:3])
                self.routed[index] = (ids, weights)

            block = model.get_submodule(block_path(site))
            handles.append(block.register_forward_pre_hook(keep_block, with_kwargs=True))
            handles.append(site.router.register_forward_hook(keep_routing))
        for path in paths:

            def keep_output(_: Any, __: Any, output: Any, path: str = path) -> None:
                self.outputs[path] = (output[0] if isinstance(output, tuple) else output).clone()

            handles.append(model.get_submodule(path).register_forward_hook(keep_output))
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        for handle in handles:
            handle.remove()

    def residual(self, layer: int) -> torch.Tensor:
        return self.predictor._residual[layer].reshape(-1, HIDDEN)


@pytest.mark.parametrize("model_type", BLOCKS)
def test_residual_and_block_output_are_the_next_blocks_input_bit_for_bit(model_type: str) -> None:
    """r_l is the right tensor: with the output of the whole Mixture-of-Experts module, shared experts included, it
    makes exactly what block l+1 is given."""
    model = tiny_model(model_type)
    sites = discover(model)
    paths = [site.path.rpartition(".")[0] for site in sites]
    seen = Watched(model, sites, PROMPT, *paths)
    for site, path in zip(sites[:-1], paths, strict=False):
        total = seen.residual(site.index) + seen.outputs[path].reshape(-1, HIDDEN)
        assert torch.equal(total, seen.blocks[site.index + 1].reshape(-1, HIDDEN))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_means_over_one_token_make_that_tokens_next_block_input(model_type: str) -> None:
    """Means over one token are its true values, so d_l + r_l must be what block l+1 is given: experts, shared experts
    gated or not, scales, norms and dense layers in between, none twice and none left out."""
    model = tiny_model(model_type)
    sites = discover(model)
    defaults = defaults_of(model, sites, TOKEN)
    seen = Watched(model, sites, TOKEN)
    predictor = QuasiHidden(sites, defaults)
    predictor._residual = seen.predictor._residual
    for site in sites[:-1]:
        block = seen.blocks[site.index + 1]
        state = predictor.state(site.index, *seen.routed[site.index])
        assert (block.numel() != HIDDEN) == (model_type in SEVERAL_STREAMS)
        if block.numel() == HIDDEN:
            assert torch.allclose(state, block.reshape(-1, HIDDEN), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("model_type", BLOCKS)
def test_without_attention_and_with_the_true_output_recall_is_100_percent(model_type: str) -> None:
    """What is left out of q_l is the next layer's attention and nothing else."""
    model = tiny_model(model_type)
    sites = discover(model)
    for site in sites:
        block = model.get_submodule(block_path(site))
        mixer = getattr(block, "self_attn", None) or block.linear_attn
        mixer.register_forward_hook(lambda _, __, out: (0 * out[0], *out[1:]) if isinstance(out, tuple) else 0 * out)
    for token in range(3, 11):
        ids = torch.tensor([[token]])
        defaults = defaults_of(model, sites, ids)
        seen = Watched(model, sites, ids)
        predictor = QuasiHidden(sites, defaults)
        predictor._residual = seen.predictor._residual
        for site in sites[:-1]:
            with torch.no_grad():
                found, weights = predictor.predict(site.index, *seen.routed[site.index])
            true_ids, true_weights = seen.routed[site.index + 1]
            assert set(found.flatten().tolist()) == set(true_ids.flatten().tolist())
            assert torch.allclose(weights.sort().values, true_weights.sort().values, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "shared", "gate"),
    [
        ("deepseek_v2", "shared_experts", None),
        ("glm4_moe", "shared_experts", None),
        ("qwen2_moe", "shared_expert", "shared_expert_gate"),
        ("qwen3_5_moe_text", "shared_expert", "shared_expert_gate"),
    ],
)
def test_what_stands_beside_is_the_mean_of_the_shared_expert(model_type: str, shared: str, gate: str | None) -> None:
    model = tiny_model(model_type)
    sites = discover(model)
    parts = [site.path.rpartition(".")[0] for site in sites]
    names = [f"{part}.{name}" for part in parts for name in (shared, gate) if name]
    seen = Watched(model, sites, PROMPT, *names)
    beside = defaults_of(model, sites, PROMPT).beside
    assert beside is not None
    for site, part in zip(sites[:-1], parts, strict=False):
        output = seen.outputs[f"{part}.{shared}"].reshape(-1, HIDDEN)
        share = seen.outputs[f"{part}.{gate}"].reshape(-1, 1).sigmoid() if gate else 1.0
        assert torch.allclose(beside[site.index], (share * output).mean(dim=0), atol=1e-5)
    assert not beside[-1].any(), "the last layer predicts nothing"


def test_without_anything_beside_the_experts_the_file_is_as_before(tmp_path: Any) -> None:
    model = tiny_model("mixtral").to(torch.bfloat16)
    sites = discover(model)
    shape = model_shape(model, sites, "tiny")
    vectors = measure_default_vectors(LoadedModel(model, None, ""), sites, shape, [PROMPT])
    assert vectors.beside is not None and not vectors.beside.any(), "rounding was taken for a shared expert"
    save_default_vectors(vectors, tmp_path / "v.safetensors", "test")
    assert set(load_file(tmp_path / "v.safetensors")) == {"vectors", "counts"}
    assert load_default_vectors(tmp_path / "v.safetensors").beside is None


def test_what_stands_beside_survives_its_file_and_older_files_are_read(tmp_path: Any) -> None:
    model = tiny_model("deepseek_v2")
    sites = discover(model)
    shape = model_shape(model, sites, "tiny")
    vectors = measure_default_vectors(LoadedModel(model, None, ""), sites, shape, [PROMPT])
    path = tmp_path / "v.safetensors"
    save_default_vectors(vectors, path, "test")
    found = load_default_vectors(path)
    assert found.beside is not None and vectors.beside is not None
    assert torch.allclose(found.beside, vectors.beside, atol=1e-3)
    save_file({name: value for name, value in load_file(path).items() if name != "beside"}, path)
    assert torch.equal(load_default_vectors(path).vectors, found.vectors)
    assert load_default_vectors(path).beside is None


@pytest.mark.parametrize("model_type", ["deepseek_v2", "glm4_moe_lite"])
def test_the_first_moe_layer_is_native_behind_dense_layers(model_type: str) -> None:
    """One prediction per token for each Mixture-of-Experts layer but the first: 25 for DeepSeek-V2-Lite's 26."""
    model = tiny_model(model_type)
    sites = discover(model)
    assert [site.decoder_layer for site in sites] == list(range(1, SIZES["num_hidden_layers"]))
    raw = {"cache": {"budget_ratio": 0.25}, "prefetch": {"source": "quasi-hidden", "mode": "commit"}}
    fast = {"device": {"h2d_bytes_per_s": 1e10, "latency_ns": 0}}
    with offloaded(model, parse_config(raw | fast), default_vectors=defaults_of(model, sites, PROMPT)) as engine:
        with torch.no_grad():
            model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=6, do_sample=False)
        assert [layer.tokens for layer in engine.recall] == [0, 5, 5]
        rows: list[Any] = []
    recorder = RoutingRecorder(model, sites, rows.append, QuasiHidden(sites, defaults_of(model, sites, PROMPT)))
    with recorder, torch.no_grad():
        recorder.begin_sequence(0)
        model(input_ids=PROMPT, use_cache=False)
    predicted = rows[0]["predicted:quasi-hidden"]
    assert (predicted[:, 0] == 0xFFFF).all() and (predicted[:, 1:] < NUM_EXPERTS).all()
