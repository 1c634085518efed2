"""Writing files so that nothing half-written is ever seen, and naming them by content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trace_capture.errors import StudioError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; rename it to `path` when the block ends well, remove it otherwise.

    Raises:
        StudioError: the folder does not exist and cannot be made, or cannot be written to.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    make_folder(path.parent)
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise StudioError(f"cannot write {path}: {error.strerror or error}; choose another place with --out") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` by way of a temporary file."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def make_folder(folder: Path) -> Path:
    """Make `folder` with its parents and check that files can be made in it.

    Raises:
        StudioError: the folder cannot be made, is a file, or is read-only.
    """
    folder = Path(folder)
    probe = folder / f".write-check-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StudioError(
            f"cannot write to folder {folder}: {error.strerror or error}; choose another place with --out"
        ) from error
    return folder


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, as `sha256:<hex>`."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def text_digest(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, as `sha256:<hex>`."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
