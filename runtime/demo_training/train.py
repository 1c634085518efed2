"""The training loop: a sequence of steps, each a function of the weights, the seed and the step number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime.demo_training.batches import Stream, evaluation_windows, training_batch
from runtime.demo_training.checkpoint import load_checkpoint, save_checkpoint
from runtime.demo_training.loss import tied_cross_entropy
from runtime.demo_training.network import Weights, forward, initial_weights, logits
from runtime.demo_training.optimisers import Optimisers, precise_copies, trainable
from runtime.demo_training.settings import NetworkShape, TrainingSettings, as_record
from trace_capture.errors import StudioError

Reporter = Callable[[int, float], None]
_EVALUATION_ROWS = 16


@dataclass(frozen=True, slots=True)
class Teacher:
    """A finished model whose distribution a draft learns."""

    weights: Weights
    shape: NetworkShape


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, how, on which token streams, and with which teacher if any."""

    shape: NetworkShape
    settings: TrainingSettings
    streams: Mapping[str, Stream]
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        needed = max(self.settings.short_context, self.settings.long_context) + 1
        for domain, stream in self.streams.items():
            if len(stream) <= needed:
                raise StudioError(f"the {domain} text has {len(stream)} tokens; a training window needs {needed}")


@dataclass(slots=True)
class Run:
    """The state of a training run: fp32 weights, step reached, losses so far and seconds spent."""

    weights: Weights
    step: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where a run saves itself, how often, and what must be equal for it to be continued."""

    path: Path
    every_seconds: float
    fingerprint: dict[str, Any]


def fingerprint(shape: NetworkShape, settings: TrainingSettings, text_digest: str) -> dict[str, Any]:
    """What must be equal for two runs to be the same run."""
    return {**as_record(shape), **as_record(settings), "text": text_digest}


def train(
    task: Task,
    *,
    checkpoints: Checkpoints | None = None,
    report: Reporter | None = None,
    stop_at: int | None = None,
) -> Run:
    """Train from the checkpoint, or from fresh weights, to the last step (or to `stop_at`).

    Raises:
        StudioError: the checkpoint does not fit, or the loss is no longer a number.
    """
    run, optimisers = _start(task, checkpoints)
    last = min(stop_at or task.settings.num_steps, task.settings.num_steps)
    saved_at = time.monotonic()
    while run.step < last:
        began = time.monotonic()
        run.losses.append(_one_step(run, optimisers, task))
        run.step += 1
        run.seconds += time.monotonic() - began
        if report is not None:
            report(run.step, run.losses[-1])
        if checkpoints is not None and (run.step == last or time.monotonic() - saved_at >= checkpoints.every_seconds):
            _save(run, optimisers, checkpoints)
            saved_at = time.monotonic()
    return run


def _start(task: Task, checkpoints: Checkpoints | None) -> tuple[Run, Optimisers]:
    """The state to go on from: the checkpoint's when there is one, else step 0."""
    saved = load_checkpoint(checkpoints.path, fingerprint=checkpoints.fingerprint) if checkpoints else None
    if saved is None:
        run = Run(trainable(initial_weights(task.shape, task.settings.seed)))
        return run, Optimisers(run.weights, task.settings)
    run = Run(trainable(saved["weights"]), saved["step"], saved["losses"], saved["seconds"])
    optimisers = Optimisers(run.weights, task.settings)
    optimisers.load_state(saved["optimisers"])
    return run, optimisers


def _one_step(run: Run, optimisers: Optimisers, task: Task) -> float:
    """Forward, backward, update; returns the loss in nats per token."""
    settings = task.settings
    context = settings.context_at(run.step)
    inputs, targets = training_batch(
        task.streams,
        step=run.step,
        seed=settings.seed,
        num_windows=settings.batch_tokens // context,
        context=context,
    )
    weights = precise_copies(run.weights, settings.precision)
    output = forward(weights, inputs, task.shape)
    ratio = settings.teacher_ratio_at(run.step) if task.teacher else 0.0
    lesson = logits(task.teacher.weights, inputs, task.teacher.shape).flatten(0, 1) if task.teacher and ratio else None
    loss = tied_cross_entropy(
        output.hidden, weights["embedding"], targets.reshape(-1), teacher_logits=lesson, teacher_ratio=ratio
    )
    routing = settings.balance_at(run.step) * output.balance_loss + settings.router_z_weight * output.router_z_loss
    value = float(loss.detach())
    if not math.isfinite(value):
        raise StudioError(f"the loss is not a number at step {run.step}; use --precision float32 or another --seed")
    (loss + routing).backward()  # type: ignore[no-untyped-call]
    optimisers.step(settings.rate_ratio(run.step))
    return value


def _save(run: Run, optimisers: Optimisers, checkpoints: Checkpoints) -> None:
    """Write the whole state of the run."""
    content = {
        "fingerprint": checkpoints.fingerprint,
        "weights": {name: weight.detach() for name, weight in run.weights.items()},
        "optimisers": optimisers.state(),
        "step": run.step,
        "losses": run.losses,
        "seconds": run.seconds,
    }
    save_checkpoint(checkpoints.path, content)


def held_out_loss(
    weights: Weights,
    shape: NetworkShape,
    streams: Mapping[str, Stream],
    *,
    num_windows: int = 64,
    context: int = 256,
) -> dict[str, float]:
    """Mean next-token loss (nats) of each held-out stream, in the precision of `weights`."""
    losses = {}
    for domain, stream in streams.items():
        windows = evaluation_windows(stream, num_windows=num_windows, context=min(context, len(stream) - 1))
        total = 0.0
        for start in range(0, len(windows), _EVALUATION_ROWS):
            rows = windows[start : start + _EVALUATION_ROWS]
            with torch.no_grad():
                hidden = forward(weights, rows[:, :-1], shape).hidden
                loss = tied_cross_entropy(hidden, weights["embedding"], rows[:, 1:].reshape(-1))
            total += float(loss) * len(rows)
        losses[domain] = total / len(windows)
    return losses
