"""`evaluate`: what the modes of prefetching cost in quality, and how often predictions are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from runtime.capture import Progress
from runtime.default_vectors import VECTORS_FILE, load_default_vectors
from runtime.drift import DriftReader, LayerDrift
from runtime.engine import Engine
from runtime.estimator import PREDICTORS
from runtime.expert_files import expert_files
from runtime.intervals import NUM_RESAMPLES, Estimate, WindowBootstrap
from runtime.models import LoadedModel
from runtime.offloading import IMPLEMENTATION, find_sites, model_name, offload, unload
from runtime.recall import Recall
from simulator.policies.config import OffloadConfig, parse_config
from simulator.policies.errors import unknown_name
from trace_capture.errors import ConfigError, ModelError
from trace_capture.files import text_digest

EVALUATED_MODES = ("hint", "verify", "commit")
AS_CONFIGURED = "config"
"""In place of a mode: whatever the configuration says, such as a mode per layer."""


class LayerRecall(BaseModel):
    """How often predictions were right: for one MoE layer, or over all that have predictions (`layer` None).

    Attributes:
        layer: MoE layer index.
        tokens: (token, layer) pairs with a prediction.
        slot: share of routed experts that were predicted (recall@k).
        whole: share of tokens whose whole set was predicted.
        first: share of tokens whose first-ranked expert was predicted.
    """

    model_config = ConfigDict(frozen=True)
    layer: int | None
    tokens: int
    slot: Estimate
    whole: Estimate
    first: Estimate


class ModeScores(BaseModel):
    """One mode beside the exact model.

    Attributes:
        mode: hint, verify, commit, or `config` for the configuration's own.
        perplexity: exp of the mean negative log-likelihood.
        perplexity_ratio: over the exact model's, same windows (a paired interval).
        kl_nats: mean over tokens of KL(exact || mode).
        agreement: share of tokens whose most likely successor is the exact model's.
        max_logit_difference: the largest over all tokens and vocabulary entries.
        mean_recall: over all layers with predictions; None where nothing is predicted.
        recall: per MoE layer with predictions.
        seconds: time for all windows.
    """

    model_config = ConfigDict(frozen=True)
    mode: str
    perplexity: Estimate
    perplexity_ratio: Estimate
    kl_nats: Estimate
    agreement: Estimate
    max_logit_difference: float
    mean_recall: LayerRecall | None
    recall: tuple[LayerRecall, ...]
    seconds: float


class Evaluation(BaseModel):
    """The result of `evaluate`; `model_dump_json` writes it."""

    model_config = ConfigDict(frozen=True)
    model: str
    config: OffloadConfig
    reference: str
    """What the exact model is: `untouched`, or `offloaded` without prediction if its experts stay in their files."""
    texts_digest: str
    num_windows: int
    window_tokens: int
    num_tokens: int
    """Tokens that are predicted: all but the first of each window."""
    intervals: str
    exact_perplexity: Estimate
    exact_seconds: float
    modes: tuple[ModeScores, ...]
    drift: tuple[LayerDrift, ...] = ()
    """Of native routing, per MoE layer but the first; empty where the source predicts from no state."""


@dataclass(frozen=True)
class _Score:
    """Sums over the predicted tokens of one window."""

    tokens: int
    loss_nats: float
    kl_nats: float = 0.0
    agreeing: int = 0
    max_difference: float = 0.0


def evaluate(
    loaded: LoadedModel,
    texts: Sequence[str],
    config: OffloadConfig,
    *,
    modes: Sequence[str] = EVALUATED_MODES,
    window_tokens: int = 256,
    max_windows: int = 64,
    vectors_path: Path | None = None,
    estimator_path: Path | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Evaluation:
    """Score texts on the exact model and on the offloaded one in each mode.

    Whole windows run in one pass, under speculation as in decode. Quality depends on the predictions and not on the
    link's speed, so an emulated link may as well be a fast one. The exact model's logits wait on disk, in its dtype.

    Args:
        loaded: a model that is not offloaded; it is not changed.
        texts: cut into windows; if there are more than `max_windows`, evenly spread ones are taken.
        config: what to offload with; each mode of `modes` takes the place of its own.
        modes: of `EVALUATED_MODES`, or `config` to keep the configuration's.
        window_tokens: length of a window, at most the model's context.
        max_windows: windows to score at most.
        vectors_path: default vectors of the predictor; by default the file beside the model.
        estimator_path: trained estimator of `estimator` and `hybrid`; by default the file beside the model.
        progress: called with (windows scored, windows in all).
        seed: of the confidence intervals' resamples.

    Raises:
        ConfigError: an unknown mode, one that the prefetch source cannot serve, or a budget that is too small.
        ModelError: no text, a model that is already offloaded, or default vectors are missing.
    """
    configs = {mode: _with_mode(config, mode) for mode in modes}
    if not configs:
        raise ConfigError(f"no mode to evaluate; give some of: {', '.join((*EVALUATED_MODES, AS_CONFIGURED))}")
    windows = _windows(loaded, texts, window_tokens, max_windows)
    bootstrap = WindowBootstrap(len(windows), seed)
    with TemporaryDirectory() as folder:
        judge = _Judge(loaded, windows, Path(folder), bootstrap, progress, len(windows) * (1 + len(configs)))
        drift = _drift_reader(loaded, config, vectors_path)
        began = perf_counter()
        judge.score_exact(config, drift)
        exact_seconds = perf_counter() - began
        scores: list[ModeScores] = []
        for mode, chosen in configs.items():
            with _speculating(loaded, chosen, vectors_path, estimator_path) as engine:
                scores.append(judge.score_mode(mode, engine))
    return Evaluation(
        model=model_name(loaded.model),
        config=config,
        reference="untouched" if expert_files(loaded.model) is None else "offloaded",
        texts_digest=text_digest("\f".join(texts)),
        num_windows=len(windows),
        window_tokens=max(int(window.shape[1]) for window in windows),
        num_tokens=sum(score.tokens for score in judge.exact),
        intervals=f"95 %, percentile bootstrap over {len(windows)} windows, {NUM_RESAMPLES} resamples, seed {seed}",
        exact_perplexity=_perplexity(bootstrap, judge.exact),
        exact_seconds=exact_seconds,
        modes=tuple(scores),
        drift=drift.layers(bootstrap) if drift is not None else (),
    )


def _drift_reader(loaded: LoadedModel, config: OffloadConfig, vectors_path: Path | None) -> DriftReader | None:
    """What compares states with the true router inputs, where the prefetch source starts from such a state."""
    if config.prefetch.source not in PREDICTORS:
        return None
    defaults = load_default_vectors(vectors_path or Path(loaded.path) / VECTORS_FILE)
    return DriftReader(find_sites(loaded.model), defaults)


def _with_mode(config: OffloadConfig, mode: str) -> OffloadConfig:
    if mode == AS_CONFIGURED:
        return config
    if mode not in EVALUATED_MODES:
        raise unknown_name("mode", mode, (*EVALUATED_MODES, AS_CONFIGURED))
    raw = config.model_dump()
    raw["prefetch"]["mode"] = mode
    return parse_config(raw, f"mode {mode}")


def _windows(loaded: LoadedModel, texts: Sequence[str], window_tokens: int, max_windows: int) -> list[Tensor]:
    """Token ids [1, T] of evenly spread windows."""
    if loaded.model.config._experts_implementation == IMPLEMENTATION:
        raise ModelError("this model is offloaded, so there is no exact one to compare with; call unload(model) first")
    if window_tokens < 2 or max_windows < 1:
        raise ConfigError(
            f"window_tokens is {window_tokens} and max_windows {max_windows}; give at least 2 tokens and 1 window"
        )
    windows = [window for text in texts for window in loaded.windows(text, window_tokens)]
    if not windows:
        raise ModelError("no text to evaluate on; give a text file of some thousand words with --texts")
    if len(windows) <= max_windows:
        return windows
    return [windows[int(place)] for place in np.linspace(0, len(windows) - 1, max_windows).round()]


@contextmanager
def _speculating(
    loaded: LoadedModel, config: OffloadConfig, vectors_path: Path | None, estimator_path: Path | None
) -> Iterator[Engine]:
    """The model, offloaded, with whole texts treated as decode."""
    engine = offload(loaded.model, config, default_vectors=vectors_path, estimator=estimator_path)
    try:
        engine.speculate_in_prefill = True
        yield engine
    finally:
        unload(loaded.model)


@torch.no_grad()
def _logits(loaded: LoadedModel, window: Tensor) -> Tensor:
    """What predicts a window's tokens but its first, each from those in front of it: [T - 1, V]."""
    logits: Tensor = loaded.model(input_ids=window, use_cache=False).logits[0, :-1]
    return logits


