"""Routed experts in the answers of vLLM and SGLang servers, as saved JSON or fresh from the wire.

Where they are, and how encoded:
- vLLM, OpenAI routes: `choices[i].routed_experts`, base64 of the bytes of a `.npy` file, [prompt + output - 1, F, K];
  the last sampled token was never computed and has no row. Some versions put the prompt's rows beside it, in
  `prompt_routed_experts` of the answer, and write nested lists.
- SGLang, OpenAI routes: `sglext.routed_experts` (older: `choices[i].meta_info.routed_experts`), base64 of raw int32,
  row-major; `/generate`: `meta_info.routed_experts`. Some ways to stop give a row more.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trace_capture.errors import TraceError
from trace_capture.importers.assemble import RoutedSequence, split_at_prompt, to_trace
from trace_capture.importers.formats import FileHead, ImportOptions, provenance, read_text
from trace_capture.importers.routed_rows import routed_rows
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Trace

FIELD = "routed_experts"
_NPY_MAGIC = b"\x93NUMPY"
_MEND = (
    "start vLLM with --enable-return-routed-experts, or SGLang with the same flag and 'return_routed_experts': true "
    "in the request"
)


class Answer(NamedTuple):
    """One continuation of one prompt.

    Attributes:
        rows: the sequence.
        shape: the model, with the top-k of the rows.
        notes: what was left out or assumed.
    """

    rows: RoutedSequence
    shape: ModelShape
    notes: tuple[str, ...]


class _Lengths(NamedTuple):
    """Tokens of one continuation; `start` is the position of the first row, `is_known` whether the output was
    counted by the server."""

    prompt: int
    output: int
    start: int
    is_known: bool


def is_responses(head: FileHead) -> bool:
    """Whether a file is JSON with the field in it."""
    return head.is_json and head.contains(b'"routed_experts"')


def read_responses(path: Path, options: ImportOptions) -> Trace:
    """Read saved answers: one JSON object, a list of them, or one per line; each may be wrapped in `response` and
    `body`, as batch files are.

    Every answer becomes a sequence. Router weights are not in the answers.

    Raises:
        TraceError: not JSON, the field is missing or of another shape than the token counts say, or the rows are
            impossible.
    """
    shape = options.require_shape(path)
    answers = [
        answer
        for place, body in enumerate(_bodies(path), start=1)
        for answer in routed_answers(body, shape, f"{path}: answer {place}", options.prompt_tokens)
    ]
    if len({answer.shape.top_k for answer in answers}) > 1:
        raise TraceError(f"{path} holds answers with different numbers of experts per token; import them one by one")
    notes = list(dict.fromkeys(note for answer in answers for note in answer.notes))
    if not answers:
        raise TraceError(f"{path} holds no answer; save the server's answers again")
    return to_trace(
        answers[0].shape, [answer.rows for answer in answers], "responses", provenance(path, notes), str(path)
    )


def routed_answers(
    body: Mapping[str, Any], shape: ModelShape, where: str, prompt_tokens: int | None = None
) -> list[Answer]:
    """The routing of every continuation in one answer of a server.

    Args:
        body: the decoded JSON.
        shape: the model.
        where: how messages call the answer.
        prompt_tokens: of the prompt, where the answer does not count them.

    Raises:
        TraceError: the field is missing, of another shape than the token counts say, or impossible.
    """
    choices = body.get("choices")
    parts = choices if isinstance(choices, list) and choices else [body]
    answers = []
    for number, choice in enumerate(parts):
        place = where if len(parts) == 1 else f"{where}, choice {number}"
        if not isinstance(choice, Mapping):
            raise TraceError(f"{place} is no JSON object; save the server's answers again")
        raw = _field(body, choice, number)
        if raw is None:
            raise TraceError(f"{place} has no '{FIELD}' (or null): {_MEND}")
        lengths = _lengths(body, choice, len(parts), prompt_tokens, place)
        answers.append(_answer(raw, body, choice, lengths, shape, place))
    return answers


def _field(body: Mapping[str, Any], choice: Mapping[str, Any], number: int) -> Any:
    """The field, wherever it is."""
    extension = _mapping(body.get("sglext")).get(FIELD)
    if isinstance(extension, list) and extension and isinstance(extension[0], str):
        extension = extension[number] if number < len(extension) else None
    found = (choice.get(FIELD), _mapping(choice.get("meta_info")).get(FIELD), extension)
    return next((value for value in found if value is not None), None)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _lengths(
    body: Mapping[str, Any], choice: Mapping[str, Any], choices: int, prompt_tokens: int | None, where: str
) -> _Lengths:
    usage, meta = _mapping(body.get("usage")), _mapping(choice.get("meta_info"))
    ids = _prompt_ids(body, choice)
    counted = (usage.get("prompt_tokens"), meta.get("prompt_tokens"), len(ids) if ids else None, prompt_tokens)
    prompt = next((value for value in counted if isinstance(value, int)), None)
    if prompt is None:
        raise TraceError(f"{where} does not count its prompt's tokens; give --prompt-tokens N")
    output_ids = choice.get("token_ids")
    outputs = (
        len(output_ids) if isinstance(output_ids, list) and output_ids else None,
        meta.get("completion_tokens"),
        usage.get("completion_tokens") if choices == 1 else None,
    )
    output = next((value for value in outputs if isinstance(value, int)), None)
    begin = (meta.get("routed_experts_start_len"), _mapping(body.get("sglext")).get("routed_experts_start_len"), 0)
    start = next(value for value in begin if isinstance(value, int))
    return _Lengths(prompt, output or 0, start, output is not None)


def _prompt_ids(body: Mapping[str, Any], choice: Mapping[str, Any]) -> list[int]:
    found = (choice.get("prompt_token_ids"), body.get("prompt_token_ids"))
    return next((value for value in found if isinstance(value, list)), [])


def _answer(
    raw: Any, body: Mapping[str, Any], choice: Mapping[str, Any], lengths: _Lengths, shape: ModelShape, where: str
) -> Answer:
    of_prompt = body.get("prompt_routed_experts")
    wanted = max(0, lengths.prompt - lengths.start + lengths.output - 1)
    notes: list[str] = []
    if of_prompt is not None:
        first = _decoded(of_prompt, lengths.prompt, shape, f"{where}: prompt_{FIELD}")
        later = _decoded(raw, max(0, lengths.output - 1), shape, f"{where}: {FIELD}")
        same_size = first.ndim == later.ndim == 3 and first.shape[1:] == later.shape[1:]
        values = np.concatenate([first, later]) if same_size else later
    else:
        values = _decoded(raw, wanted, shape, f"{where}: {FIELD}")
    if lengths.is_known and values.ndim == 3:
        values = _as_long_as_counted(values, wanted, lengths, where, notes)
    checked = routed_rows(values, shape, where)
    prompt = max(0, lengths.prompt - lengths.start - checked.dropped)
    rows = split_at_prompt(checked.experts, prompt, where)
    ids = [*_prompt_ids(body, choice), *(choice.get("token_ids") or [])][lengths.start + checked.dropped :]
    rows = rows._replace(first_position=lengths.start + checked.dropped)
    if len(ids) >= len(checked.experts):
        rows = rows._replace(token_ids=np.array(ids[: len(checked.experts)], dtype=np.int32))
    return Answer(rows, checked.shape, (*notes, *checked.notes))


def _as_long_as_counted(
    values: npt.NDArray[Any], wanted: int, lengths: _Lengths, where: str, notes: list[str]
) -> npt.NDArray[Any]:
    """One row per token but the last sampled one; a row more, which some ways to stop give, is left out."""
    if len(values) == wanted + 1:
        notes.append("an answer has a row for its last token too, whose output nobody used; it is left out")
        return values[:-1]
    if len(values) != wanted:
        raise TraceError(
            f"{where}: {FIELD} has {len(values)} rows for {lengths.prompt} prompt and {lengths.output} output tokens, "
            f"wanted {wanted} (all but the last); the answer was cut, or its counts are of another answer"
        )
    return values


def _decoded(raw: Any, rows: int, shape: ModelShape, where: str) -> npt.NDArray[Any]:
    """The array, whichever way it was encoded; `rows` is how many there should be."""
    if isinstance(raw, list):
        try:
            return np.asarray(raw)
        except ValueError as error:
            raise TraceError(f"{where} is a ragged list ({error}); save the answer again") from error
    if not isinstance(raw, str):
        raise TraceError(f"{where} is {type(raw).__name__}, wanted base64 text; save the answer again")
    try:
        content = base64.b64decode(raw, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"{where} is not base64 ({error}): it was cut or edited; save the answer again") from error
    if content.startswith(_NPY_MAGIC):
        return load_npy(io.BytesIO(content), where)
    if len(content) % 4 or not content:
        raise TraceError(f"{where} holds {len(content)} bytes, which are no int32 numbers; save the answer again")
    return _shaped(np.frombuffer(content, dtype="<i4"), rows, shape, where)


def load_npy(stream: Any, where: str) -> npt.NDArray[Any]:
    """The array of a `.npy` file or its bytes; Python objects are refused.

    Raises:
        TraceError: cut, or not such an array.
    """
    try:
        loaded: npt.NDArray[Any] = np.load(stream, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise TraceError(f"{where} is no readable .npy array ({error}); record it again") from error
    return loaded


def _shaped(flat: npt.NDArray[Any], rows: int, shape: ModelShape, where: str) -> npt.NDArray[Any]:
    """Raw numbers as [rows, F, K]: layers and top-k are the model's, or follow from the number of rows."""
    for layers in (shape.num_layers, shape.num_moe_layers):
        count, rest = divmod(flat.size, layers * shape.top_k)
        if not rest and count in (rows, rows + 1):
            return flat.reshape(count, layers, shape.top_k)
    for layers in (shape.num_layers, shape.num_moe_layers):
        for count in (rows, rows + 1):
            top_k, rest = divmod(flat.size, max(1, count * layers))
            if not rest and 0 < top_k < shape.top_k:
                return flat.reshape(count, layers, top_k)
    found, rest = divmod(flat.size, shape.num_layers * shape.top_k)
    made = "" if rest else f", but {found}"
    raise TraceError(
        f"{where} holds {flat.size} numbers, which do not make {rows} rows of {shape.num_layers} layers x "
        f"top-{shape.top_k} of {shape.name}{made}; the answer was cut (SGLang's routed_experts_start_len leaves rows "
        "out), or --model is another model"
    )


def _bodies(path: Path) -> Iterator[Mapping[str, Any]]:
    """The answers in a file, out of their wrappers."""
    text = read_text(path)
    try:
        loaded = json.loads(text)
    except ValueError:
        loaded = [_line(line, number, path) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    for one in loaded if isinstance(loaded, list) else [loaded]:
        body = one
        for wrapper in ("response", "body"):
            if isinstance(body, Mapping) and isinstance(body.get(wrapper), Mapping):
                body = body[wrapper]
        if not isinstance(body, Mapping):
            raise TraceError(f"{path} holds a {type(body).__name__} where an answer should be; save the answers again")
        yield body


def _line(line: str, number: int, path: Path) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise TraceError(f"{path}: line {number} is not JSON ({error}); it was cut or edited") from error
