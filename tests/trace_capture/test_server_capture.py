"""Capture from a server, against the test suite's own small HTTP server (`routing_server`) over real sockets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trace_capture import routing_server as serving
from tests.trace_capture.routing_server import RoutingServer, routing, running
from trace_capture import Phase, Trace
from trace_capture.errors import StudioError, TraceError
from trace_capture.server_capture import ServerCapture, ServerRequest, capture_from_server
from trace_capture.server_client import ServerClient, ServerError, ServerRefusal

PROMPTS = ["the night was dark", "a second prompt of six words", "third"]
TOKENS = 5
SLOW = serving.slow(1.0)


def patience(fault: Any) -> float:
    """Seconds for an answer: short where the fault is to take long."""
    return 0.6 if fault in (SLOW, serving.drip) else 60.0


@pytest.fixture
def server() -> Iterator[RoutingServer]:
    with running() as one:
        yield one


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def capture(make: Any, tmp_path: Path, pauses: list[float]) -> Any:
    def capture(server: RoutingServer, prompts: list[str] = PROMPTS, retries: int = 2, **more: Any) -> ServerCapture:
        timeout_s = more.pop("timeout_s", 60.0)
        client = ServerClient(server.url, timeout_s=timeout_s, retries=retries, pause_s=1.0, sleep=pauses.append)
        request = ServerRequest(TOKENS, **{key: more.pop(key) for key in ("is_chat", "served_model") if key in more})
        return capture_from_server(client, prompts, tmp_path / "t.parquet", make.shape(), request, **more)

    return capture


def wanted(prompts: list[str]) -> Any:
    return np.concatenate([routing(text, len(text.split()) + TOKENS - 1) for text in prompts])


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
@pytest.mark.parametrize("is_chat", [False, True])
def test_every_prompt_becomes_a_sequence(capture: Any, tmp_path: Path, flavour: str, is_chat: bool) -> None:
    with running(flavour) as server:
        steps: list[tuple[int, int]] = []
        result = capture(server, is_chat=is_chat, progress=lambda done, total: steps.append((done, total)))
    trace = Trace.load(tmp_path / "t.parquet")
    assert (trace.experts == wanted(PROMPTS)).all() and trace.digest == result.trace.digest
    assert trace.sequence.tolist() == [0] * 8 + [1] * 10 + [2] * 5
    assert [p.phase for p in trace.passes][:5] == [Phase.PREFILL] + [Phase.DECODE] * 4 and len(trace.passes) == 15
    assert (result.answered, result.failed, result.interrupted) == (3, (), False)
    assert steps == [(1, 3), (2, 3), (3, 3)] and not list(tmp_path.glob("*.partial"))
    assert trace.info.source == "capture" and trace.info.options["server"] == server.url
    path, _, body = server.requests[1]
    assert path == ("/v1/chat/completions" if is_chat else "/v1/completions")
    assert body["model"] == "served" and body["max_tokens"] == TOKENS and body["return_routed_experts"] is True
    ids = trace.token_id[:8].tolist()
    assert ids == ([0, 1, 2, 3, 100, 101, 102, 103] if flavour == "vllm" else [-1] * 8)


@pytest.mark.parametrize(
    "fault",
    [
        serving.failing(500),
        serving.failing(503),
        serving.dropped,
        serving.cut,
        SLOW,
        serving.drip,
        serving.no_json,
    ],
    ids=["500", "503", "dropped", "cut", "slow", "drip", "no json"],
)
def test_a_passing_fault_is_tried_again(capture: Any, server: RoutingServer, pauses: list[float], fault: Any) -> None:
    server.script = [fault, fault]
    result = capture(server, timeout_s=patience(fault))
    assert result.failed == () and (result.trace.experts == wanted(PROMPTS)).all()
    assert pauses == [1.0, 2.0]
    assert "notes" not in result.trace.info.options


def test_a_pause_that_the_server_asks_for_is_kept(capture: Any, server: RoutingServer, pauses: list[float]) -> None:
    server.script = [serving.failing(429, Retry_After="7"), serving.failing(429)]
    assert capture(server).answered == 3 and pauses == [7.0, 2.0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (serving.failing(500), "HTTP 500 Internal Server Error: .*out of memory.*, after 3 attempts"),
        (serving.dropped, "the connection failed .*, after 3 attempts"),
        (serving.cut, "the connection failed .*, after 3 attempts"),
        (SLOW, r"no answer within 0.6 s, after 3 attempts"),
        (serving.drip, r"no answer within 0.6 s, after 3 attempts"),
    ],
    ids=["500", "dropped", "cut", "slow", "drip"],
)
def test_what_arrived_is_kept_when_a_prompt_fails(
    capture: Any, server: RoutingServer, tmp_path: Path, fault: Any, reason: str
) -> None:
    server.script = [serving.well, *[fault] * 3, serving.well]
    result = capture(server, timeout_s=patience(fault))
    assert result.answered == 2 and len(result.failed) == 1
    assert re.search("prompt 2: .*" + reason, result.failed[0]), result.failed
    trace = Trace.load(tmp_path / "t.parquet")
    assert (trace.experts == wanted([PROMPTS[0], PROMPTS[2]])).all()
    assert trace.info.options["notes"] == ["1 of 3 prompts failed and are not in the trace"]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda reply: reply["choices"][0].pop("routed_experts"), "has no 'routed_experts'"),
        (lambda reply: reply["usage"].update(prompt_tokens=9), "rows for 9 prompt and 5 output tokens"),
        (lambda reply: reply["choices"][0].update(routed_experts="AAAA"), "holds 3 bytes, which are no int32"),
        (lambda reply: reply["choices"].clear(), "has no 'routed_experts'"),
    ],
)
def test_a_wrong_answer_is_told_and_the_others_are_kept(
    capture: Any, server: RoutingServer, edit: Any, reason: str
) -> None:
    server.script = [serving.well, serving.changed(edit)]
    result = capture(server)
    assert result.answered == 2 and reason in result.failed[0] and "prompt 2" in result.failed[0]


def test_answers_of_another_top_k_are_told(capture: Any, server: RoutingServer) -> None:
    server.script = [serving.well, serving.lowered]
    assert "has 1 experts per token, the first answer had 2" in capture(server).failed[0]
    server.script = [serving.lowered] * 3
    result = capture(server)
    assert result.trace.shape.top_k == 1 and "lowered from" in result.trace.info.options["notes"][0]


def test_a_server_that_returns_no_routing_is_told_at_once(capture: Any, server: RoutingServer, tmp_path: Path) -> None:
    server.script = [serving.without_field]
    with pytest.raises(TraceError, match="has no 'routed_experts' .*--enable-return-routed-experts"):
        capture(server)
    assert len(server.requests) == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("status", "hint"), [(400, ""), (401, "--api-key-env"), (404, "")])
def test_a_refusal_ends_at_once(
    capture: Any, server: RoutingServer, pauses: list[float], status: int, hint: str
) -> None:
    server.script = [serving.failing(status)]
    with pytest.raises(ServerRefusal, match=f"refuses: HTTP {status} .*out of memory.*{hint}"):
        capture(server)
    assert pauses == [] and len(server.requests) == 2


def test_a_server_that_is_gone_is_given_up(capture: Any, server: RoutingServer) -> None:
    server.script = [serving.well, *[serving.dropped] * 9]
    result = capture(server, [*PROMPTS, "fourth", "fifth", "sixth"])
    assert result.answered == 1 and len(server.requests) == 1 + 1 + 9
    assert [line.partition(":")[0] for line in result.failed] == [f"prompt {n}" for n in range(2, 7)]
    assert result.failed[-1] == "prompt 6: not sent"


def test_no_answer_at_all_writes_nothing(capture: Any, server: RoutingServer, tmp_path: Path) -> None:
    server.script = [serving.failing(500)] * 99
    with pytest.raises(ServerError, match="no prompt was answered, so nothing is written: prompt 1: .*HTTP 500"):
        capture(server, retries=0)
    assert not list(tmp_path.iterdir())
    server.shutdown()
    server.server_close()
    with pytest.raises(ServerError, match="the connection failed .*, after 3 attempts"):
        capture(server)


def test_an_interruption_keeps_what_arrived(capture: Any, server: RoutingServer, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    result = capture(server, progress=stop)
    assert result.interrupted and result.answered == 2
    trace = Trace.load(tmp_path / "t.parquet")
    assert (trace.experts == wanted(PROMPTS[:2])).all()
    assert trace.info.options["notes"] == ["interrupted: 2 of 3 prompts are in the trace"]


def test_rows_reach_the_disk_as_they_arrive(capture: Any, server: RoutingServer, tmp_path: Path) -> None:
    """Seen from beside: behind each answer the unfinished file holds all prompts so far."""
    seen = []

    def look(done: int, total: int) -> None:
        partial = Trace.load(tmp_path / "t.parquet.partial")
        seen.append((len(partial.sequences()), partial.info.complete))

    capture(server, progress=look)
    assert seen == [(1, False), (2, False), (3, False)]


def test_the_name_on_the_server(capture: Any, server: RoutingServer) -> None:
    server.models = ["a", "b"]
    with pytest.raises(ServerError, match=r"lists 2 models \(a, b\); name one with --served-model"):
        capture(server)
    capture(server, served_model="b")
    assert {body["model"] for _, _, body in server.requests if body} == {"b"}


def test_key_and_address(server: RoutingServer) -> None:
    client = ServerClient(server.url + "/v1/", api_key="secret")
    client.ask("models")
    assert server.requests[0][:1] == ("/v1/models",) and server.requests[0][1]["Authorization"] == "Bearer secret"
    assert ServerClient("http://user:pass@host:8000/v1").shown == "http://host:8000"
    for wrong in ("127.0.0.1:8000", "file:///etc/passwd", "http://"):
        with pytest.raises(StudioError, match="wanted an address such as http"):
            ServerClient(wrong)
