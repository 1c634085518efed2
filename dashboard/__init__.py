"""Look at a folder of traces and runs: a Dash application and a self-contained report with the same figures.

Public names, each loaded when it is asked for:
    create_app, serve: the application.
    write_report: one HTML file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dashboard.app import create_app, serve
    from dashboard.report import write_report

__all__ = ["create_app", "serve", "write_report"]


def __getattr__(name: str) -> Any:
    if name in ("create_app", "serve"):
        from dashboard import app

        return getattr(app, name)
    if name == "write_report":
        from dashboard.report import write_report

        return write_report
    raise AttributeError(f"module 'dashboard' has no attribute '{name}'")
