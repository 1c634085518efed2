"""Reading one folder: what the demo, `simulate`, `run` and `tune` left there. Nothing outside it is opened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from dashboard.span_columns import SpanColumns, span_columns
from simulator.config_file import load_config
from simulator.policies.config import OffloadConfig
from simulator.validation.record import ValidationRecord
from trace_capture.errors import StudioError, TraceError
from trace_capture.hardware import HardwareProfile, read_toml
from trace_capture.run import RUN_SUFFIX, SPANS_SUFFIX, Run
from trace_capture.trace import Trace
from trace_capture.trace_store import PARTIAL_SUFFIX, partial_path

TRACE_NAME = "trace.parquet"
HARDWARE_NAME = "hardware.toml"
TUNED_NAME = "tuned.toml"
OTHER_NAMES = ("report.html", "timeline.perfetto.json")
TRACE_SUFFIX = ".parquet"
MAX_TEXT_BYTES = 256 * 1024
MAX_RECORD_BYTES = 16 * 1024 * 1024

Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class NamedRun:
    """A run and the name of its file without the suffix, which is unique in the folder."""

    name: str
    run: Run

    @cached_property
    def columns(self) -> SpanColumns:
        """Its timeline as arrays; made once, as long as the file does not change."""
        return span_columns(self.run.spans)


@dataclass(frozen=True)
class NamedTrace:
    """A trace and the name of its file."""

    name: str
    trace: Trace


@dataclass(frozen=True)
class NamedProfile:
    """A hardware profile and the name of its file."""

    name: str
    profile: HardwareProfile


@dataclass(frozen=True)
class NamedConfig:
    """An offload configuration, its text and the name of its file."""

    name: str
    text: str
    config: OffloadConfig


@dataclass(frozen=True)
class NamedRecord:
    """A validation record and the name of its file."""

    name: str
    record: ValidationRecord


@dataclass(frozen=True)
class Snapshot:
    """What a folder held when it was read. `problems` has one line for each file that could not be read.

    The customary names `trace.parquet`, `hardware.toml` and `tuned.toml` come first among their kind.
    """

    folder: Path
    traces: tuple[NamedTrace, ...] = ()
    profiles: tuple[NamedProfile, ...] = ()
    configs: tuple[NamedConfig, ...] = ()
    records: tuple[NamedRecord, ...] = ()
    runs: tuple[NamedRun, ...] = ()
    other_files: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def run(self, name: str | None) -> NamedRun | None:
        """The run of that name; None where the folder has none."""
        return next((item for item in self.runs if item.name == name), None)

    def named_trace(self, name: str | None = None) -> NamedTrace | None:
        """The trace of that name, else the first one; None where the folder has none."""
        first = next(iter(self.traces), None)
        return next((item for item in self.traces if item.name == name), first)

    @property
    def trace(self) -> Trace | None:
        """The first trace."""
        return self.traces[0].trace if self.traces else None

    @property
    def hardware(self) -> HardwareProfile | None:
        """The first hardware profile."""
        return self.profiles[0].profile if self.profiles else None

    @property
    def tuned(self) -> NamedConfig | None:
        """The first configuration."""
        return self.configs[0] if self.configs else None


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

    def read(self, *, runs: bool = True) -> Snapshot:
        """The folder as it is now. Files that cannot be read become lines of `problems`.

        Args:
            runs: whether runs are wanted; their timelines are the largest part of a folder.
        """
        with self._lock:
            return self._read(runs)

    def _read(self, with_runs: bool) -> Snapshot:
        problems: list[str] = []
        try:
            names = sorted(path.name for path in self.folder.iterdir())
        except OSError as error:
            return Snapshot(self.folder, problems=(f"cannot list {self.folder}: {error.strerror}",))
        paths = [self.folder / name for name in names]

        def load(
            chosen: Iterable[Path], reader: Callable[[Path], Any], companion: Callable[[Path], Path] | None = None
        ) -> list[Any]:
            loaded = [
                self._load(path, reader, problems, (companion(path),) if companion is not None else ())
                for path in chosen
            ]
            return [item for item in loaded if item is not None]

        summaries = [path for path in paths if with_runs and path.name.endswith(RUN_SUFFIX)]
        runs = load(summaries, load_run, spans_path)
        traces = load(_first(TRACE_NAME, _trace_paths(paths)), load_trace, partial_path)
        settings = load((path for path in paths if path.suffix == ".toml"), load_settings)
        records = load((path for path in paths if _may_be_record(path.name)), load_record)
        self._forget_removed()
        return Snapshot(
            self.folder,
            tuple(traces),
            _first_named(HARDWARE_NAME, (item for item in settings if isinstance(item, NamedProfile))),
            _first_named(TUNED_NAME, (item for item in settings if isinstance(item, NamedConfig))),
            tuple(item for item in records if isinstance(item, NamedRecord)),
            tuple(runs),
            tuple(name for name in OTHER_NAMES if (self.folder / name).is_file()),
            tuple(problems),
        )

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
            cached = self._cache[path] = (stamp, *attempt(path, load))
        if cached[2]:
            problems.append(cached[2])
        return cached[1]

    def _forget_removed(self) -> None:
        for path in [path for path in self._cache if not path.is_file() and not partial_path(path).is_file()]:
            del self._cache[path]


def _trace_paths(paths: Sequence[Path]) -> list[Path]:
    """Files that should be traces, finished or not; the name of an unfinished one is that of the file it becomes."""
    finished = [path.with_name(path.name.removesuffix(PARTIAL_SUFFIX)) for path in paths]
    wanted = [path for path in finished if path.name.endswith(TRACE_SUFFIX) and not path.name.endswith(SPANS_SUFFIX)]
    return [path for path in dict.fromkeys(wanted) if not path.name.startswith(".")]


def _first(name: str, paths: Sequence[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path.name != name, path.name))


def _first_named(name: str, items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(items, key=lambda item: (item.name != name, item.name)))


def _may_be_record(name: str) -> bool:
    return name.endswith(".json") and not name.endswith((RUN_SUFFIX, *OTHER_NAMES)) and not name.startswith(".")


def spans_path(summary: Path) -> Path:
    """The timeline that belongs to a `.run.json`."""
    return summary.with_name(summary.name.removesuffix(RUN_SUFFIX) + SPANS_SUFFIX)


def load_run(path: Path) -> NamedRun:
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
    return NamedRun(path.name.removesuffix(RUN_SUFFIX), run)


def load_trace(path: Path) -> NamedTrace:
    """A trace by its file name.

    Raises:
        TraceError: as `Trace.load`.
    """
    return NamedTrace(path.name, Trace.load(path))


def load_settings(path: Path) -> NamedProfile | NamedConfig:
    """A hardware profile, which is a TOML file with a table `link`, or else an offload configuration.

    Raises:
        StudioError: it is neither, or says something that cannot be.
    """
    text = load_text(path)
    if "link" in read_toml(path, "TOML file"):
        return NamedProfile(path.name, HardwareProfile.load(path))
    return NamedConfig(path.name, text, load_config(path))


def load_record(path: Path) -> NamedRecord | str:
    """A validation record, or an empty text where the file is other JSON.

    Raises:
        TraceError: as `ValidationRecord.load`.
    """
    if path.stat().st_size > MAX_RECORD_BYTES:
        return ""
    with path.open("rb") as stream:
        head = stream.read(65_536)
    if b'"bands"' not in head or b'"source"' not in head:
        return ""
    return NamedRecord(path.name, ValidationRecord.load(path))


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


def attempt(path: Path, load: Callable[[Path], Any]) -> tuple[Any, str]:
    """What `load` gives and an empty text, or None and the reason why it failed."""
    try:
        return load(path), ""
    except StudioError as error:
        return None, str(error)
    except (OSError, ValueError, TypeError, LookupError, OverflowError, MemoryError, pa.ArrowException) as error:
        # A damaged file must not take the page down, whichever library trips over it first.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return None, f"{path} cannot be read ({reason}); it is damaged, make it again"
