"""Taking in a trace that was dropped on the page: checked by the trace reader before it is in the folder."""

from __future__ import annotations

import base64
import binascii
import re
import threading
from pathlib import Path

import pyarrow.parquet as pq

from dashboard.data import attempt
from trace_capture.errors import StudioError
from trace_capture.files import atomic_path
from trace_capture.run import SPANS_SUFFIX
from trace_capture.trace import Trace

MAX_UPLOAD_BYTES = 64 * 1024 * 1024
MAX_UNPACKED_BYTES = 1024 * 1024 * 1024
MAX_REQUEST_BYTES = MAX_UPLOAD_BYTES * 4 // 3 + 1024 * 1024
"""A file of the largest size as the browser sends it, in base64."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,119}\.parquet")
_lock = threading.Lock()


def save_trace(folder: Path, name: str, content: str) -> Trace:
    """Put an uploaded trace into a folder.

    Args:
        folder: the opened folder.
        name: file name that the browser gave.
        content: a data URL, as `dcc.Upload` gives it.

    Raises:
        StudioError: the name is no plain name of a trace or is taken, the file is too large, or the trace reader
            refuses it. Nothing is written then.
    """
    path = Path(folder) / _checked_name(name)
    data = _decoded(name, content)
    with _lock:
        if path.exists() or path.is_symlink():
            raise StudioError(f"there is a {name} in {folder} already; rename the file and drop it again")
        with atomic_path(path) as temporary:
            temporary.write_bytes(data)
            trace, reason = attempt(temporary, _load_checked)
            if reason:
                raise StudioError(f"{name} was not taken in: {reason.replace(str(temporary), name)}")
    return trace  # type: ignore[no-any-return]


def _load_checked(path: Path) -> Trace:
    """A trace, unless it would unpack to far more than its file has."""
    groups = pq.read_metadata(path)
    size = sum(groups.row_group(place).total_byte_size for place in range(groups.num_row_groups))
    if size > MAX_UNPACKED_BYTES:
        raise StudioError(f"{path} unpacks to {size / 1e9:.1f} GB, which is too much for the page; copy it in instead")
    return Trace.load(path)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name.endswith(SPANS_SUFFIX):
        raise StudioError(
            f"'{name[:120]}' is not the name of a trace; it has to be a plain name that ends in .parquet, "
            "such as trace-2.parquet"
        )
    return name


def _decoded(name: str, content: str) -> bytes:
    encoded = content.partition(",")[2]
    size = len(encoded) * 3 // 4
    if size > MAX_UPLOAD_BYTES:
        raise StudioError(
            f"{name} has {size / 1e6:.0f} MB, and {MAX_UPLOAD_BYTES / 1e6:.0f} MB are taken at most; "
            "copy it into the folder instead"
        )
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise StudioError(f"{name} arrived damaged ({error}); drop it again") from error
