"""Saved answers of vLLM and SGLang servers, in every documented place and encoding of the field."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trace_capture import Phase, Trace
from trace_capture.errors import TraceError
from trace_capture.importers import ImportOptions, detect_format, import_trace

PROMPT, OUTPUT = 5, 4
Rows = npt.NDArray[Any]


def rows(tokens: int = PROMPT + OUTPUT - 1, seed: int = 0) -> Rows:
    random = np.random.default_rng(seed)
    return np.argsort(random.random((tokens, 3, 8)), axis=2)[:, :, :2]


def npy(ids: Rows, kind: type = np.uint8) -> str:
    stream = io.BytesIO()
    np.save(stream, ids.astype(kind))
    return base64.b64encode(stream.getvalue()).decode()


def raw(ids: Rows) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def vllm(field: Any, prompt: int = PROMPT, output: int = OUTPUT, **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {"choices": [{"index": 0, "text": "x", "routed_experts": field}], "usage": usage} | more


def sglang(field: Any, prompt: int = PROMPT, output: int = OUTPUT) -> dict[str, Any]:
    meta = {"prompt_tokens": prompt, "completion_tokens": output, "routed_experts": field}
    return {"text": "x", "meta_info": meta}


@pytest.fixture
def read(make: Any, tmp_path: Path) -> Callable[..., Trace]:
    def read(*answers: Any, lines: bool = False, prompt_tokens: int | None = None, **shape: Any) -> Trace:
        path = tmp_path / "answers.json"
        text = "\n".join(map(json.dumps, answers)) if lines else json.dumps(list(answers))
        path.write_text(text, encoding="utf-8")
        assert detect_format(path) == "responses"
        return import_trace(path, options=ImportOptions(make.shape(**shape), prompt_tokens))

    return read


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32])
def test_npy_of_vllm(read: Callable[..., Trace], kind: type) -> None:
    trace = read(vllm(npy(rows(), kind)))
    assert (trace.experts == rows()).all() and trace.info.source == "import:responses"
    assert [item.phase for item in trace.passes] == [Phase.PREFILL] + [Phase.DECODE] * (OUTPUT - 1)
    assert "notes" not in trace.info.options


@pytest.mark.parametrize("lines", [True, False])
def test_every_answer_is_a_sequence(read: Callable[..., Trace], lines: bool) -> None:
    first, second = rows(seed=1), rows(9, seed=2)
    wrapped = {"custom_id": "a", "response": {"status_code": 200, "body": vllm(npy(second), 7, 3)}}
    trace = read(vllm(npy(first)), wrapped, lines=lines)
    assert (trace.experts == np.concatenate([first, second])).all()
    assert trace.sequence.tolist() == [0] * 8 + [1] * 9 and trace.position.tolist() == [*range(8), *range(9)]
    assert [item.stop - item.start for item in trace.passes] == [5, 1, 1, 1, 7, 1, 1]


@pytest.mark.parametrize("place", ["generate", "sglext", "sglext list", "choice"])
def test_raw_int32_of_sglang(read: Callable[..., Trace], place: str) -> None:
    field = raw(rows())
    answer = sglang(field) if place == "generate" else vllm(None)
    if place.startswith("sglext"):
        answer["sglext"] = {"routed_experts": [field] if place.endswith("list") else field}
    if place == "choice":
        answer["choices"][0]["meta_info"] = {"routed_experts": field}
    assert (read(answer).experts == rows()).all()


def test_dense_layers_and_lowered_top_k_of_raw_numbers(read: Callable[..., Trace]) -> None:
    shape = {"num_layers": 4, "moe_layer_ids": (1, 2, 3), "expert_bytes": (9,) * 3, "dense_bytes": (9,) * 3}
    trace = read(sglang(raw(np.insert(rows(), 0, 0, axis=1))), **shape)
    assert (trace.experts == rows()).all() and trace.shape.moe_layer_ids == (1, 2, 3)
    trace = read(sglang(raw(rows())), top_k=4)
    assert trace.shape.top_k == 2 and "lowered from the model's top-4" in trace.info.options["notes"][0]


def test_prompt_and_output_rows_in_two_fields(read: Callable[..., Trace]) -> None:
    ids = rows()
    split = vllm(ids[PROMPT:].tolist(), prompt_routed_experts=ids[:PROMPT].tolist())
    assert (read(split).experts == ids).all()


def test_token_ids_are_kept(read: Callable[..., Trace]) -> None:
    answer = vllm(npy(rows()), prompt_token_ids=[11, 12, 13, 14, 15])
    answer["choices"][0]["token_ids"] = [21, 22, 23, 24]
    assert read(answer).token_id.tolist() == [11, 12, 13, 14, 15, 21, 22, 23]


def test_two_choices_are_two_sequences(read: Callable[..., Trace]) -> None:
    answer = vllm(npy(rows(seed=1)), output=7)
    answer["choices"].append({"index": 1, "text": "y", "routed_experts": npy(rows(7, seed=2))})
    trace = read(answer)
    assert trace.sequence.tolist() == [0] * 8 + [1] * 7
    assert (trace.experts[8:] == rows(7, seed=2)).all()


def test_rows_from_a_later_token_on(read: Callable[..., Trace]) -> None:
    answer = sglang(raw(rows()[3:]))
    answer["meta_info"]["routed_experts_start_len"] = 3
    trace = read(answer)
    assert trace.position.tolist() == [3, 4, 5, 6, 7] and [p.stop - p.start for p in trace.passes] == [2, 1, 1, 1]


def test_a_row_more_than_documented_is_left_out_and_told(read: Callable[..., Trace]) -> None:
    trace = read(sglang(raw(rows(PROMPT + OUTPUT))))
    assert (trace.experts == rows(PROMPT + OUTPUT)[:-1]).all()
    assert "a row for its last token too" in trace.info.options["notes"][0]


@pytest.mark.parametrize("count", [PROMPT + OUTPUT - 2, PROMPT + OUTPUT + 1])
def test_other_lengths_are_refused(read: Callable[..., Trace], count: int) -> None:
    with pytest.raises(TraceError, match=f"answer 1: routed_experts has {count} rows for 5 prompt and 4 output tokens"):
        read(vllm(npy(rows(count))))
    with pytest.raises(TraceError, match=f"holds {count * 6} numbers, which do not make 8 rows"):
        read(sglang(raw(rows(count))))


@pytest.mark.parametrize("field", [None, "absent"])
def test_a_missing_field_says_how_to_get_it(read: Callable[..., Trace], field: str | None) -> None:
    answer = vllm(None)
    if field:
        del answer["choices"][0]["routed_experts"]
    with pytest.raises(TraceError, match="answer 2 has no 'routed_experts' .*--enable-return-routed-experts"):
        read(vllm(npy(rows())), answer)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("not base64!", "is not base64"),
        (base64.b64encode(b"abcde").decode(), "holds 5 bytes, which are no int32 numbers"),
        (npy(rows())[:-40], "is no readable .npy array"),
        (17, "is int, wanted base64 text"),
        ([[[1, 2]], [[1]]], "is a ragged list"),
        ("", "holds 0 bytes"),
    ],
)
def test_damaged_fields_are_refused(read: Callable[..., Trace], field: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(vllm(field))


def test_uncounted_prompts_need_the_option(read: Callable[..., Trace]) -> None:
    answer = vllm(npy(rows()))
    del answer["usage"]
    with pytest.raises(TraceError, match="does not count its prompt's tokens; give --prompt-tokens N"):
        read(answer)
    assert [p.phase for p in read(answer, prompt_tokens=6).passes] == [Phase.PREFILL, Phase.DECODE, Phase.DECODE]


def test_a_cut_file_names_its_line(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(vllm(npy(rows()))) + "\n" + json.dumps(vllm(npy(rows())))[:300], encoding="utf-8")
    with pytest.raises(TraceError, match=r"a.jsonl: line 2 is not JSON"):
        import_trace(path, options=ImportOptions(make.shape()))
