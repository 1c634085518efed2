"""The Qwen3-MoE forward pass for training: weights stacked over layers, experts in padded blocks.

It equals `transformers.Qwen3MoeForCausalLM` (a test holds them together); only the order of sums differs.
Shapes: B windows, S tokens each, T = B * S, H hidden, L layers, E experts, K top-k, I expert size, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from runtime.demo_training.experts import plan_blocks, run_experts
from runtime.demo_training.norm import rms_norm
from runtime.demo_training.settings import NetworkShape

Weights = dict[str, Tensor]
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Output:
    """Final normalised states [T, H], and the two router losses averaged over layers (scalars)."""

    hidden: Tensor
    balance_loss: Tensor
    router_z_loss: Tensor


def initial_weights(shape: NetworkShape, seed: int) -> Weights:
    """Fresh fp32 weights: normal with deviation 0.02, residual outputs smaller by the root of twice the depth."""
    generator = torch.Generator().manual_seed(seed)
    layers, hidden, inner = shape.num_layers, shape.hidden_size, shape.expert_size
    query, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    sizes = {
        "embedding": (shape.vocabulary_size, hidden),
        "q": (layers, query, hidden),
        "k": (layers, keys, hidden),
        "v": (layers, keys, hidden),
        "o": (layers, hidden, query),
        "router": (layers, shape.num_experts, hidden),
        "gate": (layers, shape.num_experts, inner, hidden),
        "up": (layers, shape.num_experts, inner, hidden),
        "down": (layers, shape.num_experts, hidden, inner),
    }
    weights = {name: torch.randn(size, generator=generator) * 0.02 for name, size in sizes.items()}
    for name in ("o", "down"):
        weights[name] /= math.sqrt(2 * layers)
    for name, size in (("q_norm", shape.head_size), ("k_norm", shape.head_size), ("in_norm", hidden)):
        weights[name] = torch.ones(layers, size)
    weights["moe_norm"] = torch.ones(layers, hidden)
    weights["final_norm"] = torch.ones(hidden)
    return weights


def forward(weights: Weights, tokens: Tensor, shape: NetworkShape) -> Output:
    """Run the network on tokens [B, S] (int64) in the precision of `weights`."""
    num_windows, length = tokens.shape
    residual = functional.embedding(tokens.reshape(-1), weights["embedding"])
    rotation = _rotation(length, shape, residual.dtype)
    stacks = {name: weights[name].unbind(0) for name in weights if name not in ("embedding", "final_norm")}
    balance, z_loss = [], []
    for layer in range(shape.num_layers):
        own = {name: stack[layer] for name, stack in stacks.items()}
        normed = rms_norm(residual, own["in_norm"], shape.norm_epsilon)
        residual = residual + _attention(own, normed.view(num_windows, length, -1), rotation, shape)
        normed = rms_norm(residual, own["moe_norm"], shape.norm_epsilon)
        mixed, layer_balance, layer_z = _experts_layer(own, normed, shape)
        residual = residual + mixed
        balance.append(layer_balance)
        z_loss.append(layer_z)
    hidden = rms_norm(residual, weights["final_norm"], shape.norm_epsilon)
    return Output(hidden, torch.stack(balance).mean(), torch.stack(z_loss).mean())


def logits(weights: Weights, tokens: Tensor, shape: NetworkShape) -> Tensor:
    """Logits [B, S, V] of tokens [B, S], without gradients."""
    with torch.no_grad():
        hidden = forward(weights, tokens, shape).hidden
        return (hidden @ weights["embedding"].t()).view(*tokens.shape, -1)


def _rotation(length: int, shape: NetworkShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [S, D] of the rotary position embedding."""
    exponents = torch.arange(0, shape.head_size, 2).float() / shape.head_size
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-exponents)
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding to x [B, heads, S, D]."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


def _attention(own: Weights, x: Tensor, rotation: tuple[Tensor, Tensor], shape: NetworkShape) -> Tensor:
    """Causal grouped-query attention of x [B, S, H]: [T, H]. Query heads of one key head are stacked along S.

    Written out because the backward pass of torch's fused CPU attention takes a quarter of a step at this size.
    """
    num_windows, length, _ = x.shape
    heads = (num_windows, length, -1, shape.head_size)
    query = rms_norm((x @ own["q"].t()).view(heads), own["q_norm"], shape.norm_epsilon).transpose(1, 2)
    key = rms_norm((x @ own["k"].t()).view(heads), own["k_norm"], shape.norm_epsilon).transpose(1, 2)
    value = (x @ own["v"].t()).view(heads).transpose(1, 2)
    groups = shape.num_heads // shape.num_kv_heads
    query = _rotate(query, rotation).reshape(-1, groups * length, shape.head_size) * shape.head_size**-0.5
    key = _rotate(key, rotation).reshape(-1, length, shape.head_size)
    value = value.reshape(-1, length, shape.head_size)
    future = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1).repeat(groups, 1)
    weights = torch.baddbmm(future, query, key.transpose(1, 2)).softmax(-1)
    attended = torch.bmm(weights, value).view(num_windows, shape.num_heads, length, shape.head_size)
    return attended.transpose(1, 2).reshape(num_windows * length, -1) @ own["o"].t()


def _experts_layer(own: Weights, x: Tensor, shape: NetworkShape) -> tuple[Tensor, Tensor, Tensor]:
    """Route x [T, H], run the chosen experts; their mix [T, H], the load-balance and the router z-loss."""
    scores = (x @ own[ROUTER].t()).float()
    z_loss = scores.logsumexp(-1).square().mean()
    probabilities = scores.softmax(-1)
    chosen, experts = probabilities.topk(shape.top_k, dim=-1)
    gates = (chosen / chosen.sum(-1, keepdim=True)).to(x.dtype)
    plan, counts = plan_blocks(experts, num_experts=shape.num_experts)
    mixed = run_experts(x, gates, (own["gate"], own["up"], own["down"]), plan)
    load = counts.float() / experts.numel()
    return mixed, shape.num_experts * (load * probabilities.mean(0)).sum(), z_loss
