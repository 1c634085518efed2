"""The verb capture with --server: in processes of their own, without torch, against the test suite's HTTP server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runtime.cli import traces  # noqa: F401 - it registers the verb
from runtime.cli.app import app
from tests.trace_capture import routing_server as serving
from tests.trace_capture.conftest import random_trace, small_shape
from tests.trace_capture.routing_server import RoutingServer, running
from trace_capture.errors import ConfigError
from trace_capture.trace import Trace

ROOT = Path(__file__).parents[2]
START = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""Where tests run in the background of a shell, children are born deaf to Ctrl-C."""
START += "for name in ('torch', 'transformers'): sys.modules[name] = None\n"
START += "from runtime.cli import main; main()"


@pytest.fixture
def server() -> Iterator[RoutingServer]:
    with running() as one:
        yield one


def arguments(server: RoutingServer, folder: Path, *more: object) -> list[str]:
    random_trace(num_prompts=1).save(folder / "shape.parquet")
    assert Trace.load(folder / "shape.parquet").shape == small_shape()
    (folder / "p.txt").write_text("one two three\nfour five\nsix\n")
    given = ["--server", server.url, "--model", folder / "shape.parquet", "--prompts", folder / "p.txt"]
    given += ["--max-new-tokens", 4, "--retries", 0, "--out", folder / "t.parquet", *more]
    return [sys.executable, "-c", START, "capture", *map(str, given)]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    whole = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=whole)


def test_a_capture_is_reported_with_a_hint(server: RoutingServer, tmp_path: Path) -> None:
    done = run(arguments(server, tmp_path, "--api-key-env", "STUDIO_KEY"), STUDIO_KEY="secret")
    assert done.returncode == 0, done.stderr
    assert "3 sequences, 12 passes, 15 tokens" in done.stdout and "next: moe-studio simulate" in done.stdout
    assert server.requests[1][1]["Authorization"] == "Bearer secret"
    assert b"secret" not in (tmp_path / "t.parquet").read_bytes()


def test_failed_prompts_end_with_code_1(server: RoutingServer, tmp_path: Path) -> None:
    server.script = [serving.well, serving.failing(500)]
    done = run(arguments(server, tmp_path, "--json"))
    assert done.returncode == 1, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["answered"] == 2 and facts["sequences"] == 2 and "HTTP 500" in facts["failed"][0]
    assert facts["notes"] == ["1 of 3 prompts failed and are not in the trace"]


def test_control_c_keeps_what_arrived(server: RoutingServer, tmp_path: Path) -> None:
    server.script = [serving.well, serving.slow(60)]
    process = subprocess.Popen(
        arguments(server, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    deadline = time.monotonic() + 300
    while len(server.requests) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "interrupted: 1 of 3 prompts" in output
    assert Trace.load(tmp_path / "t.parquet").sequences() == [0]


def test_a_server_needs_a_shape_and_demo_is_one(server: RoutingServer, tmp_path: Path) -> None:
    given = ["capture", "--server", server.url, "--text", "one two", "--out", str(tmp_path / "t.parquet")]
    given += ["--retries", "0", "--json"]
    result = CliRunner().invoke(app, given)
    assert isinstance(result.exception, ConfigError) and "--server needs --model, the shape" in str(result.exception)
    assert not server.requests
    result = CliRunner().invoke(app, [*given, "--model", "demo"])
    assert server.requests, f"the demo model's shape is one that may be served: {result.output}"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--api-key-env", "NO_SUCH_VARIABLE"], "--api-key-env NO_SUCH_VARIABLE: that environment variable is empty"),
        (["--predict", "quasi-hidden"], "--predict needs the model here, not on a server"),
    ],
)
def test_mistakes_are_refused(server: RoutingServer, tmp_path: Path, more: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments(server, tmp_path, *more)[3:])
    assert isinstance(result.exception, ConfigError) and message in str(result.exception)
    assert not server.requests and not (tmp_path / "t.parquet").exists()
