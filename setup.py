"""Compiles the simulator's hot modules with Cython; everything else about the package stands in pyproject.toml.

A module is compiled if it has a `.pxd` beside its `.py`. Without a C compiler, or without Python's headers, the package
installs all the same and runs from its sources: all binaries are there or none, and `moe-studio doctor` says which.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = Path("simulator")
DIRECTIVES = {
    "language_level": 3,
    "annotation_typing": False,
    "infer_types": None,
    "binding": True,
    "embedsignature": False,
    # a mistake raises, as it does in the interpreter, and never crashes or goes on with a wrong number
    "nonecheck": True,
    "boundscheck": True,
    "wraparound": True,
    "overflowcheck": True,
}
UNIX_FLAGS = ["-O2", "-g0", "-ffp-contract=off"]
"""The last keeps the roundings of the interpreter on machines with fused multiply-add."""


def load_guard() -> ModuleType:
    """`simulator/compiled.py` without its package: the one place that knows what is compiled, and the digests of it."""
    spec = spec_from_file_location("compiled", PACKAGE / "compiled.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"no {PACKAGE}/compiled.py here; run setup.py in the folder it lies in")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compiled = load_guard()


def forget(folder: Path) -> None:
    """Remove the binaries of this interpreter, the record of them first: a crash leaves none that count."""
    record(folder, None)
    for path in folder.rglob(f"*{compiled.SUFFIX}"):
        path.unlink()


def record(folder: Path, build: dict[str, object] | None) -> None:
    """Note what was compiled for this interpreter, or that nothing was."""
    path = folder / compiled.RECORD
    try:
        builds = compiled.read_builds(folder)
    except ValueError:
        builds = {}
    builds.pop(compiled.SUFFIX, None)
    if build is not None:
        builds[compiled.SUFFIX] = build
    if not builds:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(builds, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


class BuildHotModules(build_ext):
    """Translates, compiles, and records what was compiled; does nothing when that lies beside the sources already."""

    def run(self) -> None:
        """Build in the build folder and, for an editable installation or `--inplace`, beside the sources."""
        try:
            import Cython
        except ModuleNotFoundError:
            raise SystemExit("compiling needs Cython: pip install 'Cython>=3.1', or pip install -e .") from None
        recipe = Path(__file__).read_bytes() + Cython.__version__.encode() + (os.environ.get("CFLAGS") or "").encode()
        # before anything is read: a source that changes meanwhile then differs from what is recorded
        build = {"sources": compiled.source_digests(PACKAGE), "recipe": hashlib.sha256(recipe).hexdigest()}
        if self.inplace and not self.force and self._is_built(PACKAGE) and self._recorded() == build:
            self.announce("the hot modules are compiled already", level=2)
            return
        folders = [Path(self.build_lib) / PACKAGE]
        if self.inplace:
            folders.append(PACKAGE)
        for folder in folders:
            forget(folder)
        self.force = True  # by content, not by file times
        self._translate()
        super().run()
        for folder in folders:
            if self._is_built(folder):
                record(folder, build)
            else:
                forget(folder)
                self.warn(f"nothing was compiled in {folder}: the simulator will run interpreted, which is slower")

    def build_extensions(self) -> None:
        """Compile, in as many processes as there are cores."""
        self.parallel = self.parallel or os.cpu_count()
        for extension in self.extensions:
            if self.compiler.compiler_type == "unix":
                extension.extra_compile_args = UNIX_FLAGS
        super().build_extensions()

    def _translate(self) -> None:
        """To C, in the build folder. A source that Cython cannot translate is an error, whatever the machine."""
        from Cython.Build import cythonize

        jobs = min(os.cpu_count() or 1, len(self.extensions))
        copies = [Extension(one.name, list(one.sources)) for one in self.extensions]
        translated = cythonize(
            copies,
            nthreads=jobs if jobs > 1 else 0,
            force=True,
            build_dir=self.build_temp,
            compiler_directives=DIRECTIVES,
        )
        sources = {one.name: one.sources for one in translated}
        for extension in self.extensions:
            extension.sources = sources[extension.name]

    def _is_built(self, folder: Path) -> bool:
        return all((folder / f"{name}{compiled.SUFFIX}").is_file() for name in compiled.module_paths(PACKAGE))

    def _recorded(self) -> object:
        try:
            return compiled.read_builds(PACKAGE).get(compiled.SUFFIX)
        except ValueError:
            return None


if __name__ == "__main__":
    setup(
        cmdclass={"build_ext": BuildHotModules},
        ext_modules=[
            Extension(f"{PACKAGE}.{name.replace('/', '.')}", [f"{PACKAGE}/{name}.py"], optional=True)
            for name in compiled.module_paths(PACKAGE)
        ],
    )
