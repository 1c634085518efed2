"""Prompts from files and options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trace_capture.errors import ModelError
from trace_capture.files import text_digest


def read_prompts(file: Path | None, texts: Sequence[str]) -> list[str]:
    """Prompts from a file (one per line) and from the command line.

    Raises:
        ModelError: the file cannot be read, or there is no prompt.
    """
    prompts = [text for text in texts if text.strip()]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"cannot read prompts from {file}: {error}; give a text file, one prompt per line"
            ) from error
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ModelError("no prompt given; use --text 'some text' or --prompts FILE with one prompt per line")
    return prompts


def prompts_digest(prompts: Sequence[str]) -> str:
    """SHA-256 over a list of prompts."""
    return text_digest("\n".join(prompts))
