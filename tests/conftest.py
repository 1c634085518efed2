"""In continuous integration nothing is skipped but what cannot be there: a GPU, or public data beside it."""

from __future__ import annotations

import os

import pytest

from simulator.compiled import status

MAY_BE_ABSENT = ("CUDA", "shared/routing", "shared/measured")
_unexpected: list[str] = []


def pytest_report_header() -> str:
    """And with binaries of other sources, their warning ends the run here."""
    return f"hot modules: {status()}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(word in reason for word in MAY_BE_ABSENT):
            _unexpected.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if os.environ.get("CI") == "true" and _unexpected and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") == "true":
        for line in _unexpected:
            terminalreporter.write_line(f"skipped in continuous integration, which counts as failed: {line}", red=True)
