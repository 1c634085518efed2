"""Collect the training text: novels, the Jargon File, Python's documentation and Python's own sources."""

from __future__ import annotations

import gzip
import platform
import shutil
import subprocess
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.demo_training.novels import read_novels
from trace_capture.errors import StudioError
from trace_capture.files import file_digest, make_folder, text_digest

DEBIAN_PACKAGES = ("r-cran-janeaustenr", "jargon-text", "python3.11-doc")
CORPORA = ("full", "stdlib")
DOMAIN_WEIGHTS = {"novels": 0.2, "jargon": 0.08, "docs": 0.37, "code": 0.35}
HELD_OUT_MODULES = frozenset(
    "bisect.py calendar.py cmd.py contextlib.py csv.py dis.py fractions.py heapq.py netrc.py pprint.py queue.py "
    "sched.py shelve.py shlex.py textwrap.py timeit.py wave.py zipapp.py".split()
)
_LEFT_OUT_FOLDERS = frozenset(
    "test tests idlelib lib2to3 encodings site-packages dist-packages __pycache__ pydoc_data turtledemo".split()
)
_HELD_OUT_TAIL = 0.04
_HELD_OUT_DOCS_ONE_IN = 25


@dataclass(frozen=True, slots=True)
class Source:
    """Where a domain's text came from: a package with its version and digest."""

    domain: str
    name: str
    version: str
    digest: str
    licence: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out documents by domain, with the provenance of each domain."""

    train: dict[str, list[str]]
    held_out: dict[str, list[str]]
    sources: tuple[Source, ...]

    def num_characters(self, domain: str) -> int:
        """Characters of training text in `domain`."""
        return sum(map(len, self.train[domain]))


def load_corpus(kind: str, cache: Path) -> Corpus:
    """Collect the corpus called `kind`; `full` downloads three Debian packages into `cache` once.

    Raises:
        StudioError: unknown kind, or the packages cannot be had on this machine.
    """
    if kind not in CORPORA:
        raise StudioError(f"no corpus {kind!r}; choose one of {', '.join(CORPORA)}")
    parts = [_code()]
    if kind == "full":
        packages = fetch_packages(make_folder(cache))
        parts = [_novels(packages), _jargon(packages), _docs(packages), *parts]
    return Corpus(
        train={source.domain: train for source, train, _ in parts},
        held_out={source.domain: held_out for source, _, held_out in parts},
        sources=tuple(source for source, _, _ in parts),
    )


def fetch_packages(cache: Path) -> dict[str, tuple[Path, Path]]:
    """Download and unpack the Debian packages; for each name its .deb file and its unpacked folder.

    Raises:
        StudioError: no apt or dpkg here, or the download failed.
    """
    found = {}
    for name in DEBIAN_PACKAGES:
        archives = sorted(cache.glob(f"{name}_*.deb"))
        if not archives:
            _command(["apt-get", "download", name], cache)
            archives = sorted(cache.glob(f"{name}_*.deb"))
        folder = cache / name
        if not folder.is_dir():
            partial = cache / f".{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _command(["dpkg-deb", "-x", str(archives[-1]), str(partial)], cache)
            partial.rename(folder)
        found[name] = (archives[-1], folder)
    return found


def _command(arguments: Sequence[str], folder: Path) -> None:
    """Run a system command in `folder`; its failure is a StudioError that names the way out."""
    advice = "run `apt-get update` first, or train without downloads: --corpus stdlib"
    try:
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StudioError(f"cannot run {arguments[0]}: {error}; {advice}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise StudioError(f"{' '.join(arguments[:3])} failed: {lines[-1]}; {advice}")


_Part = tuple[Source, list[str], list[str]]


def _package_source(domain: str, archive: Path, licence: str) -> Source:
    """Provenance of a domain that comes from a Debian package; the version is in the archive's name."""
    name, version, *_ = archive.stem.split("_")
    return Source(domain, name, version.replace("%3a", ":"), file_digest(archive), licence)


def _split_tail(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut each text into training text and a held-out tail that starts at a line."""
    train, held_out = [], []
    for text in texts:
        cut = text.find("\n", int(len(text) * (1 - _HELD_OUT_TAIL))) + 1
        train.append(text[:cut])
        held_out.append(text[cut:])
    return train, held_out


def _novels(packages: dict[str, tuple[Path, Path]]) -> _Part:
    archive, folder = packages["r-cran-janeaustenr"]
    source = _package_source("novels", archive, "texts public domain; packaging MIT")
    candidates = sorted(folder.rglob("*.rdb"), key=lambda path: -path.stat().st_size)
    return (source, *_split_tail(read_novels(candidates[0])))


def _jargon(packages: dict[str, tuple[Path, Path]]) -> _Part:
    archive, folder = packages["jargon-text"]
    source = _package_source("jargon", archive, "public domain")
    text = gzip.decompress(next(folder.rglob("jargon.txt.gz")).read_bytes()).decode("utf-8", "replace")
    return (source, *_split_tail([text]))


def _docs(packages: dict[str, tuple[Path, Path]]) -> _Part:
    archive, folder = packages["python3.11-doc"]
    source = _package_source("docs", archive, "PSF-2.0")
    root = next(folder.rglob("_sources"))
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.rst.txt")):
        held = zlib.crc32(path.relative_to(root).as_posix().encode()) % _HELD_OUT_DOCS_ONE_IN == 0
        (held_out if held else train).append(path.read_text(encoding="utf-8", errors="replace"))
    return source, train, held_out


def _code() -> _Part:
    """Python's own library sources: always present, nothing to download."""
    root = Path(sysconfig.get_path("stdlib"))
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if _LEFT_OUT_FOLDERS.isdisjoint(inner.parts[:-1]):
            held = len(inner.parts) == 1 and inner.name in HELD_OUT_MODULES
            (held_out if held else train).append(path.read_text(encoding="utf-8", errors="replace"))
    if not train:
        raise StudioError(f"no Python library sources under {root}; install Python with its sources")
    digest = text_digest("".join(train + held_out))
    return Source("code", "Python standard library", platform.python_version(), digest, "PSF-2.0"), train, held_out
