"""The typer application and what all verbs share: output, errors, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="moe-studio",
    help="Find, tune and run the fastest way to offload the experts of a Mixture-of-Experts model on your machine.\n\n"
    "Start with: moe-studio demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")]
Out = Annotated[Path, typer.Option("--out", help="File to write.")]


def console(to_stderr: bool = False, width: int | None = None) -> Console:
    """A rich console that never invents line breaks inside a value; as wide as the terminal unless told otherwise."""
    from rich.console import Console

    return Console(stderr=to_stderr, highlight=False, soft_wrap=True, width=width)


def say(text: str) -> None:
    """Print a line for a person."""
    console().print(text, markup=False)


def say_next(command: str) -> None:
    """Print what to do next."""
    say(f"next: {command}")


def say_json(value: Any) -> None:
    """Print one JSON object."""
    sys.stdout.write(json.dumps(value, indent=1, sort_keys=True, default=str) + "\n")


def assignments(texts: list[str], option: str) -> dict[str, str]:
    """NAME=VALUE texts of a repeatable option.

    Raises:
        ConfigError: a text has no name or no `=`.
    """
    from trace_capture.errors import ConfigError

    pairs: dict[str, str] = {}
    for text in texts:
        name, joint, value = text.partition("=")
        if not joint or not name.strip():
            raise ConfigError(f"{option} {text}: wanted NAME=VALUE, such as gpu=rtx4090")
        pairs[name.strip()] = value.strip()
    return pairs


def fail(message: str) -> None:
    """Print one clear line about a mistake in the input."""
    sys.stderr.write(f"moe-studio: {' '.join(message.split())}\n")


def live_extra(error: ModuleNotFoundError) -> Exception:
    """The error for a verb that needs torch where it is not installed."""
    from trace_capture.errors import StudioError

    return StudioError(f"this command needs {error.name}, which is not installed: pip install 'moe-studio[live]'")


@contextmanager
def needs_live() -> Iterator[None]:
    """Turn a missing torch or transformers into the pip command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("torch", "transformers", "safetensors", "tokenizers"):
            raise live_extra(error) from error
        raise


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Progress with the time left, on standard error. Gives a function that starts a step and gives its reporter."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console(to_stderr=True), disable=not shown) as bar:

        def step(title: str) -> Callable[[int, int], None]:
            task = bar.add_task(title, total=1)

            def report(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            return report

        try:
            yield step
        except BaseException:
            for task in bar.task_ids:  # the error gets the screen to itself
                bar.remove_task(task)
            raise


def quiet_threads() -> None:
    """Leave a core to the link's thread: one compute thread on a machine of few cores."""
    import os

    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
