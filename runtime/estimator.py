"""Foreseeing the next layer's experts with a small trained network, alone or beside the router.

Speculating Experts (arXiv 2603.19289), appendix A: one network shared by all layers reads the quasi-hidden state q_l
and names the experts of layer l+1 ("Est-PF"); where the router on q_l already does as well, the router is kept
("Hybrid-PF"). The paper gives neither the ratios m and n nor the layers it picks: sizes are settings here, and a
layer goes to whichever had the higher recall on validation text. `runtime.estimator_training` makes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime.default_vectors import LayerDefaults
from runtime.predictors import QuasiHidden
from trace_capture.errors import ConfigError, ModelError
from trace_capture.files import atomic_path, write_text_atomic
from trace_capture.hooks import MoeSite, Predictor

ESTIMATOR_FILE = "estimator.safetensors"
"""Name of the file beside a model's weights."""
PREDICTORS = ("quasi-hidden", "estimator", "hybrid")
"""Names of the live predictors; each is also a prefetch source and a column of a trace."""
ROUTER, ESTIMATOR, NONE = "router", "estimator", "none"
"""Values of a layer map: who foresees a layer; nobody foresees the first."""
_KIND = "moe-studio estimator 1"


@dataclass(frozen=True)
class EstimatorSizes:
    """Sizes of the network.

    Attributes:
        hidden_size: H of the model, the width of q_l.
        width: h = H / m.
        expansion: n, the ratio of the inner layer to h.
        num_experts: E.
        num_layers: L, Mixture-of-Experts layers; one embedding each.
    """

    hidden_size: int
    width: int
    expansion: int
    num_experts: int
    num_layers: int

    @property
    def num_parameters(self) -> int:
        """H*h + 2*n*h^2 + h*E + L*h + 2*h: linear maps without bias, embeddings, and the norm's scale and shift."""
        h = self.width
        return self.hidden_size * h + 2 * self.expansion * h * h + h * self.num_experts + self.num_layers * h + 2 * h


class EstimatorNetwork(nn.Module):
    """q_l -> linear to h, plus a learned embedding of l, MLP with residual, LayerNorm, linear head to E logits.

    Computes in float32 whatever the model's type.
    """

    def __init__(self, sizes: EstimatorSizes, seed: int = 0) -> None:
        super().__init__()
        h = sizes.width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.reduce = nn.Linear(sizes.hidden_size, h, bias=False)
            self.layer = nn.Embedding(sizes.num_layers, h)
            self.widen = nn.Linear(h, sizes.expansion * h, bias=False)
            self.narrow = nn.Linear(sizes.expansion * h, h, bias=False)
            self.norm = nn.LayerNorm(h)
            self.head = nn.Linear(h, sizes.num_experts, bias=False)
        self.sizes = sizes

    def forward(self, states: Tensor, layers: Tensor) -> Tensor:
        """Logits [..., E] for layer l+1 from q_l [..., H] and l, whose shape broadcasts with [...]."""
        reduced = self.reduce(states.to(torch.float32)) + self.layer(layers)
        inner = self.narrow(nn.functional.silu(self.widen(reduced)))
        logits: Tensor = self.head(self.norm(reduced + inner))
        return logits


@dataclass(frozen=True, eq=False)
class TrainedEstimator:
    """A network and what was measured of it on validation text.

    Attributes:
        network: in evaluation mode.
        model: name of the model it was trained on.
        layer_map: who foresees each MoE layer [L] in `Hybrid`: `router` or `estimator`; `none` for the first.
        weight_sums: mean sum of the K router weights of each MoE layer [L].
        recall: share of routed experts foreseen per layer [L] by `router`, `estimator` and `hybrid`; 0 for the first.
        training: settings, text and losses, for people.
    """

    network: EstimatorNetwork
    model: str
    layer_map: tuple[str, ...]
    weight_sums: tuple[float, ...]
    recall: Mapping[str, Sequence[float]]
    training: Mapping[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Everything but the weights, as plain values."""
        return {
            "model": self.model,
            "sizes": asdict(self.network.sizes),
            "parameters": self.network.sizes.num_parameters,
            "layer_map": list(self.layer_map),
            "weight_sums": list(self.weight_sums),
            "recall": {name: list(values) for name, values in self.recall.items()},
            "training": dict(self.training),
        }

    def save(self, path: Path) -> None:
        """Write the weights with all facts in the metadata, and the facts alone as JSON beside them (`.json`).

        Raises:
            StudioError: the place cannot be written to.
        """
        facts = json.dumps(self.facts() | {"kind": _KIND}, sort_keys=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.network.state_dict().items()}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata={"facts": facts})  # one entry: several come in random order
            temporary.chmod(0o644)  # safetensors writes for the owner alone
        write_text_atomic(facts_path(path), json.dumps(self.facts(), sort_keys=True, indent=1) + "\n")


def facts_path(path: Path) -> Path:
    """Where the layer map and the recalls of an estimator file stand as JSON."""
    return Path(path).with_suffix(".json")


def load_estimator(path: Path) -> TrainedEstimator:
    """Read an estimator file.

    Raises:
        ModelError: the file is missing, damaged or something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
            if facts.get("kind") != _KIND:
                raise ModelError(f"{path} is not an estimator; make one with moe-studio train-estimator")
            network = EstimatorNetwork(EstimatorSizes(**facts["sizes"]))
            network.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
        return TrainedEstimator(
            network=network.eval().requires_grad_(False),
            model=facts["model"],
            layer_map=tuple(facts["layer_map"]),
            weight_sums=tuple(facts["weight_sums"]),
            recall=facts["recall"],
            training=facts["training"],
        )
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError, json.JSONDecodeError) as error:
        raise ModelError(
            f"no usable estimator at {path} ({error}); make one with 'moe-studio train-estimator --texts FILE', which "
            "writes it beside the model, or pass --estimator"
        ) from error


