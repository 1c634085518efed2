"""Safetensors files, mapped: tensors and rows of tensors as views of the file, read ahead in one request each."""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from trace_capture.errors import ModelError

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_HAS_READ_AHEAD = hasattr(mmap, "MADV_WILLNEED")


class TensorFile:
    """One safetensors file in a private mapping: what is read stays in the page cache and can be reclaimed.

    Views keep the mapping alive; writing to one never reaches the file.

    Args:
        path: the file.

    Raises:
        ModelError: the file is missing, cut short or not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if 0 < length < path.stat().st_size else None
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(_complaint(path, "missing" if not path.exists() else str(error))) from error
        if not isinstance(header, dict):
            raise ModelError(_complaint(path, "damaged: it has no safetensors header"))
        self._start = 8 + length
        self._entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
        wanted = self._start + max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)
        if wanted > len(self._map):
            raise ModelError(_complaint(path, f"cut short: it has {len(self._map)} of {wanted} bytes"))

    def keys(self) -> list[str]:
        """Names of its tensors."""
        return list(self._entries)

    def meta(self, key: str) -> Tensor:
        """A tensor's shape and dtype, without its numbers.

        Raises:
            ModelError: it is stored in a format that experts cannot be streamed from.
        """
        entry = self._entries[key]
        if entry["dtype"] not in _DTYPES:
            raise ModelError(
                f"{key} in {self.path} is stored as {entry['dtype']}; experts can be streamed only from "
                f"{', '.join(_DTYPES)} checkpoints: convert it to bfloat16, or load the model whole"
            )
        return torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device="meta")

    def read(self, key: str, row: int | None = None) -> Tensor:
        """A view of a tensor, or of one index of its first axis; its pages are asked for at once."""
        like = self.meta(key) if row is None else self.meta(key)[row]
        count = math.prod(like.shape)
        offset = self._start + int(self._entries[key]["data_offsets"][0]) + (row or 0) * count * like.element_size()
        self._read_ahead(offset, count * like.element_size())
        return torch.frombuffer(self._map, dtype=like.dtype, count=count, offset=offset).view(like.shape)

    def release(self) -> None:
        """Take the file's pages out of this process; they stay in the system's page cache, and views stay valid."""
        if _HAS_READ_AHEAD:
            self._map.madvise(mmap.MADV_DONTNEED)

    def _read_ahead(self, offset: int, num_bytes: int) -> None:
        if _HAS_READ_AHEAD and num_bytes:
            first = offset - offset % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, offset + num_bytes - first)


def _complaint(path: Path, what: str) -> str:
    return f"the weights file {path} is {what}; copy or download this file again"
