"""The Dash application: a shell with one route table, and the server that shows it."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import dash_mantine_components as dmc
from dash import Dash, Input, Output, State, dcc, html
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from dashboard import parts
from dashboard.data import Snapshot, Workspace
from dashboard.pages import overview
from dashboard.theme import FONT
from trace_capture.errors import StudioError

TITLE = "MoE Offload Studio"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_log = logging.getLogger(__name__)

_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>{%metas%}<title>{%title%}</title>{%favicon%}{%css%}</head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body>
</html>"""

_SWITCH_SCHEME = """
(clicks, stored) => {
  const system = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const current = stored || system;
  return clicks ? (current === "dark" ? "light" : "dark") : current;
}
"""


@dataclass(frozen=True)
class Page:
    """A place in the application: its address, and the two functions of its module."""

    path: str
    title: str
    layout: Callable[[Snapshot, dict[str, str]], Any]
    register: Callable[[Dash, Workspace], None]


PAGES = (Page("/", "Overview", overview.layout, overview.register),)
"""The route table."""


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
    )
    app.layout = _shell(workspace.folder)

    def render(path: str, search: str | None) -> Any:
        return render_page(workspace.read(), path, search or "")

    app.callback(Output("page", "children"), Input("location", "pathname"), State("location", "search"))(render)
    app.clientside_callback(
        _SWITCH_SCHEME, Output("scheme", "data"), Input("scheme-switch", "n_clicks"), State("scheme", "data")
    )
    app.clientside_callback("scheme => scheme || 'light'", Output("theme", "forceColorScheme"), Input("scheme", "data"))
    for page in PAGES:
        page.register(app, workspace)
    return app


def render_page(snapshot: Snapshot, path: str, search: str) -> Any:
    """The content for an address."""
    page = next((page for page in PAGES if page.path == path), None)
    if page is None:
        return parts.note(f"There is no page {path}; choose one above.")
    return page.layout(snapshot, dict(parse_qsl(search.removeprefix("?"))))


def bind_server(folder: Path, *, host: str = "127.0.0.1", port: int = 8050) -> BaseWSGIServer:
    """A server that is bound but does not serve yet; call its `serve_forever`. Port 0 takes any free port, which
    `port` then names.

    Raises:
        StudioError: no such folder, or the address cannot be bound, because the port is taken for example.
    """
    app = create_app(folder)
    listener = _listen(host, port)
    if host not in LOOPBACK:
        _log.warning("bound to %s: everyone who can reach this machine can read the runs of %s", host, folder)
    bound_port = listener.getsockname()[1]
    return make_server(host, bound_port, app.server, threaded=True, request_handler=_QuietHandler, fd=listener.detach())


def serve(
    folder: Path, *, host: str = "127.0.0.1", port: int = 8050, announce: Callable[[str], None] | None = None
) -> None:
    """Show a folder until interrupted.

    Args:
        folder: what to show.
        host: address to bind; anything but this machine's own is warned about in the log.
        port: port to bind; 0 takes any free one.
        announce: given the line that says where to look, once; by default it goes to standard error.

    Raises:
        StudioError: no such folder, or the address cannot be bound.
    """
    server = bind_server(folder, host=host, port=port)
    shown = f"[{host}]" if ":" in host else host
    try:
        (announce or _to_stderr)(f"showing {folder} on http://{shown}:{server.port} (stop with Ctrl+C)")
        server.serve_forever()
    except KeyboardInterrupt:
        _log.info("stopped")
    finally:
        server.server_close()


class _QuietHandler(WSGIRequestHandler):
    """Says nothing about requests that went well."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log failures of the server alone."""
        if str(code).startswith("5"):
            super().log_request(code, size)


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65_535:  # getaddrinfo would take the number modulo 65,536
        raise StudioError(f"cannot bind port {port}: ports go from 1 to 65535, and 0 takes any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StudioError(f"cannot bind {host}:{port}: {error}; choose another --host or --port") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise StudioError(
            f"cannot bind {host}:{port}: {error}; choose another --port, or 0 for any free one"
        ) from error
    return listener


def _shell(folder: Path) -> Any:
    links = [dcc.Link(page.title, href=page.path, className="nav-link") for page in PAGES]
    switch = html.Button(
        "◐", id="scheme-switch", className="scheme-switch", title="Switch between light and dark",
        **{"aria-label": "Switch between light and dark"},
    )  # fmt: skip
    header = html.Header(
        [
            html.Div([html.H1(TITLE), html.Div(str(folder), className="folder", title=str(folder))], className="brand"),
            html.Nav(links, className="nav", **{"aria-label": "Pages"}),
            switch,
        ],
        className="header",
    )
    return dmc.MantineProvider(
        [
            dcc.Location(id="location", refresh=False),
            dcc.Store(id="scheme", storage_type="local"),
            html.A("Skip to content", href="#page", className="skip-link"),
            header,
            html.Main(id="page", className="page", tabIndex=-1),
        ],
        id="theme",
        theme={"fontFamily": FONT, "primaryColor": "blue", "defaultRadius": "md"},
    )
