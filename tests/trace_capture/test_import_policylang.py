"""moe-policylang's JSON lines and Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trace_capture import Phase, Trace
from trace_capture.errors import TraceError
from trace_capture.importers import ImportOptions, detect_format, import_trace


def full_trace(make: Any, **shape: Any) -> Trace:
    """Every layer of every token is routed."""
    return make.trace(prompt=1, **shape)


def entries(trace: Trace, **more: Any) -> list[dict[str, Any]]:
    names = {Phase.PREFILL: "prefill", Phase.DECODE: "decode"}
    return [
        {
            "p": int(trace.sequence[row]),
            "t": int(trace.position[row]),
            "l": layer_id,
            "e": trace.experts[row, layer].tolist(),
            "s": trace.weights[row, layer].tolist(),
            "ti": int(trace.token_id[row]),
            "ph": names[Phase(int(trace.phase[row]))],
        }
        | more
        for row in range(trace.num_tokens)
        for layer, layer_id in enumerate(trace.shape.moe_layer_ids)
    ]


def write_lines(path: Path, trace: Trace, rows: list[dict[str, Any]], **header: Any) -> Path:
    shape = trace.shape
    head = {"model_name": "tiny", "num_layers": shape.num_moe_layers, "num_experts": shape.num_experts}
    head |= {"top_k": shape.top_k, "num_entries": len(rows), "records_full_softmax": False}
    path.write_text("\n".join(map(json.dumps, [head | header, *rows])) + "\n", encoding="utf-8")
    return path


def read(path: Path, trace: Trace, prompt_tokens: int | None = None) -> Trace:
    assert detect_format(path) == "moe-policylang"
    return import_trace(path, options=ImportOptions(trace.shape, prompt_tokens))


def test_lines_hold_everything_but_the_shape(make: Any, tmp_path: Path) -> None:
    trace = full_trace(make)
    found = read(write_lines(tmp_path / "t.jsonl", trace, entries(trace)), trace)
    for name in ("sequence", "pass_id", "phase", "position", "token_id", "experts", "weights"):
        assert (getattr(found, name) == getattr(trace, name)).all(), name
    assert "weights" not in found.info.options


def test_order_of_rows_does_not_matter_and_layers_may_be_counted_from_zero(make: Any, tmp_path: Path) -> None:
    shape = {"num_layers": 4, "moe_layer_ids": (1, 2, 3), "expert_bytes": (9,) * 3, "dense_bytes": (9,) * 3}
    trace = full_trace(make, **shape)
    rows = entries(trace)
    for row in rows:
        row["l"] -= 1
    np.random.default_rng(0).shuffle(rows)
    rows.sort(key=lambda row: row["p"])
    assert (read(write_lines(tmp_path / "t.jsonl", trace, rows), trace).experts == trace.experts).all()


def test_parquet_without_phases_needs_the_prompt(make: Any, tmp_path: Path) -> None:
    trace = full_trace(make)
    rows = entries(trace)
    table = pa.table(
        {
            "prompt_id": pa.array([row["p"] for row in rows], pa.int32()),
            "token_idx": pa.array([row["t"] for row in rows], pa.int32()),
            "layer_idx": pa.array([row["l"] for row in rows], pa.int32()),
            "selected_experts": pa.array([row["e"] for row in rows], pa.list_(pa.int32())),
        }
    )
    path = tmp_path / "t.parquet"
    pq.write_table(table, path, compression="zstd")
    with pytest.raises(TraceError, match="prompt 0 does not tell prefill from decode: give --prompt-tokens N"):
        read(path, trace)
    found = read(path, trace, prompt_tokens=1)
    assert (found.experts == trace.experts).all() and (found.phase == trace.phase).all()
    assert found.info.options["weights"] == "not recorded" and set(found.token_id.tolist()) == {-1}


def test_damage_is_found(make: Any, tmp_path: Path) -> None:
    trace, path = full_trace(make), tmp_path / "t.jsonl"
    rows = entries(trace)
    with pytest.raises(TraceError, match="has 41 rows, its header says 42"):
        read(write_lines(path, trace, rows[:-1], num_entries=42), trace)
    with pytest.raises(TraceError, match="prompt 1 has 20 rows for 7 tokens x 3 layers: rows are missing or double"):
        read(write_lines(path, trace, rows[:-1]), trace)
    with pytest.raises(TraceError, match="prompt 0 has 21 rows for 7 tokens x 3 layers: rows are missing or double"):
        read(write_lines(path, trace, [rows[0], *rows[:1], *rows[2:]]), trace)
    with pytest.raises(TraceError, match="is of 'tiny' with 9 experts, tiny has 8"):
        read(write_lines(path, trace, rows, num_experts=9), trace)
    with pytest.raises(TraceError, match="has layers 0 to 2, 3 in all; tiny has experts in 5 layers"):
        read(write_lines(path, trace, rows), full_trace(make, num_layers=5))
    rows[7]["e"] = [4, 4]
    with pytest.raises(TraceError, match="prompt 0: row 2, MoE layer 1 has the same expert twice"):
        read(write_lines(path, trace, rows), trace)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(TraceError, match="line 43 is not JSON"):
        read(path, trace)
