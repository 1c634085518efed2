"""A small JSON client for servers that may be slow, busy or gone: time-outs, retries with growing pauses.

The standard library is enough: one request at a time, no streaming, no cookies.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from trace_capture.errors import StudioError

_RETRY = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_PAUSE_S = 60.0
_CHUNK_BYTES = 1 << 16


class ServerError(StudioError):
    """A server did not give a usable answer."""


class ServerRefusal(ServerError):
    """A server understood the request and will not serve it, however often it is asked."""


class _Failure(NamedTuple):
    """Why one attempt failed, and the pause that the server asked for."""

    reason: str
    pause_s: float | None = None


@dataclass(frozen=True)
class ServerClient:
    """Requests to one server.

    Attributes:
        url: address, with or without `/v1` at its end.
        api_key: sent as bearer token, and written nowhere.
        timeout_s: for one whole answer.
        retries: attempts behind the first.
        pause_s: before the first retry; it doubles with each.
        sleep: what waits.
    """

    url: str
    api_key: str | None = None
    timeout_s: float = 600.0
    retries: int = 4
    pause_s: float = 1.0
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StudioError(f"--server {self.url}: wanted an address such as http://127.0.0.1:8000")

    @property
    def shown(self) -> str:
        """The address without user and password."""
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}{parts.path.rstrip('/').removesuffix('/v1')}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a GET, or with a body to a POST, as decoded JSON.

        Args:
            path: behind `/v1/`.
            body: sent as JSON.

        Raises:
            ServerRefusal: the server refuses (401, 404, 400, ...).
            ServerError: no usable answer after all retries; the message has the last reason.
        """
        pause_s = self.pause_s
        failure = _Failure("not asked")
        for attempt in range(self.retries + 1):
            if attempt:
                self.sleep(min(_LONGEST_PAUSE_S, failure.pause_s if failure.pause_s is not None else pause_s))
                pause_s *= 2
            answer = self._attempt(path, body)
            if not isinstance(answer, _Failure):
                return answer
            failure = answer
        raise ServerError(f"{self.shown}/v1/{path}: {failure.reason}, after {self.retries + 1} attempts")

    def _attempt(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any] | _Failure:
        deadline = time.monotonic() + self.timeout_s
        try:
            with urllib.request.urlopen(self._request(path, body), timeout=self.timeout_s) as response:
                content = _read(response, deadline)
        except urllib.error.HTTPError as error:
            return self._refused(error, path)
        except TimeoutError:
            return _Failure(f"no answer within {self.timeout_s:g} s")
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                return _Failure(f"no answer within {self.timeout_s:g} s")
            return _Failure(f"the connection failed ({reason or type(error).__name__})")
        try:
            answer = json.loads(content)
        except ValueError as error:
            return _Failure(f"the answer is not JSON ({error})")
        return answer if isinstance(answer, dict) else _Failure(f"the answer is a {type(answer).__name__}")

    def _request(self, path: str, body: Mapping[str, Any] | None) -> urllib.request.Request:
        root = self.url.rstrip("/").removesuffix("/v1")
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return urllib.request.Request(f"{root}/v1/{path}", data=data, headers=headers)

    def _refused(self, error: urllib.error.HTTPError, path: str) -> _Failure:
        """A failure to try again after, or the end."""
        with error:
            try:
                detail = " ".join(error.read(300).decode("utf-8", errors="replace").split())
            except (OSError, http.client.HTTPException):
                detail = ""
        what = f"HTTP {error.code} {error.reason}" + (f": {detail}" if detail else "")
        if error.code not in _RETRY:
            hint = "; name the variable of the key with --api-key-env" if error.code in (401, 403) else ""
            raise ServerRefusal(f"{self.shown}/v1/{path} refuses: {what}{hint}") from error
        asked = error.headers.get("Retry-After", "")
        return _Failure(what, float(asked) if asked.isdigit() else None)


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body, in time: a server that sends drop by drop does not hold the client for ever."""
    parts = []
    while part := response.read1(_CHUNK_BYTES):
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)
