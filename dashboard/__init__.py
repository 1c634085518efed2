"""Look at a folder of traces and runs: a Dash application and a self-contained report with the same figures.

Public names, each loaded when it is asked for:
    create_app, serve: the application.
    write_report: one HTML file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dashboard.app import create_app
    from dashboard.report import write_report
    from dashboard.server import serve

__all__ = ["create_app", "serve", "write_report"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from dashboard.app import create_app

        return create_app
    if name == "serve":
        from dashboard.server import serve

        return serve
    if name == "write_report":
        from dashboard.report import write_report

        return write_report
    raise AttributeError(f"module 'dashboard' has no attribute '{name}'")
