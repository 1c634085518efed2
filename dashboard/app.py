"""The Dash application: one table of pages, and what surrounds them.

To add a page: a file in `dashboard/pages` with `layout(snapshot, query)` and `register(app, workspace)`, and a row in
`PAGES`. Its ids begin with the page's name; its state is kept by `dashboard.address`; long work is a job of
`dashboard.jobs`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import dash_mantine_components as dmc
from dash import Dash, Input, Output, set_props

from dashboard import jobs, parts
from dashboard.address import Query
from dashboard.data import Snapshot, Workspace
from dashboard.pages import export, overview, routing, timeline, tune, validation, whatif
from dashboard.shell import TITLE, error_alert, register_shell, shell
from dashboard.uploads import MAX_REQUEST_BYTES
from trace_capture.errors import StudioError

_log = logging.getLogger(__name__)

_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>{%metas%}<title>{%title%}</title>{%favicon%}{%css%}</head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body>
</html>"""


@dataclass(frozen=True)
class Page:
    """A place in the application: its address, and the two functions of its module."""

    path: str
    title: str
    layout: Callable[[Snapshot, Query], Any]
    register: Callable[[Dash, Workspace], None]


PAGES = (
    Page("/", "Overview", overview.layout, overview.register),
    Page("/routing", "Routing", routing.layout, routing.register),
    Page("/timeline", "Timeline", timeline.layout, timeline.register),
    Page("/whatif", "What-if", whatif.layout, whatif.register),
    Page("/tune", "Tune", tune.layout, tune.register),
    Page("/export", "Export", export.layout, export.register),
    Page("/validation", "Validation", validation.layout, validation.register),
)
"""The table of pages, in the order of the navigation."""


def create_app(folder: Path) -> Dash:
    """The application for one folder; no server is started.

    Args:
        folder: what to show. Files may be missing, appear or change while it runs; reload the page to see them.

    Raises:
        StudioError: there is no such folder.
    """
    workspace = Workspace(folder)
    app = Dash(
        __name__,
        assets_folder=str(Path(__file__).parent / "assets"),
        title=TITLE,
        update_title=None,
        serve_locally=True,
        suppress_callback_exceptions=True,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
        index_string=_INDEX,
        background_callback_manager=jobs.local_manager(),
        on_error=_show_error,
    )
    app.server.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST_BYTES
    app.layout = shell(workspace.folder, PAGES)
    register_shell(app, PAGES)

    def render(view: dict[str, Any] | None) -> tuple[Any, Any]:
        view = view or {"path": "/", "search": ""}
        return render_page(workspace.read(), view["path"], view["search"]), None

    app.callback(
        Output("page", "children"), Output("shell-error", "children"), Input("view", "data"), prevent_initial_call=True
    )(render)
    for page in PAGES:
        page.register(app, workspace)
    return app


def render_page(snapshot: Snapshot, path: str, search: str) -> Any:
    """The content for an address."""
    page = next((page for page in PAGES if page.path == path), None)
    if page is None:
        return parts.note(f"There is no page {path}; choose one in the navigation.")
    heading = dmc.Title(page.title, order=1, size="h3", className="page-title")
    return [heading, page.layout(snapshot, dict(parse_qsl(search.removeprefix("?"))))]


def _show_error(error: Exception) -> None:
    """Say above the page what went wrong; what was shown stays."""
    if isinstance(error, StudioError):
        text = str(error)
    else:
        _log.error("a callback failed", exc_info=error)
        text = f"{type(error).__name__}: {error}. Reload the page; the log of the server has the details."
    set_props("shell-error", {"children": error_alert(text)})
