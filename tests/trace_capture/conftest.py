"""Small traces, shapes and route-trace files that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_capture import NO_EXPERT, ModelShape, Phase, Trace, TraceInfo

RouteRow = tuple[int, int, int, int, int, int]
"""turn, phase, step, layer, slot, expert."""


def small_shape(num_layers: int = 3, num_experts: int = 8, top_k: int = 2, **fields: Any) -> ModelShape:
    defaults: dict[str, Any] = {
        "name": "tiny",
        "architecture": "test",
        "num_layers": num_layers,
        "moe_layer_ids": tuple(range(num_layers)),
        "num_experts": num_experts,
        "top_k": top_k,
        "expert_bytes": tuple(100 + layer for layer in range(num_layers)),
        "dense_bytes": (50,) * num_layers,
    }
    return ModelShape(**(defaults | fields))


def random_trace(seed: int = 0, num_prompts: int = 2, prompt: int = 4, decode: int = 6, **shape: Any) -> Trace:
    """Uniformly random routing with one predictor `guess`; the last layer of a prefill routes its last token only."""
    random = np.random.default_rng(seed)
    model = small_shape(**shape)
    length = prompt + decode
    size = (num_prompts * length, model.num_moe_layers)
    experts = np.argsort(random.random((*size, model.num_experts)), axis=2)[:, :, : model.top_k].astype(np.uint16)
    guess = np.argsort(random.random((*size, model.num_experts)), axis=2)[:, :, : model.top_k].astype(np.uint16)
    position = np.tile(np.arange(length), num_prompts)
    decoding = position >= prompt
    guess[:, 0] = NO_EXPERT
    experts[position < prompt - 1, -1] = NO_EXPERT
    return Trace(
        info=TraceInfo(shape=model, source="capture", tokenizer="tok", versions={"python": "3"}),
        sequence=np.repeat(np.arange(num_prompts), length).astype(np.int32),
        pass_id=(np.cumsum(decoding | (position == 0)) - 1).astype(np.int32),
        phase=np.where(decoding, Phase.DECODE, Phase.PREFILL).astype(np.uint8),
        position=position.astype(np.int32),
        token_id=random.integers(0, 99, len(position)).astype(np.int32),
        accepted=np.ones(len(position), dtype=np.bool_),
        experts=experts,
        weights=random.random((*size, model.top_k)).astype(np.float16),
        predicted={"guess": guess},
    )


def edited(trace: Trace, **columns: Any) -> Trace:
    """A copy with some columns given by functions that change a copy of them in place."""
    changed = {}
    for name, change in columns.items():
        changed[name] = getattr(trace, name).copy()
        change(changed[name])
    return replace(trace, **changed)


def route_rows(prompt: int = 3, decode: int = 2, layers: int = 3, top_k: int = 2, turn: int = 0) -> list[RouteRow]:
    """Rows as BigMoeOnEdge writes them: prefill layer by layer, its last layer for the last token only."""
    rows = [
        (turn, 0, step, layer, slot, (step + layer + slot) % 8)
        for layer in range(layers)
        for step in range(prompt)
        for slot in range(top_k)
        if layer < layers - 1 or step == prompt - 1
    ]
    return rows + [
        (turn, 1, step, layer, slot, (step + layer + slot) % 8)
        for step in range(prompt, prompt + decode)
        for layer in range(layers)
        for slot in range(top_k)
    ]


def route_text(rows: list[RouteRow], layers: int = 3) -> str:
    head = ["# route_trace v1", f"# model=Tiny-Q4_K_M.gguf arch=tiny n_layer={layers} n_expert=8 n_expert_used=2"]
    head += [f"# layer={layer} expert_bytes={100 + layer} dense_bytes=50" for layer in range(layers)]
    head.append("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes")
    body = [",".join(map(str, row)) + f",{0.75 - 0.5 * row[4]},0,0" for row in rows]
    return "\n".join(head + body) + "\n"


@pytest.fixture
def trace() -> Trace:
    return random_trace()


@pytest.fixture
def write_route(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "x.route.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def public_traces() -> Path:
    folder = Path(__file__).resolve().parents[2].parent / "shared" / "routing" / "bigmoe"
    if not folder.is_dir():
        pytest.skip("the public traces of ../shared/routing are not here")
    return folder


@pytest.fixture
def make() -> Any:
    """The builders above, for tests that need other than the defaults."""

    class Builders:
        shape = staticmethod(small_shape)
        trace = staticmethod(random_trace)
        edited = staticmethod(edited)
        route_rows = staticmethod(route_rows)
        route_text = staticmethod(route_text)

    return Builders
