"""Dumps of SGLang's expert distribution recorder and kt-kernel's `logical_count` files, which are torch files.

They are read with `weights_only=True`: tensors, numbers, texts, lists and dictionaries, nothing that could run code.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_capture.errors import StudioError, TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.importers.formats import FileHead, ImportOptions
from trace_capture.importers.sglang_records import from_records
from trace_capture.trace import Trace


def is_torch_file(head: FileHead) -> bool:
    """Whether a file is what `torch.save` writes."""
    return head.start.startswith(b"PK") and zipfile.is_zipfile(head.path) and head.contains(b"data.pkl")


def read_recorder(path: Path, options: ImportOptions) -> Trace | ExpertCounts:
    """Read a dump: a trace where it has the ids of every token, else counts.

    Raises:
        TraceError: cut, holds objects that are not loaded, or not such a dump; see `from_records`.
        StudioError: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise StudioError(
            f"reading {path} needs torch, which is not installed: pip install 'moe-studio[live]'"
        ) from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise TraceError(
            f"{path} holds Python objects beside tensors, which could run code and are not loaded: save it again with "
            "plain lists, numbers and tensors"
        ) from error
    except (RuntimeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path} cannot be read as a torch file ({str(error).splitlines()[0]}); it was cut") from error
    if not isinstance(content, dict):
        raise TraceError(f"{path} holds a {type(content).__name__}, wanted a dump of SGLang's recorder")
    return from_records(_arrays(content), path, options)


def _arrays(value: Any) -> Any:
    """The same with numpy arrays in place of tensors."""
    if isinstance(value, Mapping):
        return {key: _arrays(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_arrays(entry) for entry in value]
    return value.numpy() if hasattr(value, "numpy") else value
