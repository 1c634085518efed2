"""From nothing to a model folder: text, tokenizer, training, export, held-out losses, model card."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from transformers.utils import logging as transformers_logging

from runtime.demo_training.batches import Stream
from runtime.demo_training.corpus import Corpus, load_corpus
from runtime.demo_training.export import load_weights, save_model
from runtime.demo_training.model_card import Facts, write_model_card
from runtime.demo_training.settings import NetworkShape, TrainingSettings
from runtime.demo_training.tokenizer import load_tokenizer, token_stream, train_tokenizer
from runtime.demo_training.train import Checkpoints, Reporter, Run, Task, Teacher, fingerprint, held_out_loss, train
from trace_capture.errors import StudioError
from trace_capture.files import make_folder, text_digest

# Greedy decoding of so small a model falls into loops: sample, and make repeats less likely.
GENERATION_DEFAULTS = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}
_LINE_EVERY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """All that the command line can ask for."""

    out: Path
    work: Path
    preset_name: str
    shape: NetworkShape
    training: TrainingSettings
    corpus: str = "full"
    teacher: Path | None = None
    num_threads: int = 1
    checkpoint_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise StudioError(f"the number of threads must be at least 1, got {self.num_threads}; use --threads 1")


def run_job(job: Job) -> dict[str, float]:
    """Train as `job` says, write the folder, and return the held-out loss of each domain (nats per token).

    Raises:
        StudioError: a folder, corpus, teacher or checkpoint is not usable.
    """
    torch.set_num_threads(job.num_threads)
    transformers_logging.disable_progress_bar()
    console = Console(stderr=True)
    make_folder(job.out)
    work = make_folder(job.work)
    teacher = _load_teacher(job)
    console.print(f"collecting text ({job.corpus})")
    corpus = load_corpus(job.corpus, work / "packages")
    tokenizer = _tokenizer(job, corpus)
    task = Task(job.shape, job.training, _streams(tokenizer, corpus.train), teacher)
    checkpoints = Checkpoints(
        work / f"{job.preset_name}.checkpoint.pt",
        job.checkpoint_seconds,
        fingerprint(job.shape, job.training, _digest(task.streams)),
    )
    with _reporting(console, job.training.num_steps) as report:
        run = train(task, checkpoints=checkpoints, report=report)
    losses = _export(job, run, tokenizer, _streams(tokenizer, corpus.held_out))
    lengths = {domain: len(stream) for domain, stream in task.streams.items()}
    write_model_card(
        job.out,
        Facts(
            job.preset_name, job.shape, job.training, corpus.sources, lengths, losses, run.seconds, teacher is not None
        ),
    )
    for domain, loss in losses.items():
        console.print(f"held-out loss, {domain}: {loss:.3f} nats per token")
    console.print(f"wrote {job.out} after {run.seconds / 60:.1f} minutes of training")
    return losses


def _export(job: Job, run: Run, tokenizer: Tokenizer, held_out: dict[str, Stream]) -> dict[str, float]:
    """Write the model, and measure it as it was saved."""
    save_model(job.out, run.weights, job.shape, tokenizer, GENERATION_DEFAULTS)
    weights, shape = load_weights(job.out)
    return held_out_loss(weights, shape, held_out)


def _load_teacher(job: Job) -> Teacher | None:
    """The teacher in training precision; its vocabulary must be the one that is trained."""
    if job.teacher is None:
        return None
    weights, shape = load_weights(job.teacher)
    if shape.vocabulary_size != job.shape.vocabulary_size:
        raise StudioError(f"the teacher has {shape.vocabulary_size} tokens, the model {job.shape.vocabulary_size}")
    dtype = getattr(torch, job.training.precision)
    return Teacher({name: weight.to(dtype) for name, weight in weights.items()}, shape)


def _tokenizer(job: Job, corpus: Corpus) -> Tokenizer:
    """A draft must share its target's vocabulary; otherwise learn one from the training text."""
    if job.teacher is not None:
        return load_tokenizer(job.teacher)
    texts = (text for texts in corpus.train.values() for text in texts)
    return train_tokenizer(texts, vocabulary_size=job.shape.vocabulary_size)


def _streams(tokenizer: Tokenizer, texts: dict[str, list[str]]) -> dict[str, Stream]:
    """The token stream of each domain."""
    return {domain: token_stream(tokenizer, documents) for domain, documents in texts.items()}


def _digest(streams: Mapping[str, Stream]) -> str:
    """One digest of all training tokens."""
    return text_digest("".join(f"{domain}:{text_digest(stream.tobytes().hex())}" for domain, stream in streams.items()))


@contextmanager
def _reporting(console: Console, num_steps: int) -> Iterator[Reporter]:
    """A progress bar with the time left on a terminal; a line every half minute in a log file."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
        task = progress.add_task("training", total=num_steps, loss="")
        began = printed = time.monotonic()
        first: int | None = None

        def report(step: int, loss: float) -> None:
            nonlocal printed, first
            first = step - 1 if first is None else first
            progress.update(task, completed=step, loss=f"loss {loss:.2f}")
            now = time.monotonic()
            if not console.is_terminal and now - printed >= _LINE_EVERY_SECONDS:
                left = (now - began) / (step - first) * (num_steps - step)
                console.print(f"step {step}/{num_steps}  loss {loss:.3f}  about {left / 60:.1f} min left")
                printed = now

        yield report
