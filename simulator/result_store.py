"""Results of simulations by the digest of what went in, in one SQLite file: sweeps resume and never repeat work."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from trace_capture.errors import StudioError
from trace_capture.files import make_folder

_MAX_KEYS = 500
"""Keys asked for at once, below the limit of SQLite's variables."""


class ResultStore:
    """Results as JSON by key. Only the process that sweeps writes; a killed sweep keeps what was written.

    Args:
        path: file to open or make.

    Raises:
        StudioError: it is not such a file, or cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        make_folder(self._path.parent)
        try:
            with closing(self._open()) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        except sqlite3.Error as error:
            raise StudioError(f"{self._path} is no store of results ({error}); give another file") from error

    def find(self, keys: Iterable[str]) -> dict[str, Any]:
        """Those of `keys` that are known, with their results."""
        wanted = list(dict.fromkeys(keys))
        found: dict[str, Any] = {}
        with closing(self._open()) as connection:
            for start in range(0, len(wanted), _MAX_KEYS):
                part = wanted[start : start + _MAX_KEYS]
                marks = ",".join("?" * len(part))
                rows = connection.execute(f"SELECT key, value FROM results WHERE key IN ({marks})", part)  # noqa: S608
                found |= {key: json.loads(value) for key, value in rows}
        return found

    def add(self, results: Mapping[str, Any]) -> None:
        """Keep results; a key that is known already is overwritten."""
        rows = [(key, json.dumps(value)) for key, value in results.items()]
        with closing(self._open()) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", rows)

    def __len__(self) -> int:
        with closing(self._open()) as connection:
            return int(connection.execute("SELECT COUNT(*) FROM results").fetchone()[0])

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=30)
