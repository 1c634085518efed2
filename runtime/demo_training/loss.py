"""Next-token loss with the tied output layer folded in: logits exist for a few hundred tokens at a time.

The whole logit matrix [T, 4096] in fp32 would be written and read several times a step; a chunk stays in cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_TOKENS = 256


class _TiedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy against next tokens mixed with a teacher's distribution; the gradient comes on the way."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, embedding: Tensor, targets: Tensor, teacher_logits: Tensor | None, ratio: float
    ) -> Tensor:
        """Loss (scalar, fp32) of hidden [T, H] through embedding [V, H]; targets [T]; teacher_logits [T, V]."""
        num_tokens = hidden.shape[0]
        grad_hidden = torch.empty_like(hidden)
        grad_embedding = torch.zeros_like(embedding, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32)
        for start in range(0, num_tokens, CHUNK_TOKENS):
            span = slice(start, start + CHUNK_TOKENS)
            logits = (hidden[span] @ embedding.t()).float()
            log_probs = logits.log_softmax(-1)
            target = targets[span, None]
            total -= log_probs.gather(1, target).sum() * (1.0 - ratio)
            grad = log_probs.exp()
            grad.scatter_add_(1, target, torch.full(target.shape, ratio - 1.0))
            if teacher_logits is not None:
                teacher = teacher_logits[span].float().softmax(-1).mul_(ratio)
                total -= (teacher * log_probs).sum()
                grad -= teacher
            scaled = (grad / num_tokens).to(hidden.dtype)
            grad_hidden[span] = scaled @ embedding
            grad_embedding += scaled.t() @ hidden[span]
        ctx.save_for_backward(grad_hidden, grad_embedding.to(embedding.dtype))
        return total / num_tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Scale the gradients that the forward pass has left."""
        grad_hidden, grad_embedding = ctx.saved_tensors
        scale = grads[0].to(grad_hidden.dtype)
        return grad_hidden * scale, grad_embedding * scale, None, None, None


def tied_cross_entropy(
    hidden: Tensor,
    embedding: Tensor,
    targets: Tensor,
    *,
    teacher_logits: Tensor | None = None,
    teacher_ratio: float = 0.0,
) -> Tensor:
    """Mean loss in nats per token; `teacher_ratio` of it against the teacher's distribution."""
    ratio = teacher_ratio if teacher_logits is not None else 0.0
    result: Tensor = _TiedCrossEntropy.apply(hidden, embedding, targets, teacher_logits, ratio)  # type: ignore[no-untyped-call]
    return result
