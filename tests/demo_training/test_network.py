"""The training network is the stock `transformers` network: logits, gradients, and through a saved folder."""

import pytest
import torch
from torch.nn import functional

from runtime.demo_training.experts import plan_blocks
from runtime.demo_training.export import as_model, check_same_network, load_weights, save_model
from runtime.demo_training.loss import tied_cross_entropy
from runtime.demo_training.network import forward, initial_weights, logits
from runtime.demo_training.norm import rms_norm
from runtime.demo_training.settings import PRESETS, NetworkShape
from runtime.demo_training.tokenizer import train_tokenizer
from trace_capture.errors import ModelError, StudioError

SHAPES = {
    "grouped": NetworkShape(
        hidden_size=48, num_layers=3, num_experts=8, top_k=3, expert_size=24, num_heads=4, num_kv_heads=2, head_size=16
    ),
    "top-1": NetworkShape(
        hidden_size=32, num_layers=2, num_experts=4, top_k=1, expert_size=16, num_heads=2, num_kv_heads=2, head_size=16
    ),
    "draft": PRESETS["draft"].shape,
}


def _lively_weights(shape, seed=0):
    """Weights large enough for confident routers and norms other than one, so that an error would show."""
    weights = initial_weights(shape, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name in weights:
        if "norm" in name:
            weights[name] += 0.2 * torch.randn(weights[name].shape, generator=generator)
        else:
            weights[name] *= 4
    return weights


def _tokens(shape, *size):
    return torch.randint(0, shape.vocabulary_size, size, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name):
    shape = SHAPES[name]
    weights = _lively_weights(shape)
    tokens = _tokens(shape, 3, 70)
    with torch.no_grad():
        expected = as_model(weights, shape)(tokens).logits
    assert expected.std() > 0.1
    assert (logits(weights, tokens, shape) - expected).abs().max() < 1e-4


def test_gradients_equal_transformers():
    shape = SHAPES["grouped"]
    tokens = _tokens(shape, 2, 65)
    weights = {name: weight.requires_grad_() for name, weight in _lively_weights(shape).items()}
    hidden = forward(weights, tokens[:, :-1], shape).hidden
    loss = tied_cross_entropy(hidden, weights["embedding"], tokens[:, 1:].reshape(-1))
    loss.backward()
    model = as_model(weights, shape)
    expected = functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].reshape(-1))
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(weights["embedding"].grad, model.model.embed_tokens.weight.grad, atol=1e-6, rtol=1e-4)
    for index, layer in enumerate(model.model.layers):
        pairs = {
            "down": layer.mlp.experts.down_proj,
            "router": layer.mlp.gate.weight,
            "q": layer.self_attn.q_proj.weight,
            "k_norm": layer.self_attn.k_norm.weight,
            "moe_norm": layer.post_attention_layernorm.weight,
        }
        for name, parameter in pairs.items():
            torch.testing.assert_close(weights[name].grad[index], parameter.grad, atol=1e-6, rtol=1e-4)
        fused = torch.cat([weights["gate"].grad[index], weights["up"].grad[index]], dim=1)
        torch.testing.assert_close(fused, layer.mlp.experts.gate_up_proj.grad, atol=1e-6, rtol=1e-4)


def test_block_plan_places_each_pair_once():
    experts = torch.tensor([[0, 3], [3, 1], [3, 0], [3, 1], [3, 0]])
    plan, counts = plan_blocks(experts, num_experts=4, block_rows=2)
    assert counts.tolist() == [3, 2, 0, 5]
    assert len(set(plan.row_of_pair.tolist())) == experts.numel()
    assert plan.is_real.sum() == experts.numel()
    assert torch.equal(plan.expert_of_block[plan.row_of_pair // 2], experts.reshape(-1))
    assert torch.equal(plan.token_of_row[plan.row_of_pair], torch.arange(5).repeat_interleave(2))


def test_block_plan_holds_the_worst_routing():
    everything_at_the_last = torch.full((64, 1), 7)
    plan, _ = plan_blocks(everything_at_the_last, num_experts=8, block_rows=16)
    assert torch.equal(plan.expert_of_block[plan.row_of_pair // 16], everything_at_the_last.reshape(-1))


def test_norm_gradient_equals_autograd():
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float32)
    weight = torch.linspace(0.5, 1.5, 16)
    results = []
    for norm in (lambda a, w: rms_norm(a, w, 1e-6), lambda a, w: functional.rms_norm(a, (16,), w, 1e-6)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        norm(*leaves).square().mul(torch.arange(16.0)).sum().backward()
        results.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


def test_loss_against_a_teacher_is_the_mixed_cross_entropy():
    generator = torch.Generator().manual_seed(5)
    hidden, embedding = torch.randn(300, 8, generator=generator), torch.randn(40, 8, generator=generator)
    teacher, targets = torch.randn(300, 40, generator=generator), torch.arange(300) % 40
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, embedding)]
    loss = tied_cross_entropy(*leaves, targets, teacher_logits=teacher, teacher_ratio=0.7)
    loss.backward()
    plain = [tensor.clone().requires_grad_() for tensor in (hidden, embedding)]
    scores = plain[0] @ plain[1].t()
    mixed = 0.3 * functional.cross_entropy(scores, targets)
    mixed = mixed + 0.7 * functional.cross_entropy(scores, teacher.softmax(-1))
    mixed.backward()
    torch.testing.assert_close(loss, mixed)
    torch.testing.assert_close([leaf.grad for leaf in leaves], [leaf.grad for leaf in plain], atol=1e-6, rtol=1e-4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shape = SHAPES["grouped"]
    weights = _lively_weights(shape)
    tokenizer = train_tokenizer(["some words " * 50], vocabulary_size=300)
    save_model(folder, weights, shape, tokenizer, {"do_sample": True, "temperature": 0.8})
    return folder, weights, shape


def test_saved_folder_gives_the_weights_back(saved):
    folder, weights, shape = saved
    loaded, loaded_shape = load_weights(folder)
    assert loaded_shape == shape
    assert set(loaded) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight.to(torch.bfloat16).float()), name
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_different_network_is_noticed(saved):
    folder, weights, shape = saved
    other = {**weights, "down": weights["down"].flip(1)}
    with pytest.raises(StudioError, match="differs from the trained one"):
        check_same_network(folder, other, shape)


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no model in"):
        load_weights(tmp_path)
