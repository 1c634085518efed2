"""The server that shows the application: it listens on this machine alone unless told otherwise."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import flask
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from dashboard.app import create_app
from trace_capture.errors import StudioError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_log = logging.getLogger(__name__)


def bind_server(folder: Path, *, host: str = "127.0.0.1", port: int = 8050) -> BaseWSGIServer:
    """A server that is bound but does not serve yet; call its `serve_forever`. Port 0 takes any free port, which
    `port` then names.

    Raises:
        StudioError: no such folder, or the address cannot be bound, because the port is taken for example.
    """
    app = create_app(folder)
    listener = _listen(host, port)
    if host in LOOPBACK:
        app.server.before_request(_refuse_other_names)
    else:
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


def _refuse_other_names() -> tuple[str, int] | None:
    """Keep web sites away that give their own name to this machine's address (DNS rebinding)."""
    name = flask.request.host.rsplit(":", 1)[0].strip("[]")
    if name in LOOPBACK:
        return None
    return f"This server answers to {', '.join(LOOPBACK)} only, not to {name!r}; open it by one of these.\n", 403


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
