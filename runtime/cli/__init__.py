"""The command line `moe-studio`: one verb, one public function. Heavy imports happen inside the verbs."""

from __future__ import annotations

import sys
from importlib import import_module

from runtime.cli.app import app
from trace_capture.errors import StudioError

_VERBS = ("evaluation", "exports", "hardware", "imports", "live", "machines", "show") + (
    "synthesize",
    "traces",
    "tune",
    "validation",
    "whatif",
)
"""Modules whose verbs register themselves."""


def register_verbs() -> None:
    """Make all verbs known to the application."""
    for name in _VERBS:
        import_module(f"runtime.cli.{name}")


def main() -> None:
    """Entry point: exit code 0, 1 for a failed run, 2 for a mistake in the input."""
    register_verbs()
    try:
        app()
    except StudioError as error:
        from runtime.cli.app import fail

        fail(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
