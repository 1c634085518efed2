"""The house rules that a machine can check: types, lint, import directions, no torch below the engine, sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("trace_capture", "simulator", "runtime", "dashboard")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAY_IMPORT_TORCH = ("runtime/", "trace_capture/hooks.py")


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["lint-imports"]],
    ids=lambda command: " ".join(command),
)
def test_tools_are_content(command: list[str]) -> None:
    tool = Path(sys.executable).with_name(command[0])
    result = subprocess.run([tool, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_simulator_dashboard_and_help_work_without_torch() -> None:
    code = "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"
    code += "import simulator, dashboard.app, dashboard.report, simulator.tune, simulator.timeline\n"
    code += "import trace_capture.importers, trace_capture.known_shapes, simulator.validation.record\n"
    code += "import runtime.cli.evaluation, runtime.cli.exports, runtime.cli.hardware, runtime.cli.live\n"
    code += "import runtime.cli.imports, runtime.cli.machines, runtime.cli.show, runtime.cli.traces\n"
    code += "import runtime.cli.tune, runtime.cli.validation, runtime.cli.whatif, simulator.exports\n"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_small_and_torch_stays_where_it_belongs(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    place = path.relative_to(ROOT).as_posix()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert length <= 50, f"{place}: {node.name} has {length} lines"
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.split(".")[0] in ("torch", "transformers") for name in names):
            assert place.startswith(MAY_IMPORT_TORCH), f"{place} imports torch"


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_test_files_stay_readable(path: Path) -> None:
    assert path.read_text().count("\n") <= 400


def test_the_readme_names_every_verb() -> None:
    from runtime.cli import register_verbs
    from runtime.cli.app import app

    register_verbs()

    readme = (ROOT / "README.md").read_text()
    missing = [command.name for command in app.registered_commands if f"moe-studio {command.name}" not in readme]
    assert not missing
