"""What an estimator learns from: quasi-hidden states of an untouched model beside what its routers then said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from runtime.default_vectors import LayerDefaults
from runtime.predictors import QuasiHidden
from trace_capture.hooks import CausalModel, MoeSite

_SMALL_ERROR = 1e-2


@dataclass(frozen=True, eq=False)
class Observed:
    """One window of T tokens; entry l of each first axis [L-1] is about foreseeing MoE layer l+1.

    Attributes:
        states: q_l, the quasi-hidden state behind the norm of layer l+1 [L-1, T, H].
        targets: distribution of the true router of layer l+1 [L-1, T, E], float32.
        router_ids: what that router makes of q_l [L-1, T, K].
        true_ids: what it chose [L-1, T, K].
        weight_sums: sum of its K weights [L-1, T], float32.
    """

    states: Tensor
    targets: Tensor
    router_ids: Tensor
    true_ids: Tensor
    weight_sums: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        tensors = (getattr(self, item.name) for item in fields(self))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class RoutingReader:
    """Runs token windows through a model under hooks; a context manager that leaves the model as it was.

    Args:
        model: an untouched transformers causal language model.
        sites: of `discover`.
        defaults: default vectors [L, E, H], alone or with what comes beside them.
        cache_bytes: windows are remembered, and not run again, until they take this much memory.
    """

    def __init__(
        self, model: CausalModel, sites: Sequence[MoeSite], defaults: Tensor | LayerDefaults, cache_bytes: int = 0
    ) -> None:
        self._model = model
        self._sites = sites
        self._quasi = QuasiHidden(sites, defaults)
        self._handles: list[RemovableHandle] = []
        self._rows: dict[str, list[Tensor]] = {}
        self._cache: dict[int, Observed] = {}
        self._free_bytes = cache_bytes

    def __enter__(self) -> RoutingReader:
        self._handles = self._quasi.attach()
        self._handles += [site.router.register_forward_hook(self._hook(site)) for site in self._sites]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._cache.clear()

    def read(self, number: int, window: Tensor) -> Observed:
        """Observe window `number`, token ids [1, T]; equal numbers must mean equal windows."""
        if number in self._cache:
            return self._cache[number]
        self._rows = {item.name: [] for item in fields(Observed)}
        with torch.no_grad():
            self._model(input_ids=window, use_cache=False)
        observed = Observed(**{name: torch.stack(rows) for name, rows in self._rows.items()})
        self._rows = {}
        if observed.num_bytes <= self._free_bytes:
            self._free_bytes -= observed.num_bytes
            self._cache[number] = observed
        return observed

    def _hook(self, site: MoeSite) -> Callable[..., None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            weights, ids = (item.reshape(-1, item.shape[-1]) for item in output[1:3])
            if site.index > 0:
                self._rows["targets"].append(router_distribution(site, output[0], weights, ids))
                self._rows["true_ids"].append(ids)
                self._rows["weight_sums"].append(weights.to(torch.float32).sum(dim=-1))
            if site.index + 1 < len(self._sites):
                following = self._sites[site.index + 1]
                state = self._quasi.state(site.index, ids, weights)
                self._rows["states"].append(following.normed(state))
                self._rows["router_ids"].append(following.route(state)[0])

        return hook


def router_distribution(site: MoeSite, first: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The distribution over all E experts that a router chose from.

    Routers give (logits, weights, ids); which rule made weights of logits is read off the numbers:

    - softmax (Mixtral, Qwen, OLMoE, GPT-OSS, DeepSeek-V2): softmax of the logits over all E;
    - sigmoid (GLM-4, DeepSeek-V3): sigmoid scores plus the correction bias that the choice is made by, negatives cut
      off, made to sum to 1; limits to groups of experts are left to the estimator to learn;
    - a first item that is a distribution already is taken as it is;
    - a first item that has not E entries: the K weights, made to sum to 1, zero elsewhere.

    Args:
        site: of `discover`.
        first: first item of the router's output, [T, E] or [1, T, E].
        weights, ids: of the router, each [T, K].

    Returns:
        [T, E], float32, rows sum to 1.
    """
    num_experts = int(site.experts.num_experts)  # type: ignore[arg-type]
    shares = weights.to(torch.float32)
    shares = shares / shares.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    if first.numel() != ids.shape[0] * num_experts:
        return torch.zeros(ids.shape[0], num_experts, device=ids.device).scatter_(-1, ids, shares)
    scores = first.reshape(-1, num_experts).to(torch.float32)
    sums = scores.sum(dim=-1)
    if bool((scores >= 0).all()) and bool(((sums - 1).abs() < _SMALL_ERROR).all()):
        return scores / sums.unsqueeze(-1)
    chosen = scores.gather(-1, ids)
    sigmoid = chosen.sigmoid() / chosen.sigmoid().sum(dim=-1, keepdim=True).clamp(min=1e-20)
    if bool((torch.softmax(chosen, dim=-1) - shares).abs().mean() <= (sigmoid - shares).abs().mean()):
        return torch.softmax(scores, dim=-1)
    bias = getattr(site.router, "e_score_correction_bias", None)
    positive = (scores.sigmoid() + (0 if bias is None else bias)).clamp(min=0)
    return positive / positive.sum(dim=-1, keepdim=True).clamp(min=1e-20)
