"""Loading models and prompts, with errors a person can act on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from runtime.adapters import adapt
from runtime.prompts import prompts_digest as prompts_digest
from runtime.prompts import read_prompts as read_prompts
from trace_capture.errors import ModelError
from trace_capture.hooks import CausalModel
from trace_capture.samples import sample_folder

if TYPE_CHECKING:
    from runtime.speculative import Drafting

_GREEDY_SETTINGS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
"""Transformers' own defaults, given so that a model's sampling settings do not raise a warning when they are unused."""
DEMO_MODEL = "demo"
"""Name under which every command takes the model that ships with the project."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; equal seeds give equal texts."""

    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    def generation_config(self, base: GenerationConfig, max_new_tokens: int) -> GenerationConfig:
        """Settings for one call of `generate` that keep the model's special tokens."""
        sampled = self.temperature > 0
        extra = {"min_new_tokens": max_new_tokens} if self.ignore_eos else {}
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=sampled,
            **({"temperature": self.temperature} if sampled else _GREEDY_SETTINGS),
            eos_token_id=base.eos_token_id,
            bos_token_id=base.bos_token_id,
            pad_token_id=base.pad_token_id if base.pad_token_id is not None else 0,
            **extra,
        )


GREEDY = Sampling()


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode with its tokenizer."""

    model: CausalModel
    tokenizer: Any
    path: str

    @property
    def on_cuda(self) -> bool:
        """Whether the model is on a CUDA device."""
        return bool(next(self.model.parameters()).device.type == "cuda")

    def encode(self, prompt: str, max_new_tokens: int) -> Tensor:
        """Token ids [1, T] of a prompt on the model's device.

        Raises:
            ModelError: the prompt is empty, or prompt and new tokens exceed the model's context.
        """
        ids: Tensor = self.tokenizer(prompt, return_tensors="pt").input_ids
        if ids.shape[1] == 0:
            raise ModelError("a prompt is empty; give a text of at least one token")
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if context is not None and ids.shape[1] + max_new_tokens > context:
            raise ModelError(
                f"the prompt '{prompt[:30]}...' has {ids.shape[1]} tokens, and with {max_new_tokens} new ones exceeds "
                f"the model's context of {context}; shorten it or lower --max-new-tokens"
            )
        return ids.to(next(self.model.parameters()).device)

    def windows(self, text: str, window_tokens: int) -> list[Tensor]:
        """A text as token ids [1, T] of at most `window_tokens` (and the model's context) each, in order."""
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or window_tokens
        length = min(window_tokens, context)
        with quiet_transformers():  # a text longer than the context is what this is for
            ids: Tensor = self.tokenizer(text, return_tensors="pt").input_ids
        device = next(self.model.parameters()).device
        return [piece.to(device) for piece in torch.split(ids, length, dim=1) if piece.shape[1] > 1]

    def generate(
        self, ids: Tensor, max_new_tokens: int, sampling: Sampling, sequence: int, drafting: Drafting | None = None
    ) -> str:
        """Continue one prompt; gives the new text. Prompt number `sequence` shifts the seed.

        Raises:
            ModelError: `drafting` is given, and the model's cache cannot be rolled back.
        """
        torch.manual_seed(sampling.seed * 100_003 + sequence)
        config = sampling.generation_config(self.model.generation_config, max_new_tokens)
        extra = drafting.apply(config) if drafting is not None else {}
        with torch.no_grad(), quiet_transformers():  # it warns of its own nested calls
            try:
                output = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=config, **extra
                )
            except ValueError as error:
                if drafting is None:
                    raise
                raise ModelError(f"{type(self.model).__name__} cannot decode speculatively: {error}") from error
        return str(self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def load_model(path: str, device: str = "cpu") -> LoadedModel:
    """Load a model from a folder or the hub; `demo` is the one that ships with the project.

    Raises:
        ModelError: the folder is missing or damaged, or the model cannot be loaded.
    """
    source = model_source(path)
    with quiet_transformers():
        try:
            model = adapt(AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval().to(device))
        except ModelError:
            raise
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise ModelError(f"cannot load a model from {source}: {first}") from error
    return LoadedModel(model, load_tokenizer(source), source)


def model_source(path: str) -> str:
    """The folder or hub id that `path` stands for.

    Raises:
        ModelError: there is no model folder at a local path.
    """
    source = str(sample_folder() / "demo_model") if path == DEMO_MODEL else path
    looks_local = path == DEMO_MODEL or source.startswith((".", "/", "~")) or source.count("/") != 1
    if looks_local and not (Path(source).expanduser() / "config.json").is_file():
        raise ModelError(
            f"no model at {source} (a folder with config.json is needed); give a model folder, a hub id such as "
            f"Qwen/Qwen3-30B-A3B, or '{DEMO_MODEL}'"
        )
    return str(Path(source).expanduser()) if looks_local else source


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a model folder or hub id.

    Raises:
        ModelError: it is missing or damaged.
    """
    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise ModelError(f"cannot load a tokenizer from {source}: {first}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and advice of transformers within the block."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def read_texts(files: Sequence[Path]) -> list[str]:
    """Texts from files, separated by form feeds.

    Raises:
        ModelError: a file cannot be read, or there is no text.
    """
    texts: list[str] = []
    for file in files:
        try:
            texts += [piece for piece in Path(file).read_text(encoding="utf-8").split("\f") if piece.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read texts from {file}: {error}; give a UTF-8 text file") from error
    if not texts:
        raise ModelError("the given files hold no text; give a text file of some thousand words with --texts")
    return texts


def host_memory_bytes() -> int:
    """Bytes of RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
