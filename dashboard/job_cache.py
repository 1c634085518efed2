"""The cache through which a background job's progress and result travel: JSON alone, and safe where jobs are forked."""

from __future__ import annotations

import base64
import json
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diskcache
from diskcache.core import MODE_PICKLE
from plotly.utils import PlotlyJSONEncoder

from trace_capture.errors import StudioError

_IN_SQLITE = threading.RLock()
"""Held within SQLite, and while this process forks."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_IN_SQLITE.acquire, after_in_parent=_IN_SQLITE.release, after_in_child=_IN_SQLITE.release
    )


class JsonDisk(diskcache.Disk):  # type: ignore[misc]
    """Values of a cache as compressed JSON; components and figures become what Dash would send of them."""

    def store(self, value: Any, read: bool, key: Any = diskcache.UNKNOWN) -> Any:
        """Pack a value."""
        return super().store(_pack(value), read, key=key)

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
        """Unpack a value.

        Raises:
            StudioError: the cache says that it is a pickle, which this program never writes.
        """
        if mode == MODE_PICKLE:
            raise StudioError("the cache of background jobs holds a pickle, which was not read; restart the dashboard")
        return _unpack(super().fetch(mode, filename, value, read))


class JobCache(diskcache.Cache):  # type: ignore[misc]
    """A cache of a process that forks while its threads use it.

    SQLite's locks and connections do not outlive a fork: a job that is forked while another thread is within SQLite
    waits for ever at its first step. So one thread at a time is within SQLite, a fork waits for it, and no connection
    stays open, so that a job inherits none.
    """

    def __init__(self, directory: str) -> None:
        with _IN_SQLITE:
            super().__init__(directory, disk=JsonDisk, sqlite_journal_mode="delete", sqlite_synchronous=0)
            self.close()

    def get(self, *args: Any, **options: Any) -> Any:
        """See `diskcache.Cache.get`."""
        with self._alone():
            return super().get(*args, **options)

    def set(self, *args: Any, **options: Any) -> Any:
        """See `diskcache.Cache.set`."""
        with self._alone():
            return super().set(*args, **options)

    def add(self, *args: Any, **options: Any) -> Any:
        """See `diskcache.Cache.add`."""
        with self._alone():
            return super().add(*args, **options)

    def delete(self, *args: Any, **options: Any) -> Any:
        """See `diskcache.Cache.delete`."""
        with self._alone():
            return super().delete(*args, **options)

    @contextmanager
    def transact(self, retry: bool = False) -> Iterator[None]:
        """See `diskcache.Cache.transact`."""
        with self._alone(), super().transact(retry):
            yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with _IN_SQLITE:
            try:
                yield
            finally:
                if self._txn_id is None:
                    self.close()


def _pack(value: Any) -> bytes:
    if isinstance(value, bytes):
        value = {"bytes": base64.b64encode(value).decode()}
    else:
        value = {"json": value}
    return zlib.compress(json.dumps(value, cls=PlotlyJSONEncoder).encode(), 1)


def _unpack(packed: bytes) -> Any:
    content = json.loads(zlib.decompress(packed))
    return base64.b64decode(content["bytes"]) if "bytes" in content else content["json"]