class Estimator:
    """The experts of layer l+1 by the trained network on q_l ("Est-PF").

    Weights are the softmax of the network's logits over its top K, times the mean weight sum of layer l+1: 1 for
    architectures that renormalise, their scaling factor where they have one.

    Args:
        quasi: gives d_l + r_l, with the default vectors that the network was trained with.
        sites: of `discover`.
        trained: of `load_estimator`.

    Raises:
        ModelError: the network was trained for a model of other sizes.
    """

    name = "estimator"

    def __init__(self, quasi: QuasiHidden, sites: Sequence[MoeSite], trained: TrainedEstimator) -> None:
        _check_fit(sites, trained)
        self._quasi = quasi
        self._sites = sites
        device = next(sites[0].router.parameters()).device
        self._network = trained.network.to(device)
        self._layers = torch.arange(len(sites), device=device)
        self._weight_sums = trained.weight_sums

    def attach(self) -> list[RemovableHandle]:
        """Install the residual hooks; the caller removes the handles."""
        return self._quasi.attach()

    @torch.no_grad()
    def predict(self, layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights foreseen for MoE layer `layer` + 1, given the routing [T, K] of `layer`; each [T, K]."""
        states = self._sites[layer + 1].normed(self._quasi.state(layer, ids, weights))
        logits = self._network(states, self._layers[layer])
        best = logits.topk(ids.shape[-1], dim=-1)
        shares = torch.softmax(best.values, dim=-1) * self._weight_sums[layer + 1]
        return best.indices, shares.to(weights.dtype)


class Hybrid:
    """Router on q_l or trained network, layer by layer as the estimator's layer map says ("Hybrid-PF").

    Args, Raises: as `Estimator`.
    """

    name = "hybrid"

    def __init__(self, quasi: QuasiHidden, sites: Sequence[MoeSite], trained: TrainedEstimator) -> None:
        estimator = Estimator(quasi, sites, trained)
        self._quasi = quasi
        self._by_layer: list[Predictor] = [estimator if who == ESTIMATOR else quasi for who in trained.layer_map]

    def attach(self) -> list[RemovableHandle]:
        """Install the residual hooks; the caller removes the handles."""
        return self._quasi.attach()

    def predict(self, layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights foreseen for MoE layer `layer` + 1, given the routing [T, K] of `layer`; each [T, K]."""
        return self._by_layer[layer + 1].predict(layer, ids, weights)


def make_predictor(
    name: str, sites: Sequence[MoeSite], defaults: Tensor | LayerDefaults, estimator: TrainedEstimator | Path
) -> Predictor:
    """A live predictor by name.

    Args:
        name: one of `PREDICTORS`.
        sites: of `discover`.
        defaults: default vectors [L, E, H], alone or with what comes beside them.
        estimator: or its file, which is read only by the predictors that need it.

    Raises:
        ConfigError: unknown name.
        ModelError: the estimator is missing, or does not fit the model.
    """
    if name not in PREDICTORS:
        raise ConfigError(f"unknown predictor '{name}'; choose one of: {', '.join(PREDICTORS)}")
    quasi = QuasiHidden(sites, defaults)
    if name == QuasiHidden.name:
        return quasi
    trained = estimator if isinstance(estimator, TrainedEstimator) else load_estimator(estimator)
    return (Estimator if name == Estimator.name else Hybrid)(quasi, sites, trained)


def _check_fit(sites: Sequence[MoeSite], trained: TrainedEstimator) -> None:
    sizes = trained.network.sizes
    found = (len(sites), int(sites[0].experts.num_experts))  # type: ignore[arg-type]
    wanted = (sizes.num_layers, sizes.num_experts)
    norm_size = next(sites[0].router.parameters()).shape[-1]
    if found != wanted or norm_size != sizes.hidden_size:
        raise ModelError(
            f"the estimator was trained for {trained.model} ({wanted[0]} MoE layers x {wanted[1]} experts, hidden size "
            f"{sizes.hidden_size}), not for a model of {found[0]} x {found[1]}, hidden size {norm_size}; make one for "
            "this model with moe-studio train-estimator"
        )
