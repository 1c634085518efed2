"""How far the states that predictions start from are from the state that the next router really sees.

For each Mixture-of-Experts layer but the first, of natively routed text: cosine with the true router input s_{l+1}, and
recall of its router, for the quasi-hidden state q_l and for the baseline that feeds the router of layer l+1 with the
input s_l of layer l's router (Speculating Experts, arXiv 2603.19289, figures 3 and 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime.default_vectors import LayerDefaults
from runtime.intervals import Estimate, WindowBootstrap
from runtime.predictors import QuasiHidden
from trace_capture.hooks import MoeSite

QUASI, INPUT = "quasi", "input"


class LayerDrift(BaseModel):
    """One foreseen layer, natively routed.

    Attributes:
        layer: MoE layer index, of the layer that is foreseen.
        tokens: tokens compared.
        quasi_cosine: cosine of q_l and the true input of this layer's router, mean over tokens.
        input_cosine: the same of s_l, the input of the router one layer before.
        quasi_recall: share of routed experts that this layer's router names when it is given q_l.
        input_recall: the same for s_l.
    """

    model_config = ConfigDict(frozen=True)
    layer: int
    tokens: int
    quasi_cosine: Estimate
    input_cosine: Estimate
    quasi_recall: Estimate
    input_recall: Estimate


@dataclass
class _Sums:
    """Of one window and layer."""

    tokens: int = 0
    slots: int = 0
    cosine: dict[str, float] = field(default_factory=lambda: {QUASI: 0.0, INPUT: 0.0})
    found: dict[str, int] = field(default_factory=lambda: {QUASI: 0, INPUT: 0})


class DriftReader:
    """Watches native passes of a model; a context manager that leaves it as it was.

    Args:
        sites: of `discover`.
        defaults: default vectors [L, E, H], alone or with what comes beside them.
    """

    def __init__(self, sites: Sequence[MoeSite], defaults: Tensor | LayerDefaults) -> None:
        self._sites = sites
        self._quasi = QuasiHidden(sites, defaults)
        self._handles: list[RemovableHandle] = []
        self._windows: list[list[_Sums]] = []
        self._input: Tensor | None = None
        self._foreseen: Tensor | None = None

    def __enter__(self) -> DriftReader:
        self._handles = self._quasi.attach()
        self._handles += [site.router.register_forward_hook(self._hook(site), with_kwargs=True) for site in self._sites]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_window(self) -> None:
        """The next pass is another window."""
        self._windows.append([_Sums() for _ in self._sites])
        self._input = self._foreseen = None

    def layers(self, bootstrap: WindowBootstrap) -> tuple[LayerDrift, ...]:
        """What was seen, for each layer but the first."""
        result = []
        for layer in range(1, len(self._sites)):
            sums = [window[layer] for window in self._windows]
            tokens, slots = [one.tokens for one in sums], [one.slots for one in sums]
            figures = {
                f"{name}_{kind}": bootstrap.estimate([getattr(one, source)[name] for one in sums], weight)
                for name in (QUASI, INPUT)
                for kind, source, weight in (("cosine", "cosine", tokens), ("recall", "found", slots))
            }
            result.append(LayerDrift(layer=layer, tokens=sum(tokens), **figures))
        return tuple(result)

    def _hook(self, site: MoeSite) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            weights, ids = (item.reshape(-1, item.shape[-1]) for item in output[1:3])
            truth = next(iter((*args, *kwargs.values()))).reshape(ids.shape[0], -1)
            if self._input is not None and self._foreseen is not None:
                self._compare(site, truth, ids, {QUASI: self._foreseen, INPUT: self._input})
            self._input = truth
            if site.index + 1 < len(self._sites):
                self._foreseen = self._sites[site.index + 1].normed(self._quasi.state(site.index, ids, weights))

        return hook

    @torch.no_grad()
    def _compare(self, site: MoeSite, truth: Tensor, ids: Tensor, states: dict[str, Tensor]) -> None:
        sums = self._windows[-1][site.index]
        sums.tokens += ids.shape[0]
        sums.slots += ids.numel()
        for name, state in states.items():
            cosine = torch.nn.functional.cosine_similarity(state.double(), truth.double(), dim=-1)
            sums.cosine[name] += float(cosine.sum())
            named = site.choose(state)[0]
            sums.found[name] += int((named.unsqueeze(-1) == ids.unsqueeze(-2)).sum())
