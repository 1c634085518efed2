"""Routing of a served model: prompts go to an OpenAI-compatible vLLM or SGLang server that returns routed experts.

The server must have been started with `--enable-return-routed-experts`. Requests carry `return_routed_experts` for
SGLang and `return_token_ids` for vLLM; each server ignores what it does not know. One request at a time, so that no
batch of other prompts stands between passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from trace_capture.errors import StudioError, TraceError
from trace_capture.files import text_digest
from trace_capture.importers.assemble import sequence_passes
from trace_capture.importers.responses import Answer, routed_answers
from trace_capture.model_shape import ModelShape
from trace_capture.server_client import ServerClient, ServerError, ServerRefusal
from trace_capture.trace import Trace, TraceInfo
from trace_capture.trace_store import TraceWriter
from trace_capture.versions import software_versions

Progress = Callable[[int, int], None]
_GIVE_UP_AFTER = 3
"""Prompts in a row without an answer, after which the server is taken to be gone."""


@dataclass(frozen=True)
class ServerRequest:
    """What is asked of the server for every prompt.

    Attributes:
        max_new_tokens: tokens to generate.
        temperature: 0 is greedy.
        seed: equal seeds give equal texts, where the server keeps to it.
        served_model: name under which the server has the model; None: the only one that it lists.
        is_chat: send prompts as messages, in the model's template, instead of as they are.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    served_model: str | None = None
    is_chat: bool = False

    def body(self, model: str, prompt: str) -> tuple[str, dict[str, Any]]:
        """Path and content of a request."""
        content: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "return_routed_experts": True,
            "return_token_ids": True,
        }
        if self.is_chat:
            return "chat/completions", content | {"messages": [{"role": "user", "content": prompt}]}
        return "completions", content | {"prompt": prompt}


class ServerCapture(NamedTuple):
    """What came of a capture.

    Attributes:
        trace: of the prompts that were answered.
        answered: how many those are.
        failed: why each of the others was not, a line each.
        interrupted: whether it was stopped from the keyboard.
    """

    trace: Trace
    answered: int
    failed: tuple[str, ...]
    interrupted: bool


def capture_from_server(
    client: ServerClient,
    prompts: Sequence[str],
    out: Path,
    shape: ModelShape,
    request: ServerRequest,
    progress: Progress | None = None,
) -> ServerCapture:
    """Record where a served model routes its tokens while it continues some prompts.

    Rows of each answer reach the disk as it arrives; what arrived is kept when others fail, when the server goes away
    and when the capture is interrupted. A killed capture leaves `<out>.partial`, which `Trace.load` understands.

    Args:
        client: the server.
        prompts: sent one after the other.
        out: Parquet file to write.
        shape: the model that is served.
        request: what to ask for.
        progress: called with (prompts done, all prompts).

    Raises:
        ServerError: the server cannot be reached, refuses, or answered no prompt.
        TraceError: answers hold no routing, or routing that cannot be.
    """
    model = request.served_model or _only_model(client)
    run = _Capture(client, Path(out), shape, request, model, text_digest("\n".join(prompts)))
    interrupted = False
    with closing(run):
        try:
            for number, prompt in enumerate(prompts, start=1):
                run.one(number, prompt)
                if progress is not None:
                    progress(number, len(prompts))
                if run.misses == _GIVE_UP_AFTER:
                    run.failed += [f"prompt {rest}: not sent" for rest in range(number + 1, len(prompts) + 1)]
                    break
        except KeyboardInterrupt:
            interrupted = True
        return run.finish(len(prompts), interrupted)


class _Capture:
    """The state of a running capture: its file, and what failed."""

    def __init__(
        self, client: ServerClient, out: Path, shape: ModelShape, request: ServerRequest, model: str, digest: str
    ) -> None:
        self.failed: list[str] = []
        self.misses = 0
        self._client, self._out, self._shape, self._request = client, out, shape, request
        self._model, self._digest = model, digest
        self._writer: TraceWriter | None = None
        self._notes: dict[str, None] = {}
        self._sequences = self._passes = 0

    def one(self, number: int, prompt: str) -> None:
        """Ask for one prompt and write what comes.

        Raises:
            ServerRefusal, TraceError: at the first prompt, where all others would end the same way.
        """
        try:
            path, body = self._request.body(self._model, prompt)
            reply = self._client.ask(path, body)
            answer = routed_answers(reply, self._shape, f"answer to prompt {number}")[0]
            self._write(answer)
            self.misses = 0
        except StudioError as error:
            if not self._sequences and not self.failed and isinstance(error, ServerRefusal | TraceError):
                raise
            self.misses += isinstance(error, ServerError)
            self.failed.append(f"prompt {number}: {error}")

    def _write(self, answer: Answer) -> None:
        if self._writer is None:
            self._shape = answer.shape
            self._writer = TraceWriter(self._out, self._info(answer.shape))
        elif answer.shape.top_k != self._shape.top_k:
            raise TraceError(f"has {answer.shape.top_k} experts per token, the first answer had {self._shape.top_k}")
        for rows in sequence_passes(answer.rows, self._sequences, self._passes):
            self._writer.append(rows)
            self._passes += 1
        self._sequences += 1
        self._notes |= dict.fromkeys(answer.notes)

    def _info(self, shape: ModelShape) -> TraceInfo:
        request = self._request
        options = {
            "server": self._client.shown,
            "served_model": self._model,
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "chat": request.is_chat,
            "weights": "not recorded",
        }
        return TraceInfo(
            shape=shape,
            source="capture",
            prompts_digest=self._digest,
            versions=software_versions("numpy", "pyarrow"),
            options=options,
        )

    def finish(self, prompts: int, interrupted: bool) -> ServerCapture:
        """Close the file, with what a reader should know of the capture."""
        if self._writer is None:
            why = "interrupted before the first answer" if interrupted else "; ".join(self.failed[:1])
            raise ServerError(f"no prompt was answered, so nothing is written: {why}")
        notes = list(self._notes)
        if interrupted:
            notes.append(f"interrupted: {self._sequences} of {prompts} prompts are in the trace")
        elif self.failed:
            notes.append(f"{len(self.failed)} of {prompts} prompts failed and are not in the trace")
        trace = self._writer.finish()
        if notes:
            options = trace.info.options | {"notes": notes}
            trace = replace(trace, info=trace.info.model_copy(update={"options": options}))
            trace.save(self._out)
        return ServerCapture(trace, self._sequences, tuple(self.failed), interrupted)

    def close(self) -> None:
        """Leave the stream readable where `finish` was not reached."""
        if self._writer is not None:
            self._writer.close()


def _only_model(client: ServerClient) -> str:
    """The name of the model that the server lists."""
    listed = client.ask("models").get("data")
    names = [str(one.get("id")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    if len(names) != 1:
        raise ServerError(
            f"{client.shown} lists {len(names)} models ({', '.join(names) or 'none'}); name one with --served-model"
        )
    return names[0]
