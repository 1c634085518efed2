"""Muon: momentum whose matrix updates are made orthogonal, for whole stacks of matrices at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Quintic Newton-Schulz coefficients of the published method: fast growth of small singular values, which then
# stay within about 0.7..1.2 instead of converging to 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, *, num_steps: int = 5) -> Tensor:
    """Nearest near-orthogonal matrices of a stack [..., rows, columns], in the stack's precision."""
    a, b, c = _QUINTIC
    stack = matrices.flatten(0, -3) if matrices.dim() > 2 else matrices.unsqueeze(0)
    is_tall = stack.shape[-2] > stack.shape[-1]
    x = stack.transpose(1, 2) if is_tall else stack
    x = x / (x.float().square().sum((1, 2), keepdim=True).sqrt() + 1e-7).to(x.dtype)
    for _ in range(num_steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.transpose(1, 2) if is_tall else x).reshape(matrices.shape)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, for parameters [..., rows, columns]."""

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float = 0.03,
        momentum: float = 0.95,
        weight_decay: float = 0.05,
        update_scale: float = 0.5,
        precision: torch.dtype = torch.bfloat16,
    ) -> None:
        self._precision = precision
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "update_scale": update_scale}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; there is no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """One step of one stack of matrices."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum"]
        buffer.lerp_(grad, 1.0 - group["momentum"])
        direction = torch.lerp(grad, buffer, group["momentum"]).to(self._precision)
        rows, columns = parameter.shape[-2:]
        rate = group["lr"] * group["update_scale"] * max(1.0, rows / columns) ** 0.5
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(orthogonalise(direction).to(parameter.dtype), alpha=-rate)
