"""A small HTTP server of the test suite. It is no vLLM and no SGLang and runs no model: it speaks the documented fields
of their answers over a real socket, with made-up routing that follows from the prompt, and misbehaves on request.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import numpy.typing as npt

LAYERS, EXPERTS, TOP_K = 3, 8, 2
Handler = Callable[["RoutingHandler", dict[str, Any]], None]


def routing(prompt: str, tokens: int, top_k: int = TOP_K) -> npt.NDArray[np.int64]:
    """The experts [T, L, K] that this server says the tokens of a prompt were sent to."""
    random = np.random.default_rng(zlib.crc32(prompt.encode()))
    return np.argsort(random.random((tokens, LAYERS, EXPERTS)), axis=2)[:, :, :top_k]


def answer(body: dict[str, Any], flavour: str, top_k: int = TOP_K) -> dict[str, Any]:
    """An answer as the engine documents it. A word of the prompt is a token, and the text is generated to the limit."""
    chat = "messages" in body
    text = body["messages"][-1]["content"] if chat else body["prompt"]
    prompt, output = len(text.split()), body["max_tokens"]
    ids = routing(text, prompt + output - 1, top_k)
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": "x"}} if chat else {"text": "x"}
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    reply: dict[str, Any] = {"id": "cmpl-1", "model": body["model"], "choices": [choice], "usage": usage}
    if flavour == "vllm":
        stream = io.BytesIO()
        np.save(stream, ids.astype(np.uint8))
        choice["routed_experts"] = base64.b64encode(stream.getvalue()).decode()
        if body.get("return_token_ids"):
            reply["prompt_token_ids"], choice["token_ids"] = list(range(prompt)), list(range(100, 100 + output))
    elif body.get("return_routed_experts"):
        reply["sglext"] = {"routed_experts": base64.b64encode(ids.astype("<i4").tobytes()).decode()}
    return reply


class RoutingHandler(BaseHTTPRequestHandler):
    """One request; what it does next is popped from the server's script."""

    server: RoutingServer

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers), {}))
        if self.path == "/v1/models":
            self.send({"data": [{"id": name} for name in self.server.models]})
        else:
            self.send({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        act = self.server.script.pop(0) if self.server.script else well
        act(self, body)

    def send(self, reply: Any, status: int = 200, **headers: str) -> None:
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class RoutingServer(ThreadingHTTPServer):
    """The server, its script of things to do, and what it was asked."""

    daemon_threads = True

    def __init__(self, flavour: str) -> None:
        super().__init__(("127.0.0.1", 0), RoutingHandler)
        self.flavour = flavour
        self.models = ["served"]
        self.script: list[Handler] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is no error of the server."""


def well(handler: RoutingHandler, body: dict[str, Any]) -> None:
    handler.send(answer(body, handler.server.flavour))


def lowered(handler: RoutingHandler, body: dict[str, Any]) -> None:
    """As if the model were served with one expert per token less."""
    handler.send(answer(body, handler.server.flavour, TOP_K - 1))


def failing(status: int, **headers: str) -> Handler:
    return lambda handler, body: handler.send({"error": {"message": "out of memory"}}, status, **headers)


def dropped(handler: RoutingHandler, body: dict[str, Any]) -> None:
    """The connection ends without an answer."""
    handler.close_connection = True
    handler.connection.close()


def cut(handler: RoutingHandler, body: dict[str, Any]) -> None:
    """The connection ends in the middle of the answer."""
    content = json.dumps(answer(body, handler.server.flavour)).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2])
    handler.wfile.flush()
    handler.close_connection = True


def slow(seconds: float) -> Handler:
    def act(handler: RoutingHandler, body: dict[str, Any]) -> None:
        time.sleep(seconds)
        well(handler, body)

    return act


def drip(handler: RoutingHandler, body: dict[str, Any]) -> None:
    """Bytes keep coming, and the answer never ends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def no_json(handler: RoutingHandler, body: dict[str, Any]) -> None:
    handler.send(b"<html>gateway</html>")


def without_field(handler: RoutingHandler, body: dict[str, Any]) -> None:
    reply = answer(body, "none")
    reply.pop("sglext", None)
    handler.send(reply)


def changed(edit: Callable[[dict[str, Any]], None]) -> Handler:
    """An answer with something edited in it."""

    def act(handler: RoutingHandler, body: dict[str, Any]) -> None:
        reply = answer(body, handler.server.flavour)
        edit(reply)
        handler.send(reply)

    return act


@contextmanager
def running(flavour: str = "vllm") -> Iterator[RoutingServer]:
    server = RoutingServer(flavour)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
