"""The command line `moe-studio`: one verb, one public function. Heavy imports happen inside the verbs."""

from __future__ import annotations

import sys

from runtime.cli.app import app
from trace_capture.errors import StudioError


def main() -> None:
    """Entry point: exit code 0, 1 for a failed run, 2 for a mistake in the input."""
    from runtime.cli import (  # noqa: F401 - the verbs register themselves
        evaluation,
        exports,
        hardware,
        imports,
        live,
        machines,
        show,
        synthesize,
        traces,
        validation,
        whatif,
    )

    try:
        app()
    except StudioError as error:
        from runtime.cli.app import fail

        fail(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
