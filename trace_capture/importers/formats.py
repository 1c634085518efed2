"""What every importer is: how a file is recognised, what is known beside it, and what comes out."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trace_capture.errors import TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.files import file_digest
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Trace

_LONGEST_FIRST_LINE = 4096


@dataclass(frozen=True)
class FileHead:
    """A file as formats recognise it, read once.

    Attributes:
        path: the file.
        start: its first bytes.
    """

    path: Path
    start: bytes

    @staticmethod
    def of(path: Path) -> FileHead:
        """The head of a file.

        Raises:
            TraceError: missing or empty.
        """
        path = Path(path)
        try:
            with path.open("rb") as stream:
                start = stream.read(_LONGEST_FIRST_LINE)
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}; give the path of a recorded trace") from error
        if not start.strip():
            raise TraceError(f"{path} is an empty file; record the trace again")
        return FileHead(path, start)

    @cached_property
    def line(self) -> str:
        """The first line as text."""
        return (self.start.splitlines() or [b""])[0].decode("utf-8", errors="replace").strip()

    @property
    def is_json(self) -> bool:
        """Whether the file begins like JSON or JSON lines."""
        return self.start.lstrip()[:1] in (b"{", b"[")

    def contains(self, text: bytes) -> bool:
        """Whether these bytes occur anywhere in the file."""
        with self.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0


class ImportOptions(NamedTuple):
    """What is known beside the file.

    Attributes:
        shape: the model, for formats that do not hold its counts and bytes.
        prompt_tokens: tokens of the prompt, for formats that do not tell prefill from decode.
    """

    shape: ModelShape | None = None
    prompt_tokens: int | None = None

    def require_shape(self, path: Path) -> ModelShape:
        """The model's shape.

        Raises:
            TraceError: it was not given.
        """
        if self.shape is None:
            raise TraceError(
                f"{path} does not say the model's layers, experts and bytes: give --model with a built-in name "
                "(such as qwen3-30b-a3b:q4_k_m) or a config.json"
            )
        return self.shape

    def require_prompt_tokens(self, path: Path) -> int:
        """Tokens of the prompt.

        Raises:
            TraceError: they were not given.
        """
        if self.prompt_tokens is None:
            raise TraceError(f"{path} does not tell prefill from decode: give --prompt-tokens N, the prompt's length")
        return self.prompt_tokens


NO_OPTIONS = ImportOptions()


class Importer(NamedTuple):
    """One foreign format: what it is, how a file is recognised, and its reader.

    Attributes:
        description: one line for a person.
        gives: `trace`, or `counts` where the format holds no order, or `either`.
        matches: whether a file is in it.
        read: the reader.
    """

    description: str
    gives: str
    matches: Callable[[FileHead], bool]
    read: Callable[[Path, ImportOptions], Trace | ExpertCounts]


def provenance(path: Path, notes: Sequence[str] = ()) -> dict[str, Any]:
    """What a trace or counts keep of the file they came from."""
    origin: dict[str, Any] = {"file": Path(path).name, "sha256": file_digest(path)}
    return origin | ({"notes": list(notes)} if notes else {})


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        TraceError: missing or not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}; give the path of a recorded trace") from error
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path} is not a text file ({error.reason} at byte {error.start}); record it again"
        ) from error
