"""Compiled and interpreted give the same bytes, and binaries of other sources are never loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator import compiled
from tests.simulator.compiled_cases import binaries, digests

ROOT = Path(__file__).parents[2]
SOURCES = ("hot.py", "policies/core.py")


def test_compiled_modules_give_the_bytes_of_the_interpreter() -> None:
    status = compiled.status()
    if not status.is_compiled:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the suite must test what users get, and the hot modules are {status}")
        pytest.skip(f"nothing to compare: {status}")
    ours = digests()
    assert binaries() == sorted(status.modules)
    command = [sys.executable, "-m", "tests.simulator.compiled_cases"]
    switched_off = os.environ | {compiled.SWITCH: "0"}
    result = subprocess.run(command, cwd=ROOT, env=switched_off, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    interpreted = json.loads(result.stdout)
    assert interpreted["binaries"] == []
    for mine, theirs in zip(ours, interpreted["digests"], strict=True):
        assert mine == theirs


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package that was compiled, with the project's guard. Its binaries are none: to load one is an error."""
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    folder = tmp_path / "simulator"
    (folder / "policies").mkdir(parents=True)
    for name in ("__init__.py", "compiled.py"):
        shutil.copy(ROOT / "simulator" / name, folder)
    (folder / "policies" / "__init__.py").touch()
    for name in SOURCES:
        path = folder / name
        path.write_text("NAME = __name__\n")
        path.with_suffix(".pxd").touch()
        path.with_suffix(compiled.SUFFIX).write_bytes(b"no binary")
    record(folder, compiled.SUFFIX)
    return folder


def record(folder: Path, suffix: str) -> None:
    build = {"sources": compiled.source_digests(folder), "recipe": ""}
    (folder / compiled.RECORD).write_text(json.dumps({suffix: build}))


def load(folder: Path, *modules: str) -> subprocess.CompletedProcess[str]:
    """Import modules in a process of its own, printing the files that they came from."""
    lines = [f"import importlib; print(importlib.import_module('{name}').__file__)" for name in modules]
    return subprocess.run(
        [sys.executable, "-S", "-c", "\n".join(lines)], cwd=folder.parent, capture_output=True, text=True, timeout=60
    )


def files(folder: Path) -> str:
    return "".join(f"{folder / name}\n" for name in SOURCES)


def test_binaries_of_these_very_sources_are_used(package: Path) -> None:
    status = compiled.check(package)
    assert status == ("compiled", ("simulator.hot", "simulator.policies.core"), "")
    result = load(package, "simulator.hot")
    assert "ImportError" in result.stderr and f"hot{compiled.SUFFIX}" in result.stderr


def test_other_file_times_mean_nothing(package: Path) -> None:
    for path in package.rglob("*.py"):
        os.utime(path, (1, 1) if path.name == "hot.py" else None)
    assert compiled.check(package).is_compiled


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "policies/core.py").write_text("NAME = 1\n"), "policies/core.py"),
        (lambda folder: (folder / "hot.pxd").write_text("cdef int x\n"), "hot.pxd"),
        (lambda folder: (folder / "policies/__init__.pxd").touch(), "policies/__init__.pxd"),
        (lambda folder: (folder / "hot.pxd").unlink(), "hot.pxd"),
        (lambda folder: (folder / f"hot{compiled.SUFFIX}").unlink(), f"hot{compiled.SUFFIX}"),
        (lambda folder: (folder / compiled.RECORD).write_text("{"), compiled.RECORD),
    ],
    ids=["source", "types", "new", "gone", "no binary", "damaged"],
)
def test_one_difference_sends_all_modules_to_their_sources_with_a_warning(
    package: Path, change: Callable[[Path], object], named: str
) -> None:
    change(package)
    status = compiled.check(package)
    assert status.state == "stale" and not status.modules and f"simulator/{named} " in status.reason
    result = load(package, "simulator.hot", "simulator.policies.core")
    assert (result.returncode, result.stdout) == (0, files(package)), result.stderr
    assert result.stderr.count("RuntimeWarning") == 1
    assert status.reason in result.stderr and "python setup.py build_ext --inplace" in result.stderr


def test_where_nothing_was_built_for_this_interpreter_sources_run_without_a_warning(package: Path) -> None:
    record(package, ".cpython-27-vax.so")
    status = compiled.check(package)
    assert status.state == "not built"
    result = load(package, "simulator.hot", "simulator.policies.core")
    assert (result.stdout, result.stderr) == (files(package), ""), "binaries of a build that did not end do not count"
    (package / compiled.RECORD).unlink()
    assert compiled.check(package) == status


def test_the_environment_chooses_the_sources(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "0")
    (package / "hot.py").write_text("NAME = 1\n")
    assert compiled.check(package).state == "switched off"
    result = load(package, "simulator.hot", "simulator.policies.core")
    assert (result.stdout, result.stderr) == (files(package), "")


def test_a_binary_that_is_not_on_record_is_passed_over(package: Path) -> None:
    """Such as that of a module which is no longer compiled on another branch."""
    (package / "cold.py").touch()
    (package / f"cold{compiled.SUFFIX}").write_bytes(b"no binary")
    assert compiled.check(package).is_compiled
    result = load(package, "simulator.cold")
    assert result.stdout == f"{package / 'cold.py'}\n", result.stderr


def test_binaries_that_were_replaced_meanwhile_are_not_mixed_with_those_in_use(package: Path) -> None:
    finder = compiled.SourceFinder(package, compiled.check(package).modules)
    assert finder.find_spec("simulator.hot", [str(package)]) is None, "left to the finders behind it"
    fresh = package / "fresh"
    shutil.copy(package / compiled.RECORD, fresh)
    fresh.replace(package / compiled.RECORD)
    with pytest.raises(ImportError, match="compiled anew while this process ran"):
        finder.find_spec("simulator.hot", [str(package)])
