"""Whether the hot modules run compiled or interpreted, and the guard against binaries of other sources.

A module that has a `.pxd` beside its `.py` is compiled by `setup.py`, from that very `.py`, where a C compiler is.
Results are the same either way, only the speed differs. The binary lies beside the source, so an edited source would
silently run as it was; the build therefore records what it compiled in `compiled.json`, and this module compares that
with the sources when `simulator` is first imported (by content: a checkout sets file times as it likes). All listed
modules are loaded from their binaries or none is, because compiled modules know each other's layout in memory.

`MOE_STUDIO_COMPILED=0` in the environment chooses the sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, TypedDict, cast

SWITCH = "MOE_STUDIO_COMPILED"
RECORD = "compiled.json"
SUFFIX = EXTENSION_SUFFIXES[0]
"""Of the binaries of this interpreter; those of others may lie beside them."""
MEND = "`pip install -e .` or `python setup.py build_ext --inplace`"

State = Literal["compiled", "switched off", "not built", "stale"]


class Build(TypedDict):
    """What was compiled for one interpreter."""

    sources: dict[str, str]
    """SHA-256 by path in the package."""
    recipe: str
    """SHA-256 of everything else that the binaries depend on."""


class Status(NamedTuple):
    """How the hot modules run. `modules` are those that are compiled; `reason` says why none is."""

    state: State
    modules: tuple[str, ...] = ()
    reason: str = ""

    @property
    def is_compiled(self) -> bool:
        """The hot modules run from their binaries."""
        return self.state == "compiled"

    @property
    def mend(self) -> str:
        """What to do about it; empty when they are compiled."""
        if self.state == "not built":
            return f"with a C compiler and Python's headers (Debian: gcc, python3-dev), {MEND} compiles them"
        return {"stale": f"{MEND} compiles them again", "switched off": f"unset {SWITCH}", "compiled": ""}[self.state]

    def __str__(self) -> str:
        if self.is_compiled:
            return f"compiled ({', '.join(self.modules)})"
        return f"interpreted, which is slower: {self.reason}"


def module_paths(folder: Path) -> list[str]:
    """The modules of a package to compile, as paths in it without a suffix: those with a `.pxd` beside their `.py`."""
    return sorted(name.removesuffix(".py") for name in source_digests(folder) if name.endswith(".py"))


def source_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the sources that are compiled, by their paths in the package."""
    digests = {}
    for typed in folder.rglob("*.pxd"):
        for path in (typed, typed.with_suffix(".py")):
            if path.is_file():
                digests[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def read_builds(folder: Path) -> dict[str, Build]:
    """What was compiled in a package, by the suffix of the binaries.

    Raises:
        ValueError: the record is damaged.
    """
    try:
        return cast("dict[str, Build]", json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def check(folder: Path) -> Status:
    """Compare what was compiled in a package with its sources and binaries."""
    if os.environ.get(SWITCH) == "0":
        return Status("switched off", reason=f"{SWITCH}=0 is set")
    try:
        build = read_builds(folder).get(SUFFIX)
    except ValueError:
        return Status("stale", reason=f"{folder.name}/{RECORD} is damaged")
    if build is None:
        return Status("not built", reason="nothing was compiled where it is installed")
    now, then = source_digests(folder), build["sources"]
    for name in sorted(now.keys() | then.keys()):
        if now.get(name) != then.get(name):
            return Status("stale", reason=f"{folder.name}/{name} is not what was compiled")
    names = [name.removesuffix(".py") for name in now if name.endswith(".py")]
    for name in names:
        if not (folder / f"{name}{SUFFIX}").is_file():
            return Status("stale", reason=f"{folder.name}/{name}{SUFFIX} is missing")
    return Status("compiled", tuple(sorted(f"{folder.name}.{name.replace('/', '.')}" for name in names)))


class SourceFinder:
    """Finds the modules of a package by their sources, but for those whose binaries were checked."""

    def __init__(self, folder: Path, compiled: tuple[str, ...]) -> None:
        self._prefix = f"{folder.name}."
        self._record = folder / RECORD
        self._compiled = frozenset(compiled)
        self._checked = _identity(self._record)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder`.

        Raises:
            ImportError: binaries were replaced since they were checked, and others of them may be in use already.
        """
        if not name.startswith(self._prefix):
            return None
        if name in self._compiled:
            if _identity(self._record) != self._checked:
                raise ImportError(f"{name} was compiled anew while this process ran; start it again", name=name)
            return None
        for folder in path or ():
            source = Path(folder, f"{name.rpartition('.')[2]}.py")
            if source.is_file():
                return spec_from_file_location(name, source)
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Differs for every file that was ever renamed to `path`."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


_FOLDER = Path(__file__).parent


@cache
def status() -> Status:
    """How the hot modules of this process run, and why."""
    return check(_FOLDER)


def guard() -> None:
    """Decide how the hot modules are loaded; called before any of them is.

    Warns:
        RuntimeWarning: something was compiled, but not from these sources.
    """
    found = status()
    sys.meta_path.insert(0, SourceFinder(_FOLDER, found.modules))
    if found.state == "stale":
        warnings.warn(
            f"{found.reason}, so the simulator runs interpreted, which is slower; {found.mend}, "
            f"and {SWITCH}=0 runs the sources without this warning",
            RuntimeWarning,
            stacklevel=2,
        )
