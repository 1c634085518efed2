"""`python -m runtime.demo_training`: train the demo model or its draft, and write a model folder."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from runtime.demo_training.settings import preset
from trace_capture.errors import StudioError

_EXAMPLE = """example:
  python -m runtime.demo_training --out demo_model
  python -m runtime.demo_training --out demo_draft --preset draft --teacher demo_model

A stopped run continues from its last checkpoint when the same command is given again.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 when the model was written, 2 for a mistake in the input."""
    options = _parser().parse_args(arguments)
    try:
        _train(options)
    except StudioError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command continues from the last checkpoint\n")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    """The options; defaults of the schedule live in the presets alone."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime.demo_training",
        description="Train the small Mixture-of-Experts demo model on public text, on the CPU.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write the model to")
    add("--preset", default="target", help="target (12 layers, the default) or draft (2 layers)")
    add("--steps", type=int, help="optimiser steps; the learning-rate schedule stretches to fit")
    add("--corpus", default="full", help="full (downloads 15 MB by apt, the default) or stdlib (no download)")
    add("--teacher", type=Path, help="model folder whose predictions and tokenizer a draft takes over")
    add("--seed", type=int, help="seed of the weights and of the order of the text")
    add("--precision", help="bfloat16 (the default) or float32, which is faster on processors without bf16")
    add("--threads", type=int, default=1, help="CPU threads (default 1; more hardly help at this size)")
    add("--work", type=Path, help="folder for downloads and checkpoints (default: OUT/.training)")
    add("--checkpoint-seconds", type=float, default=120.0, help="time between checkpoints (default 120)")
    return parser


def _train(options: argparse.Namespace) -> None:
    """Carry out the command; torch is imported only now, so that --help is quick."""
    chosen = preset(options.preset)
    overrides = {"num_steps": options.steps, "seed": options.seed, "precision": options.precision}
    training = replace(chosen.training, **{key: value for key, value in overrides.items() if value is not None})
    # OpenMP reads this when torch is loaded: beside another busy process a spinning pool slows both many times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    from runtime.demo_training.pipeline import Job, run_job

    job = Job(
        out=options.out,
        work=options.work or options.out / ".training",
        preset_name=options.preset,
        shape=chosen.shape,
        training=training,
        corpus=options.corpus,
        teacher=options.teacher,
        num_threads=options.threads,
        checkpoint_seconds=options.checkpoint_seconds,
    )
    run_job(job)


if __name__ == "__main__":
    sys.exit(main())
