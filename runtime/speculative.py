"""Speculative decoding: transformers' own assisted generation, with listeners told of what it drafts and accepts.

In MoE-SpAc (arXiv 2603.09983) drafting is the sensor: the tokens that are verified together say which experts are
wanted, and the time of drafting is when they can be loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.candidate_generator import CandidateGenerator

from runtime.models import DEMO_MODEL, LoadedModel, load_model
from trace_capture.errors import ConfigError, ModelError
from trace_capture.hooks import CausalModel
from trace_capture.samples import sample_folder
from trace_capture.trace import DraftSettings

PROMPT_LOOKUP = "prompt-lookup"
"""Drafts are n-grams of the text so far; needs no draft model."""


class DraftListener(Protocol):
    """Is told of each round of speculative decoding, in this order; see `watch_drafts`."""

    def drafting_begins(self, reads_prompt: bool) -> None:
        """Drafting begins; with `reads_prompt` the draft model only reads the prompt, and the prefill comes next."""

    def verify_begins(self, drafted: int) -> None:
        """Drafting has ended; the forward pass that comes verifies so many tokens (0: it decodes one)."""

    def drafts_judged(self, accepted: int) -> None:
        """So many of the drafted tokens are kept; the pass gave that many output tokens and one more."""


@dataclass(frozen=True)
class Drafting:
    """How tokens are drafted.

    Attributes:
        kind: what reports call it: `prompt-lookup` or the draft model's name.
        gamma: tokens drafted per round at most (G).
        model: the draft model; None for prompt look-up.
    """

    kind: str
    gamma: int
    model: CausalModel | None = None

    @property
    def settings(self) -> DraftSettings:
        """For a trace's metadata."""
        sizes = [] if self.model is None else [one.numel() * one.element_size() for one in self.model.parameters()]
        return DraftSettings(kind=self.kind, gamma=self.gamma, weight_bytes=sum(sizes))

    def apply(self, config: GenerationConfig) -> dict[str, Any]:
        """Put it into the settings of a call of `generate`; gives further arguments for it.

        A draft model always drafts `gamma` tokens, however sure it is of them.
        """
        if self.model is None:
            config.prompt_lookup_num_tokens = self.gamma
            return {}
        settings = self.model.generation_config
        settings.num_assistant_tokens = self.gamma
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        return {"assistant_model": self.model}


def load_drafting(draft: str | None, gamma: int, target: LoadedModel) -> Drafting | None:
    """The drafting that a command line names.

    Args:
        draft: None for no speculative decoding, `prompt-lookup`, a model folder or hub id, or `demo`.
        gamma: tokens drafted per round.
        target: the model whose tokens are drafted.

    Raises:
        ConfigError: gamma is below 1.
        ModelError: the draft model cannot be loaded, or does not share the target's vocabulary.
    """
    if draft is None:
        return None
    if gamma < 1:
        raise ConfigError(f"gamma is {gamma}; draft at least 1 token per round, or leave --draft away")
    if draft == PROMPT_LOOKUP:
        return Drafting(PROMPT_LOOKUP, gamma)
    source = str(sample_folder() / "demo_draft_model") if draft == DEMO_MODEL else draft
    loaded = load_model(source, str(next(target.model.parameters()).device))
    if loaded.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ModelError(
            f"the draft model {draft} has another vocabulary than {target.path}, so its tokens cannot be verified; "
            f"take a draft model of the same family, or --draft {PROMPT_LOOKUP}"
        )
    return Drafting(Path(source).name, gamma, loaded.model)


@contextmanager
def watch_drafts(model: CausalModel, listeners: Sequence[DraftListener]) -> Iterator[None]:
    """Tell listeners of every round of assisted generation of `model` within the block.

    The first forward pass, which reads the prompt, verifies nothing, so that it is a prefill and nothing else: its
    round has no drafts, and its drafting is the draft model reading the prompt.
    """
    make = model._get_candidate_generator

    def watched(*args: Any, **kwargs: Any) -> CandidateGenerator:
        return _Watched(make(*args, **kwargs), listeners)

    model._get_candidate_generator = watched
    try:
        yield
    finally:
        del model._get_candidate_generator


class _Watched(CandidateGenerator):  # type: ignore[misc]  # mypy does not follow into transformers
    """A candidate generator that reports what another one does."""

    def __init__(self, inner: CandidateGenerator, listeners: Sequence[DraftListener]) -> None:
        self.requires_model_outputs = inner.requires_model_outputs
        self.model_kwargs_overrides = getattr(inner, "model_kwargs_overrides", {})
        self._inner = inner
        self._listeners = listeners
        self._has_prefilled = False

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See transformers' `CandidateGenerator`."""
        for listener in self._listeners:
            listener.drafting_begins(not self._has_prefilled)
        ids, logits = self._inner.get_candidates(input_ids, **kwargs)
        if not self._has_prefilled:  # the draft model has read the prompt, too; what it drafted meanwhile is dropped
            ids, logits, self._has_prefilled = input_ids, None, True
        for listener in self._listeners:
            listener.verify_begins(ids.shape[1] - input_ids.shape[1])
        return ids, logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
        """See transformers' `CandidateGenerator`."""
        for listener in self._listeners:
            listener.drafts_judged(int(num_matches))
        self._inner.update_candidate_strategy(input_ids, scores, num_matches)
