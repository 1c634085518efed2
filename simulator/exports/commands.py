"""Commands of other engines, as argument lists and as lines of a shell script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

ABOUT = "@ABOUT@"
"""Where the head comment goes in a file's text."""


def command_line(words: Sequence[str]) -> str:
    """The words as a POSIX shell takes them."""
    return " ".join(shlex.quote(word) for word in words)


def script(words: Sequence[str], before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    """A shell script that runs one command, with the head comment in front.

    Args:
        words: the command.
        before: lines in front of it.
        after: comments behind it.
    """
    lines = ["#!/bin/sh", ABOUT, *before, f'exec {command_line(words)} "$@"', *(f"# {line}" for line in after)]
    return "\n".join(lines) + "\n"


def plain_name(name: str) -> str:
    """A model's name as a section or file name: letters, digits, dot, underscore and minus."""
    last = PurePosixPath(name).name
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in last) or "model"
