"""Reading one folder: what the demo, `simulate`, `run` and `tune` left there. Nothing outside it is opened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from trace_capture.errors import StudioError, TraceError
from trace_capture.hardware import HardwareProfile
from trace_capture.run import RUN_SUFFIX, SPANS_SUFFIX, Run
from trace_capture.trace import Trace
from trace_capture.trace_store import partial_path

TRACE_NAME = "trace.parquet"
HARDWARE_NAME = "hardware.toml"
TUNED_NAME = "tuned.toml"
OTHER_NAMES = ("report.html", "timeline.perfetto.json")
MAX_TEXT_BYTES = 256 * 1024

Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class NamedRun:
    """A run and the name of its file without the suffix, which is unique in the folder."""

    name: str
    run: Run


@dataclass(frozen=True)
class Snapshot:
    """What a folder held when it was read. `problems` has one line for each file that could not be read."""

    folder: Path
    trace: Trace | None = None
    hardware: HardwareProfile | None = None
    tuned: str | None = None
    runs: tuple[NamedRun, ...] = ()
    other_files: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def run(self, name: str | None) -> NamedRun | None:
        """The run of that name; None where the folder has none."""
        return next((item for item in self.runs if item.name == name), None)


class Workspace:
    """A folder that is read again whenever asked, each file only when it has changed.

    Args:
        folder: where runs and traces lie.

    Raises:
        StudioError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).resolve()
        if not self.folder.is_dir():
            raise StudioError(f"no folder {folder} to show; make one with 'moe-studio demo --out {folder}'")
        self._cache: dict[Path, tuple[Stamp, Any, str]] = {}
        self._lock = threading.Lock()

    def read(self) -> Snapshot:
        """The folder as it is now. Files that cannot be read become lines of `problems`."""
        with self._lock:
            return self._read()

    def _read(self) -> Snapshot:
        problems: list[str] = []
        try:
            summaries = sorted(self.folder.glob(f"*{RUN_SUFFIX}"))
        except OSError as error:
            return Snapshot(self.folder, problems=(f"cannot list {self.folder}: {error.strerror}",))
        runs = []
        for path in summaries:
            run = self._load(path, load_run, problems, (spans_path(path),))
            if run is not None:
                runs.append(NamedRun(path.name.removesuffix(RUN_SUFFIX), run))
        trace_path = self.folder / TRACE_NAME
        trace = self._load(trace_path, Trace.load, problems, (partial_path(trace_path),))
        hardware = self._load(self.folder / HARDWARE_NAME, HardwareProfile.load, problems)
        tuned = self._load(self.folder / TUNED_NAME, load_text, problems)
        others = tuple(name for name in OTHER_NAMES if (self.folder / name).is_file())
        self._forget_removed()
        return Snapshot(self.folder, trace, hardware, tuned, tuple(runs), others, tuple(problems))

    def _load(
        self, path: Path, load: Callable[[Path], Any], problems: list[str], companions: tuple[Path, ...] = ()
    ) -> Any:
        """`load(path)` from the cache or afresh; None where there is no such file or it cannot be read."""
        present = [item for item in (path, *companions) if item.is_file()]
        if not present:
            return None
        outside = [item.name for item in present if not item.resolve().is_relative_to(self.folder)]
        if outside:
            problems.append(f"{outside[0]} points to a place outside {self.folder}; it was not opened, copy it in")
            return None
        stamp = tuple((status.st_mtime_ns, status.st_size) for status in (item.stat() for item in present))
        cached = self._cache.get(path)
        if cached is None or cached[0] != stamp:
            cached = self._cache[path] = (stamp, *_attempt(path, load))
        if cached[2]:
            problems.append(cached[2])
        return cached[1]

    def _forget_removed(self) -> None:
        for path in [path for path in self._cache if not path.is_file() and not partial_path(path).is_file()]:
            del self._cache[path]


def spans_path(summary: Path) -> Path:
    """The timeline that belongs to a `.run.json`."""
    return summary.with_name(summary.name.removesuffix(RUN_SUFFIX) + SPANS_SUFFIX)


def load_run(path: Path) -> Run:
    """A run whose spans can be drawn.

    Raises:
        TraceError: as `Run.load`, or a span lacks a field or ends before it begins.
    """
    run = Run.load(path)
    for index, span in enumerate(run.spans):
        if None in span or span.end_ns < span.start_ns:
            raise TraceError(
                f"{spans_path(path)}: row {index} is not a span (an empty cell, or an end before its start)"
            )
    return run


def load_text(path: Path) -> str:
    """A small text file.

    Raises:
        StudioError: it is large, or not UTF-8.
    """
    raw = path.read_bytes()
    if len(raw) > MAX_TEXT_BYTES:
        raise StudioError(f"{path} has {len(raw):,} bytes, too many for a configuration; make it again with 'tune'")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StudioError(f"{path} is not UTF-8 text ({error.reason}); make it again with 'tune'") from error


def _attempt(path: Path, load: Callable[[Path], Any]) -> tuple[Any, str]:
    """What `load` gives and an empty text, or None and the reason why it failed."""
    try:
        return load(path), ""
    except StudioError as error:
        return None, str(error)
    except (OSError, ValueError, TypeError, LookupError, OverflowError, MemoryError, pa.ArrowException) as error:
        # A damaged file must not take the page down, whichever library trips over it first.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return None, f"{path} cannot be read ({reason}); it is damaged, make it again"
