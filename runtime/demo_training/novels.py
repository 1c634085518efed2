"""Read the Austen novels out of an R package without R: its lazy-load file holds zlib streams of XDR strings."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from trace_capture.errors import StudioError

_STRING_VECTOR = 16  # R's STRSXP
_MIN_NOVEL_LINES = 1000


def read_novels(rdb_file: Path) -> list[str]:
    """All long texts in an R lazy-load file, in file order, one string per novel with its line breaks.

    Raises:
        StudioError: the file holds no novel.
    """
    data = rdb_file.read_bytes()
    novels = []
    for serialised in _streams(data):
        lines = _string_vector(serialised)
        if len(lines) >= _MIN_NOVEL_LINES:
            novels.append("\n".join(lines).strip() + "\n")
    if not novels:
        raise StudioError(f"{rdb_file} holds no novels; is it data or code of the R package janeaustenr?")
    return novels


def _streams(data: bytes) -> Iterator[bytes]:
    """The decompressed records: each is a big-endian length, then a zlib stream of that many bytes."""
    offset = 0
    while offset + 4 < len(data):
        (length,) = struct.unpack_from(">I", data, offset)
        decompressor = zlib.decompressobj()
        try:
            record = decompressor.decompress(data[offset + 4 :])
        except zlib.error:
            return
        if len(record) != length:
            return
        yield record
        offset = len(data) - len(decompressor.unused_data)


def _string_vector(record: bytes) -> list[str]:
    """The strings of a serialised R character vector; empty for any other object."""
    if record[:2] != b"X\n":
        return []
    (version,) = struct.unpack_from(">i", record, 2)
    offset = 14
    if version == 3:
        (encoding_length,) = struct.unpack_from(">i", record, offset)
        offset += 4 + encoding_length
    flags, count = struct.unpack_from(">ii", record, offset)
    if flags & 0xFF != _STRING_VECTOR:
        return []
    offset += 8
    strings = []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", record, offset + 4)
        offset += 8
        strings.append(record[offset : offset + max(length, 0)].decode("utf-8", "replace"))
        offset += max(length, 0)
    return strings
