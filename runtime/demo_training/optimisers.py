"""Who updates what: Muon for the matrices, AdamW for embedding, norms and routers (at half rate)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime.demo_training.muon import Muon
from runtime.demo_training.network import MATRICES, ROUTER, Weights
from runtime.demo_training.settings import TrainingSettings

_CLIP_NORM = 1.0


class Optimisers:
    """Both optimisers of a run, stepped together at a shared rate factor."""

    def __init__(self, weights: Weights, settings: TrainingSettings) -> None:
        others = [name for name in weights if name not in MATRICES and name != ROUTER]
        self._clipped = [weights[name] for name in (*others, ROUTER)]
        precision = getattr(torch, settings.precision)
        self._muon = Muon([weights[name] for name in MATRICES], lr=settings.muon_rate, precision=precision)
        groups: list[dict[str, Any]] = [
            {"params": [weights[name] for name in others], "lr": settings.adam_rate},
            {"params": [weights[ROUTER]], "lr": settings.adam_rate / 2},
        ]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self._full_rates = [group["lr"] for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [*self._muon.param_groups, *self._adam.param_groups]

    def step(self, rate_ratio: float) -> None:
        """Update all weights at `rate_ratio` of the full rates, and clear the gradients."""
        for group, rate in zip(self._groups(), self._full_rates, strict=True):
            group["lr"] = rate * rate_ratio
        torch.nn.utils.clip_grad_norm_(self._clipped, _CLIP_NORM)
        for optimiser in (self._muon, self._adam):
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to continue exactly."""
        return {"muon": self._muon.state_dict(), "adam": self._adam.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])


def precise_copies(weights: Weights, precision: str) -> Weights:
    """The weights in training precision, linked to the fp32 masters so that gradients flow back."""
    dtype = getattr(torch, precision)
    return {name: weight.to(dtype) for name, weight in weights.items()}


def trainable(weights: Weights) -> dict[str, Tensor]:
    """The weights as leaves that collect gradients."""
    return {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
