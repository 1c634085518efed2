"""All experts of a layer as three batched products over equal blocks of tokens.

Tokens are sorted by expert and cut into blocks of `BLOCK_ROWS` rows, the last block of an expert being padded.
The number of blocks is bounded by `T * K / BLOCK_ROWS + E`, so every step has the same shapes: the CPU library
builds its kernels once, and a layer needs a few large calls where a loop over experts needs hundreds of small ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Where each (token, rank) pair sits among the N padded blocks of B rows.

    row_of_pair [T * K]: row of each pair; token_of_row and pair_of_row [N * B]: the way back (0 for padding);
    is_real [N * B, 1]: 1 for rows that hold a pair, else 0; expert_of_block [N].
    """

    row_of_pair: Tensor
    token_of_row: Tensor
    pair_of_row: Tensor
    is_real: Tensor
    expert_of_block: Tensor


def plan_blocks(experts: Tensor, *, num_experts: int, block_rows: int = BLOCK_ROWS) -> tuple[BlockPlan, Tensor]:
    """The block plan of a routing [T, K] (int64), and the number of pairs of each expert [E]."""
    top_k = experts.shape[1]
    flat = experts.reshape(-1)
    num_pairs = flat.numel()
    num_blocks = num_pairs // block_rows + num_experts
    counts = torch.bincount(flat, minlength=num_experts)
    blocks = (counts + block_rows - 1) // block_rows
    block_ends = blocks.cumsum(0)
    order = flat.to(torch.uint8 if num_experts < 256 else torch.int64).argsort(stable=True)
    shift = (block_ends - blocks) * block_rows - (counts.cumsum(0) - counts)
    row_of_sorted = torch.arange(num_pairs) + shift[flat[order]]
    row_of_pair = torch.empty_like(flat).scatter_(0, order, row_of_sorted)
    pair_of_row = torch.zeros(num_blocks * block_rows, dtype=torch.int64).scatter_(0, row_of_sorted, order)
    is_real = torch.zeros(num_blocks * block_rows, 1).scatter_(0, row_of_sorted[:, None], 1.0)
    expert_of_block = torch.searchsorted(block_ends, torch.arange(num_blocks), right=True).clamp_(max=num_experts - 1)
    plan = BlockPlan(row_of_pair, pair_of_row // top_k, pair_of_row, is_real, expert_of_block)
    return plan, counts


class _BlockedExperts(torch.autograd.Function):
    """Gated experts (SiLU) over a block plan, with a backward that only gathers."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gates: Tensor, gate: Tensor, up: Tensor, down: Tensor, plan: BlockPlan
    ) -> Tensor:
        """Weighted sum of the chosen experts [T, H]; gates [T, K], gate and up [E, I, H], down [E, H, I]."""
        num_blocks = plan.expert_of_block.numel()
        rows = hidden.index_select(0, plan.token_of_row).view(num_blocks, -1, hidden.shape[1])
        block_gate, block_up, block_down = (w.index_select(0, plan.expert_of_block) for w in (gate, up, down))
        gated = torch.bmm(rows, block_gate.transpose(1, 2))
        lifted = torch.bmm(rows, block_up.transpose(1, 2))
        squashed = gated.sigmoid()
        active = gated * squashed * lifted
        outputs = torch.bmm(active, block_down.transpose(1, 2)).flatten(0, 1)
        per_pair = outputs.index_select(0, plan.row_of_pair).view(*gates.shape, -1)
        ctx.save_for_backward(rows, block_gate, block_up, block_down, gated, lifted, squashed, active, per_pair, gates)
        ctx.plan = plan
        ctx.num_experts = gate.shape[0]
        return torch.bmm(gates.unsqueeze(1), per_pair).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None]:
        """Gradients of hidden, gates and the three weights; padded rows have weight 0 and so none."""
        rows, block_gate, block_up, block_down, gated, lifted, squashed, active, per_pair, gates = ctx.saved_tensors
        plan: BlockPlan = ctx.plan
        grad = grads[0].contiguous()
        grad_gates = torch.bmm(per_pair, grad.unsqueeze(2)).squeeze(2)
        weight = gates.reshape(-1).index_select(0, plan.pair_of_row).unsqueeze(1) * plan.is_real.to(gates.dtype)
        grad_rows = (grad.index_select(0, plan.token_of_row) * weight).view(rows.shape)
        grad_active = torch.bmm(grad_rows, block_down)
        grad_down = _sum_blocks(torch.bmm(grad_rows.transpose(1, 2), active), plan, ctx.num_experts)
        grad_lifted = grad_active * (gated * squashed)
        grad_gated = grad_active * lifted * squashed * (1 + gated * (1 - squashed))
        grad_gate = _sum_blocks(torch.bmm(grad_gated.transpose(1, 2), rows), plan, ctx.num_experts)
        grad_up = _sum_blocks(torch.bmm(grad_lifted.transpose(1, 2), rows), plan, ctx.num_experts)
        grad_inputs = torch.baddbmm(torch.bmm(grad_gated, block_gate), grad_lifted, block_up).flatten(0, 1)
        grad_hidden = grad_inputs.index_select(0, plan.row_of_pair).view(*gates.shape, -1).sum(1)
        return grad_hidden, grad_gates, grad_gate, grad_up, grad_down, None


def _sum_blocks(blocks: Tensor, plan: BlockPlan, num_experts: int) -> Tensor:
    """Add the per-block weight gradients [N, ...] of each expert: [E, ...]."""
    total = blocks.new_zeros(num_experts, *blocks.shape[1:])
    return total.index_add_(0, plan.expert_of_block, blocks)


def run_experts(hidden: Tensor, gates: Tensor, experts: tuple[Tensor, Tensor, Tensor], plan: BlockPlan) -> Tensor:
    """Output of a layer's experts (gate, up, down) [T, H] for tokens [T, H] with mixing weights `gates` [T, K]."""
    result: Tensor = _BlockedExperts.apply(hidden, gates, *experts, plan)  # type: ignore[no-untyped-call]
    return result