@dataclass
class _Judge:
    """Scores windows on the exact model, keeps its logits in `folder`, a file per window, and compares modes."""

    loaded: LoadedModel
    windows: Sequence[Tensor]
    folder: Path
    bootstrap: WindowBootstrap
    progress: Progress | None
    total: int
    exact: list[_Score] = field(default_factory=list)
    done: int = 0

    def score_exact(self, config: OffloadConfig, drift: DriftReader | None) -> None:
        """Score the exact model, and let `drift` look on."""
        streamed = expert_files(self.loaded.model) is not None
        if streamed:  # it runs only while it is offloaded; without prediction that is exact
            offload(self.loaded.model, parse_config(config.model_dump() | {"prefetch": {}}))
        try:
            with drift or nullcontext():
                for number, window in enumerate(self.windows):
                    if drift is not None:
                        drift.begin_window()
                    logits = _logits(self.loaded, window)
                    torch.save(logits.cpu(), self._logits_file(number))
                    self.exact.append(_score(logits, window[0, 1:]))
                    self._report()
        finally:
            if streamed:
                unload(self.loaded.model)

    def score_mode(self, mode: str, engine: Engine) -> ModeScores:
        """Score the offloaded model that `engine` runs."""
        began = perf_counter()
        scores: list[_Score] = []
        recalls: list[list[Recall]] = []
        for number, window in enumerate(self.windows):
            before = [replace(layer) for layer in engine.recall]
            logits = _logits(self.loaded, window)
            recalls.append([_since(new, old) for new, old in zip(engine.recall, before, strict=True)])
            reference: Tensor = torch.load(self._logits_file(number)).to(logits.device)
            scores.append(_score(logits, window[0, 1:], reference))
            self._report()
        tokens = [score.tokens for score in scores]
        extra = [score.loss_nats - other.loss_nats for score, other in zip(scores, self.exact, strict=True)]
        layers = [layer for layer, recall in enumerate(engine.recall) if recall.tokens]
        estimate = self.bootstrap.estimate
        return ModeScores(
            mode=mode,
            perplexity=_perplexity(self.bootstrap, scores),
            perplexity_ratio=estimate(extra, tokens, np.exp),
            kl_nats=estimate([score.kl_nats for score in scores], tokens),
            agreement=estimate([score.agreeing for score in scores], tokens),
            max_logit_difference=max(score.max_difference for score in scores),
            mean_recall=_layer_recall(self.bootstrap, recalls, layers, None) if layers else None,
            recall=tuple(_layer_recall(self.bootstrap, recalls, [layer], layer) for layer in layers),
            seconds=perf_counter() - began,
        )

    def _logits_file(self, number: int) -> Path:
        return self.folder / f"{number}.pt"

    def _report(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


def _score(logits: Tensor, targets: Tensor, reference: Tensor | None = None) -> _Score:
    """Sums over one window, from logits [T, V], the tokens that follow [T] and the exact model's logits [T, V]."""
    logits = logits.float()
    log_probabilities = logits.log_softmax(-1)
    loss = -log_probabilities.gather(1, targets.unsqueeze(1)).sum().item()
    if reference is None:
        return _Score(len(targets), loss)
    reference = reference.float()
    exact = reference.log_softmax(-1)
    divergence = (exact.exp() * (exact - log_probabilities)).sum().item()
    agreeing = int((logits.argmax(-1) == reference.argmax(-1)).sum())
    return _Score(len(targets), loss, divergence, agreeing, (logits - reference).abs().max().item())


def _perplexity(bootstrap: WindowBootstrap, scores: Sequence[_Score]) -> Estimate:
    return bootstrap.estimate([score.loss_nats for score in scores], [score.tokens for score in scores], np.exp)


def _since(new: Recall, old: Recall) -> Recall:
    """Counts since an earlier state."""
    difference = [now - then for now, then in zip(astuple(new), astuple(old), strict=True)]
    counts = dict(zip([item.name for item in fields(Recall)], difference, strict=True))
    return Recall(**counts | {"top_k": new.top_k})


def _layer_recall(
    bootstrap: WindowBootstrap, recalls: Sequence[Sequence[Recall]], layers: Sequence[int], label: int | None
) -> LayerRecall:
    """Recall over some layers, from the counts of each window and layer [W][L]."""

    def sums(name: str) -> list[int]:
        return [sum(getattr(window[layer], name) for layer in layers) for window in recalls]

    tokens, top_k = sums("tokens"), recalls[-1][layers[0]].top_k
    return LayerRecall(
        layer=label,
        tokens=sum(tokens),
        slot=bootstrap.estimate(sums("slots"), [count * top_k for count in tokens]),
        whole=bootstrap.estimate(sums("whole"), tokens),
        first=bootstrap.estimate(sums("first"), tokens),
    )
