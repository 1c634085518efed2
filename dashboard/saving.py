"""Writing a configuration into the opened folder under a new name."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.config_file import save_config
from simulator.policies.config import parse_config
from trace_capture.errors import StudioError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,119}\.toml")
_lock = threading.Lock()


def save_new_config(folder: Path, name: str, raw: Mapping[str, Any]) -> Path:
    """Check a configuration and write it, atomically; nothing is overwritten.

    Args:
        folder: the opened folder.
        name: a plain file name.
        raw: the configuration, as the browser kept it.

    Raises:
        StudioError: the name is no plain name or is taken, or the configuration is none.
    """
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise StudioError(f"'{name[:120]}' is not a plain file name that ends in .toml, such as tuned-2.toml")
    config = parse_config(dict(raw), name)
    path = Path(folder) / name
    with _lock:
        if path.exists() or path.is_symlink():
            raise StudioError(f"{name} is here already; take another name, such as {free_name(folder)}")
        save_config(config, path)
    return path


def free_name(folder: Path) -> str:
    """`tuned.toml`, or the first of `tuned-2.toml`, `tuned-3.toml` and so on that is not taken."""
    taken = {path.name for path in Path(folder).iterdir()}
    place = 1
    while (name := "tuned.toml" if place == 1 else f"tuned-{place}.toml") in taken:
        place += 1
    return name
