"""The command line within this process: what the installed `moe-studio` does, without a new interpreter each time."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from runtime.cli import main


@dataclass(frozen=True)
class Finished:
    """What a command left: exit code and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def studio(*arguments: object) -> Finished:
    """Run `moe-studio ARGUMENTS` and give what came of it; an exception that no verb turns into a line is raised."""
    printed, complained = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(complained):
        patch.setattr(sys, "argv", ["moe-studio", *map(str, arguments)])
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return Finished(int(code or 0), printed.getvalue(), complained.getvalue())


def assert_refused(result: Finished, *words: str) -> None:
    """The input was refused with code 2 and one line that holds these words."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]
