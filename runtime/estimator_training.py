"""Training of the estimator by distillation: its logits against the true routers' distributions (KL divergence).

After Speculating Experts (arXiv 2603.19289, appendix A), which names the loss and the amount of text (4 to 5 million
tokens) and neither optimiser nor rate: AdamW with warm-up and cosine is a choice of this project. Texts are run window
by window through the untouched model, so memory is bounded by one batch and `cache_bytes`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.default_vectors import LayerDefaults
from runtime.estimator import ESTIMATOR, NONE, ROUTER, EstimatorNetwork, EstimatorSizes, TrainedEstimator
from runtime.models import LoadedModel
from runtime.offloading import model_name
from runtime.routing_reader import Observed, RoutingReader
from trace_capture.errors import ConfigError, ModelError
from trace_capture.files import atomic_path, make_folder, text_digest
from trace_capture.hooks import discover
from trace_capture.versions import software_versions

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TrainingSettings:
    """How an estimator is trained.

    Attributes:
        steps: optimiser steps.
        windows_per_step, window_tokens, tokens_per_window: a step reads so many windows of so many tokens and learns
            from a random part of each. Few tokens of many windows learn far faster than the reverse where windows
            stay in memory; where they do not (`cache_bytes`), 1 or 2 windows and all their tokens are the better use
            of the model's time.
        width_ratio: m; the network is H/m wide.
        expansion: n.
        learning_rate, weight_decay, warmup_steps: of AdamW; cosine to a twentieth.
        validation_every: one window in so many is kept for validation.
        margin: a layer goes to the estimator if its recall exceeds the router's by more than this. At 0 `Hybrid` is
            never worse on validation than the better of the two; a margin gives up to itself for fewer estimated
            layers.
        checkpoint_every: steps between checkpoints.
        cache_bytes: memory for windows that were run already.
        seed: of weights, order and validation split.
    """

    steps: int = 600
    windows_per_step: int = 8
    window_tokens: int = 256
    tokens_per_window: int = 32
    width_ratio: float = 2.0
    expansion: int = 7
    learning_rate: float = 2e-2
    weight_decay: float = 0.01
    warmup_steps: int = 20
    validation_every: int = 8
    margin: float = 0.0
    checkpoint_every: int = 100
    cache_bytes: int = 1 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.steps, self.windows_per_step, self.tokens_per_window, self.checkpoint_every, self.expansion)
        if min(counts) < 1 or self.window_tokens < 2 or self.validation_every < 2:
            raise ConfigError(
                f"an estimator needs steps, windows per step, checkpoint distance and expansion of at least 1, windows "
                f"of 2 tokens and a validation distance of 2, got {self}"
            )
        if self.width_ratio < 1 or self.margin < 0 or self.learning_rate <= 0:
            raise ConfigError(f"width ratio must be >= 1, margin >= 0 and learning rate > 0, got {self}")


DEFAULT_SETTINGS = TrainingSettings()


def split_windows(windows: Sequence[Tensor], every: int, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the windows to train on and to validate on, the latter one in `every`.

    Raises:
        ModelError: fewer than two windows.
    """
    if len(windows) < 2:
        raise ModelError(
            f"the texts make {len(windows)} window(s), and training and validation need one each; give more text with "
            "--texts"
        )
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    kept = max(1, len(windows) // every)
    return sorted(order[kept:]), sorted(order[:kept])


def checkpoint_path(out: Path) -> Path:
    """Where a training that writes to `out` keeps its state until it is done."""
    return Path(out).with_suffix(".checkpoint.safetensors")


def train_estimator(
    loaded: LoadedModel,
    texts: Sequence[str],
    defaults: Tensor | LayerDefaults,
    out: Path,
    settings: TrainingSettings = DEFAULT_SETTINGS,
    *,
    resume: bool = False,
    progress: Progress | None = None,
) -> TrainedEstimator:
    """Train an estimator, choose who foresees which layer, and write both to a file.

    The state is written to `checkpoint_path(out)` every `settings.checkpoint_every` steps, in one atomic file, and
    removed at the end. A resumed training gives the bits of one that was never interrupted.

    Args:
        loaded: an untouched model; it is not changed.
        texts: whatever the model is used on.
        defaults: default vectors [L, E, H], alone or with what comes beside them: those that prediction will use.
        out: safetensors file; the layer map and recalls also go to `facts_path(out)`.
        settings: sizes and schedule.
        resume: go on from the checkpoint.
        progress: called with (steps done, steps in all).

    Raises:
        ModelError: too little text, a model of one MoE layer, or no usable checkpoint to resume from.
        ConfigError: the checkpoint comes from other settings, texts or vectors.
        StudioError: a file cannot be written.
    """
    make_folder(Path(out).parent)
    windows = [window for text in texts for window in loaded.windows(text, settings.window_tokens)]
    training, validation = split_windows(windows, settings.validation_every, settings.seed)
    sites = discover(loaded.model)
    if len(sites) < 2:
        raise ModelError("this model has one Mixture-of-Experts layer, so there is no next layer to foresee")
    defaults = LayerDefaults(defaults) if isinstance(defaults, Tensor) else defaults
    layers, experts, hidden = defaults.vectors.shape
    width = max(1, round(hidden / settings.width_ratio))
    network = EstimatorNetwork(EstimatorSizes(hidden, width, settings.expansion, experts, layers), settings.seed)
    run = _Training(network.to(windows[0].device), settings, _identity(loaded, windows, defaults, settings))
    place = checkpoint_path(out)
    if resume:
        run.load(place)
    with RoutingReader(loaded.model, sites, defaults, settings.cache_bytes) as reader:
        while run.step < settings.steps:
            numbers = _batch(training, run.step, settings)
            run.advance([_some_tokens(reader.read(n, windows[n]), run.step, settings) for n in numbers])
            if run.step % settings.checkpoint_every == 0 and run.step < settings.steps:
                run.save(place)
            if progress is not None:
                progress(run.step, settings.steps)
        network.eval().requires_grad_(False)
        scores = measure_recall(reader, windows, validation, network)
    trained = _judged(network, scores, model_name(loaded.model), run, len(training), len(validation))
    trained.save(out)
    place.unlink(missing_ok=True)
    return trained


@dataclass(frozen=True)
class Scores:
    """Recall on some windows for each MoE layer [L], 0 for the first, and the mean sum of its router weights [L]."""

    router: tuple[float, ...]
    estimator: tuple[float, ...]
    weight_sums: tuple[float, ...]
    kl_nats: float
    """KL divergence of the estimator from the true routers, mean over tokens and layers."""


@torch.no_grad()
def measure_recall(
    reader: RoutingReader, windows: Sequence[Tensor], numbers: Sequence[int], network: EstimatorNetwork
) -> Scores:
    """Share of routed experts that router and estimator foresee from q_l, over the windows of these numbers."""
    found: dict[str, Tensor] = {}
    sums: Tensor | float = 0.0
    tokens, top_k, divergence = 0, 0, 0.0
    for number in numbers:
        seen = reader.read(number, windows[number])
        top_k = seen.true_ids.shape[-1]
        logits = network(seen.states, _layer_numbers(seen.states))
        guesses = {ROUTER: seen.router_ids, ESTIMATOR: logits.topk(top_k, dim=-1).indices}
        for name, ids in guesses.items():
            hits = (ids.unsqueeze(-1) == seen.true_ids.unsqueeze(-2)).sum(dim=(1, 2, 3))
            found[name] = found.get(name, torch.zeros_like(hits)) + hits
        sums = sums + seen.weight_sums.to(torch.float64).sum(dim=1)
        tokens += seen.states.shape[1]
        divergence += float(_divergence(logits, seen.targets)) * seen.states.shape[1]
    ratios = {name: (0.0, *(hits.double() / (tokens * top_k)).tolist()) for name, hits in found.items()}
    means: list[float] = (sums / tokens).tolist()  # type: ignore[union-attr]
    return Scores(ratios[ROUTER], ratios[ESTIMATOR], (means[0], *means), divergence / tokens)


def choose_layers(router: Sequence[float], estimator: Sequence[float], margin: float) -> tuple[str, ...]:
    """Layer map [L] from recalls [L]: the estimator where it wins by more than `margin`, the router otherwise."""
    pairs = list(zip(router, estimator, strict=True))[1:]
    return (NONE, *(ESTIMATOR if guess > base + margin else ROUTER for base, guess in pairs))


class _Training:
    """Network, optimiser and losses; everything that a checkpoint holds."""

    def __init__(self, network: EstimatorNetwork, settings: TrainingSettings, identity: str) -> None:
        self.network = network
        self.settings = settings
        self.losses: list[float] = []
        self._identity = identity
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, foreach=False
        )

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def advance(self, batch: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One optimiser step on q_l [L-1, T, H] and targets [L-1, T, E] from some windows."""
        for group in self._optimizer.param_groups:
            group["lr"] = _rate(self.step, self.settings)
        self._optimizer.zero_grad()
        states = torch.cat([states for states, _ in batch], dim=1)
        targets = torch.cat([targets for _, targets in batch], dim=1)
        loss = _divergence(self.network(states, _layer_numbers(states)), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        self.losses.append(float(loss.detach()))

    def save(self, path: Path) -> None:
        """Write everything in one atomic file, what is not a tensor as JSON in its metadata."""
        tensors = {"losses": torch.tensor(self.losses, dtype=torch.float64)}
        for name, parameter in self.network.named_parameters():
            tensors[f"weights.{name}"] = parameter.detach().cpu()
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"{key}.{name}"] = value.detach().cpu()
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata={"identity": self._identity})

    def load(self, path: Path) -> None:
        """Take over what `save` wrote.

        Raises:
            ModelError: no usable file.
            ConfigError: it comes from another training.
        """
        try:
            with safe_open(path, framework="pt") as file:
                self._check(path, json.loads((file.metadata() or {})["identity"]))
                for name, parameter in self.network.named_parameters():
                    place = parameter.device
                    parameter.data.copy_(file.get_tensor(f"weights.{name}"))
                    state = {key: file.get_tensor(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
                    moved = {key: value if key == "step" else value.to(place) for key, value in state.items()}
                    self._optimizer.state[parameter] = moved
                self.losses = file.get_tensor("losses").tolist()
        except (OSError, SafetensorError, KeyError, RuntimeError, json.JSONDecodeError) as error:
            raise ModelError(
                f"no usable checkpoint at {path} ({error}); start the training again without --resume"
            ) from error

    def _check(self, path: Path, found: dict[str, Any]) -> None:
        wanted = json.loads(self._identity)
        different = sorted(key for key in wanted if found.get(key) != wanted[key])
        if different:
            raise ConfigError(
                f"the checkpoint {path} comes from another training (different: {', '.join(different)}); repeat its "
                "options, or start again without --resume"
            )


def _identity(
    loaded: LoadedModel, windows: Sequence[Tensor], defaults: LayerDefaults, settings: TrainingSettings
) -> str:
    """What must be equal for a checkpoint to fit, as JSON."""
    settings_that_count = asdict(settings)
    for name in ("checkpoint_every", "cache_bytes"):  # these change no number
        del settings_that_count[name]
    given = [part.to(torch.float32).cpu().numpy().tobytes().hex() for part in defaults if part is not None]
    facts = settings_that_count | {
        "model": model_name(loaded.model),
        "texts": text_digest(str([window.tolist() for window in windows])),
        "default_vectors": text_digest("".join(given)),
    }
    return json.dumps(facts, sort_keys=True)


def _batch(training: Sequence[int], step: int, settings: TrainingSettings) -> list[int]:
    """Window numbers of a step: every epoch sees each window once, in an order of its own."""
    first = step * settings.windows_per_step
    numbers = []
    for place in range(first, first + settings.windows_per_step):
        epoch, offset = divmod(place, len(training))
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
        numbers.append(training[int(torch.randperm(len(training), generator=generator)[offset])])
    return numbers


def _rate(step: int, settings: TrainingSettings) -> float:
    warm = min(1.0, (step + 1) / max(1, min(settings.warmup_steps, settings.steps)))
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    return settings.learning_rate * warm * (0.05 + 0.95 * cosine)


def _some_tokens(seen: Observed, step: int, settings: TrainingSettings) -> tuple[Tensor, Tensor]:
    """States and targets of a random part of a window, the same for the same step."""
    tokens = seen.states.shape[1]
    if tokens <= settings.tokens_per_window:
        return seen.states, seen.targets
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(settings.seed * 1_000_003 + step))
    places = order[: settings.tokens_per_window].to(seen.states.device)
    return seen.states[:, places], seen.targets[:, places]


def _layer_numbers(states: Tensor) -> Tensor:
    """l of each entry, [L-1, 1]."""
    return torch.arange(states.shape[0], device=states.device).unsqueeze(1)


def _divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """KL(targets || softmax(logits)) in nats, mean over all tokens and layers; both [..., E]."""
    loss = torch.nn.functional.kl_div(torch.log_softmax(logits, dim=-1), targets, reduction="sum")
    return loss / targets[..., 0].numel()


def _judged(
    network: EstimatorNetwork, scores: Scores, model: str, run: _Training, training: int, validation: int
) -> TrainedEstimator:
    settings = run.settings
    layer_map = choose_layers(scores.router, scores.estimator, settings.margin)
    pairs = zip(layer_map, scores.router, scores.estimator, strict=True)
    hybrid = tuple(guess if who == ESTIMATOR else base for who, base, guess in pairs)
    tenth = max(1, settings.steps // 10)
    facts = {
        "settings": asdict(settings),
        "training_windows": training,
        "validation_windows": validation,
        "kl_nats_first_tenth": sum(run.losses[:tenth]) / tenth,
        "kl_nats_last_tenth": sum(run.losses[-tenth:]) / tenth,
        "kl_nats_validation": scores.kl_nats,
        "versions": software_versions("torch", "transformers"),
    }
    recall = {ROUTER: scores.router, ESTIMATOR: scores.estimator, "hybrid": hybrid}
    return TrainedEstimator(network, model, layer_map, scores.weight_sums, recall, facts)
