"""Capturing from a server: its options, and what the verb capture does with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.app import progress_bar, say, say_json

if TYPE_CHECKING:
    from trace_capture.server_capture import ServerCapture

Server = Annotated[
    str | None,
    typer.Option("--server", help="Address of a vLLM or SGLang server; --model then names the shape it serves."),
]
ServedModel = Annotated[str | None, typer.Option("--served-model", help="Name on the server, where it lists several.")]
Chat = Annotated[bool, typer.Option("--chat", help="With --server: send prompts as chat messages.")]
ApiKeyEnv = Annotated[
    str | None, typer.Option("--api-key-env", help="Environment variable that holds the server's key.")
]
TimeoutS = Annotated[float, typer.Option("--timeout-s", min=0.001, help="Seconds for one answer of the server.")]
Retries = Annotated[int, typer.Option("--retries", min=0, help="Further attempts when the server fails.")]

INTERRUPTED = 130


def refuse_local_options(given: dict[str, object]) -> None:
    """Refuse options that need the model here.

    Raises:
        ConfigError: one is given.
    """
    from trace_capture.errors import ConfigError

    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ConfigError(f"{', '.join(named)} needs the model here, not on a server: leave it or --server out")


def capture_served(
    server: str,
    model: str | None,
    out: Path,
    prompts: Path | None,
    texts: list[str],
    asked: tuple[int, float, int, str | None, bool],
    api_key_env: str | None,
    timeout_s: float,
    retries: int,
    as_json: bool,
) -> None:
    """Capture from a server and say what came of it; exit code 1 where prompts failed, 130 where interrupted."""
    from runtime.prompts import read_prompts
    from trace_capture.errors import ConfigError
    from trace_capture.known_shapes import find_shape
    from trace_capture.samples import sample_folder
    from trace_capture.server_capture import ServerRequest, capture_from_server
    from trace_capture.server_client import ServerClient

    if model is None:
        raise ConfigError(
            "--server needs --model, the shape of what is served: a name such as qwen3-30b-a3b, or its config.json"
        )
    shape = find_shape(str(sample_folder() / "demo_model" / "config.json") if model == "demo" else model)
    chosen = read_prompts(prompts, texts)
    client = ServerClient(server, _api_key(api_key_env), timeout_s, retries)
    with progress_bar(not as_json) as step:
        result = capture_from_server(client, chosen, out, shape, ServerRequest(*asked), progress=step("capture"))
    _report(result, out, as_json)
    if result.interrupted or result.failed:
        raise typer.Exit(INTERRUPTED if result.interrupted else 1)


def _api_key(variable: str | None) -> str | None:
    import os

    from trace_capture.errors import ConfigError

    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"--api-key-env {variable}: that environment variable is empty or not set")
    return os.environ[variable]


def _report(result: ServerCapture, out: Path, as_json: bool) -> None:
    from runtime.cli.traces import report_trace, summary

    if as_json:
        served = {"answered": result.answered, "failed": list(result.failed), "interrupted": result.interrupted}
        say_json(summary(result.trace) | served | {"path": str(out)})
        return
    for line in result.failed:
        say(f"failed: {line}")
    report_trace(result.trace, out, as_json)
