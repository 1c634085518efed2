"""llama.cpp's moe-trace CSV: three dialects of one routing give the same trace, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_capture import NO_EXPERT, Phase, Trace
from trace_capture.errors import TraceError
from trace_capture.importers import ImportOptions, detect_format, import_trace

Writer = Callable[[Trace], str]


def blocks(trace: Trace) -> list[tuple[Phase, int, list[tuple[int, list[int]]]]]:
    """Phase, decoder layer and (token, ids) of each layer of each pass, as llama.cpp runs them."""
    return [
        (
            item.phase,
            layer_id,
            [
                (int(trace.position[row]), trace.experts[row, layer].tolist())
                for row in range(item.start, item.stop)
                if trace.experts[row, layer, 0] != NO_EXPERT
            ],
        )
        for item in trace.passes
        for layer, layer_id in enumerate(trace.shape.moe_layer_ids)
    ]


def plain(trace: Trace, header: str = "") -> str:
    rows = [f"{layer},{expert}" for _, layer, tokens in blocks(trace) for _, ids in tokens for expert in ids]
    return header + "\n".join(rows) + "\n"


def with_positions(trace: Trace) -> str:
    """Rows of a prompt of n tokens have positions -n to -1, those of decode 0, 1, ..."""
    rows = []
    prompt = int((trace.phase[trace.sequence == 0] == Phase.PREFILL).sum())
    for _, layer, tokens in blocks(trace):
        rows += [f"{token - prompt},{layer},{','.join(map(str, ids))}" for token, ids in tokens]
    return "\n".join(rows) + "\n"


def with_phase(trace: Trace) -> str:
    names = {Phase.PREFILL: "prefill", Phase.DECODE: "decode"}
    rows = ["phase,token,layer,rank,expert"]
    for phase, layer, tokens in blocks(trace):
        rows += [
            f"{names[phase]},{token},{layer},{rank},{expert}"
            for token, ids in tokens
            for rank, expert in enumerate(ids)
        ]
    return "\n".join(rows) + "\n"


def read(tmp_path: Path, text: str, trace: Trace, prompt_tokens: int | None = None) -> Trace:
    path = tmp_path / "moe_trace.csv"
    path.write_text(text, encoding="utf-8")
    assert detect_format(path) == "moe-trace"
    return import_trace(path, options=ImportOptions(trace.shape, prompt_tokens))


@pytest.mark.parametrize("write", [plain, with_positions, with_phase])
def test_every_dialect_gives_the_same_routing(make: Any, tmp_path: Path, write: Writer) -> None:
    """Two prompts of four tokens, whose last layer routes the last token alone; a dense layer in front."""
    shape = {"num_layers": 4, "moe_layer_ids": (1, 2, 3), "expert_bytes": (9,) * 3, "dense_bytes": (9,) * 3}
    trace = make.trace(**shape)
    found = read(tmp_path, write(trace), trace)
    assert (found.experts == trace.experts).all() and (found.experts[:3, -1] == NO_EXPERT).all()
    for name in ("sequence", "pass_id", "phase", "position"):
        assert (getattr(found, name) == getattr(trace, name)).all(), name


def test_the_plain_dialect_says_what_it_assumed(make: Any, tmp_path: Path) -> None:
    trace = make.trace()
    notes = read(tmp_path, plain(trace, "layer,expert\n"), trace).info.options["notes"]
    assert "tokens are groups of 2 rows, all of distinct experts" in notes[0]
    assert "passes of several tokens are taken for the prompt" in notes[1]
    marked = read(tmp_path, with_phase(trace), trace).info.options["notes"]
    assert len(marked) == 1 and "the last layer routed none" in marked[0]


def test_the_plain_dialect_with_a_known_prompt(make: Any, tmp_path: Path) -> None:
    """A prompt of one token looks like decode; the option says what it was. One prompt, so one sequence."""
    trace = make.trace(num_prompts=1, prompt=1, decode=5)
    guessed = read(tmp_path, plain(trace), trace)
    assert set(guessed.phase.tolist()) == {Phase.DECODE}
    given = read(tmp_path, plain(trace), trace, prompt_tokens=1)
    assert given.phase.tolist() == trace.phase.tolist()
    with pytest.raises(TraceError, match=r"no pass ends after 9 tokens \(the first ones end after \[1, 2, 3, 4\]\)"):
        read(tmp_path, plain(trace), trace, prompt_tokens=9)


def test_a_lowered_top_k_shows_in_decode(make: Any, tmp_path: Path) -> None:
    trace = make.trace()
    wider = make.trace(top_k=4)
    found = read(tmp_path, plain(trace), wider)
    assert found.shape.top_k == 2 and (found.experts == trace.experts).all()
    assert any("lowered from the model's top-4" in note for note in found.info.options["notes"])


def test_a_prompt_in_several_batches_is_several_passes(make: Any, tmp_path: Path) -> None:
    rows = np.argsort(np.random.default_rng(0).random((7, 3, 8)), axis=2)[:, :, :2]
    text = ""
    for batch in (rows[:4], rows[4:]):
        for layer in range(3):
            text += "".join(
                f"{-len(batch) + j},{layer},{','.join(map(str, batch[j, layer]))}\n" for j in range(len(batch))
            )
    found = read(tmp_path, text, make.trace())
    assert (found.experts == rows).all() and [p.stop - p.start for p in found.passes] == [4, 3]
    assert set(found.phase.tolist()) == {Phase.PREFILL} and found.position.tolist() == list(range(7))


@pytest.mark.parametrize("write", [plain, with_positions, with_phase])
def test_cut_files_are_refused(make: Any, tmp_path: Path, write: Writer) -> None:
    trace = make.trace()
    text = write(trace)
    with pytest.raises(TraceError, match="ends without a line break, so it was cut off"):
        read(tmp_path, text[:-1], trace)
    lines = text.splitlines(keepends=True)
    with pytest.raises(TraceError, match=r"pass 14 .* lacks layers \[2\]|has 1 rows, not a multiple|lacks layers"):
        read(tmp_path, "".join(lines[:-2]), trace)
    with pytest.raises(TraceError, match="not a multiple of top-2|rank 1 where another|tokens of|lacks layers"):
        read(tmp_path, "".join([*lines[:20], *lines[21:]]), trace)


def test_other_models_and_nonsense_are_refused(make: Any, tmp_path: Path) -> None:
    trace = make.trace()
    with pytest.raises(TraceError, match=r"lacks layers \[3\] of tiny"):
        read(tmp_path, with_phase(trace), make.trace(num_layers=4))
    with pytest.raises(TraceError, match=r"has expert \d of 4: either another model"):
        read(tmp_path, with_phase(trace), make.trace(num_experts=4))
    with pytest.raises(TraceError, match="do not make tokens of 2 distinct experts"):
        read(tmp_path, plain(trace).replace("0,", "0,1\n0,1\n0,", 1), trace)
    with pytest.raises(TraceError, match="line 3 holds something that is no number"):
        read(tmp_path, "0,1\n0,2\n0,x\n", trace)
    with pytest.raises(TraceError, match="line 2 is no row of phase,token,layer,rank,expert"):
        read(tmp_path, "phase,token,layer,rank,expert\nverify,0,0,0,1\n", trace)
    one = make.trace(num_layers=1, prompt=1)
    with pytest.raises(TraceError, match="has one layer and no token index"):
        read(tmp_path, plain(one), one)
    assert (read(tmp_path, with_phase(one), one).experts == one.experts).all()


@pytest.mark.parametrize("write", [plain, with_positions, with_phase])
@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_public_routing_survives_every_dialect(public_traces: Path, tmp_path: Path, name: str, write: Writer) -> None:
    trace = import_trace(public_traces / f"{name}.route.csv")
    found = read(tmp_path, write(trace), trace)
    assert (found.experts == trace.experts).all() and (found.phase == trace.phase).all()
