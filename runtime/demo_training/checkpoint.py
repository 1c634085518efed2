"""Save and restore a run, so that a resumed run ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from trace_capture.errors import StudioError
from trace_capture.files import atomic_path


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (tensors and plain values) to `path` in one piece."""
    with atomic_path(path) as temporary:
        torch.save(content, temporary)


def load_checkpoint(path: Path, *, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint at `path`, or None when there is none.

    Raises:
        StudioError: the file is damaged, or belongs to a run with other settings or text.
    """
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True)
        stored: dict[str, Any] = content["fingerprint"]
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StudioError(f"checkpoint {path} is damaged ({reason}); delete it to start again") from error
    differing = sorted(key for key in {*stored, *fingerprint} if stored.get(key) != fingerprint.get(key))
    if differing:
        raise StudioError(
            f"checkpoint {path} is of another run (differs in {', '.join(differing)}); "
            "use the same options, or another --out, or delete it"
        )
    return content
