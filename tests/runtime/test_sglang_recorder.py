"""Dumps of SGLang's recorder, written here with torch in the documented form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.importing import ALL_IMPORTERS
from tests.simulator.builders import make_shape
from trace_capture.errors import TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.importers import ImportOptions, detect_format, import_file
from trace_capture.trace import Phase, Trace

LAYERS, EXPERTS, TOP_K = 4, 16, 3
SHAPE = make_shape(LAYERS, EXPERTS, TOP_K)


def ids(tokens: int, seed: int, experts: int = EXPERTS) -> np.ndarray[Any, Any]:
    """[T, L, K]."""
    random = np.random.default_rng(seed)
    return np.argsort(random.random((tokens, LAYERS, experts)), axis=2)[:, :, :TOP_K]


def record(number: int, rows: Any, positions: list[int], lengths: list[int] | None = None) -> dict[str, Any]:
    padded = np.concatenate([rows, np.full((len(rows), LAYERS, 8 - TOP_K), -1)], axis=2).swapaxes(0, 1)
    return {
        "forward_pass_id": number,
        "rank": 0,
        "gatherer_key": "primary",
        "input_ids": torch.arange(len(positions)) + 100 * number,
        "positions": torch.tensor(positions),
        "extend_seq_lens": None if lengths is None else torch.tensor(lengths),
        "forward_mode": 1 if lengths else 2,
        "topk_ids_of_layer": torch.tensor(padded.copy(), dtype=torch.int32),
        "misc_objects": [],
    }


def read(path: Path, content: Any) -> Trace | ExpertCounts:
    torch.save(content, path)
    assert detect_format(path, ALL_IMPORTERS) == "sglang-recorder"
    return import_file(path, options=ImportOptions(SHAPE), importers=ALL_IMPORTERS)


def dump(*records: dict[str, Any], logical: Any = None) -> dict[str, Any]:
    table = np.tile(np.arange(EXPERTS), (LAYERS, 1)) if logical is None else logical
    return {"records": list(records), "last_physical_to_logical_map": torch.tensor(table)}


def test_batched_requests_are_told_apart_by_position(tmp_path: Path) -> None:
    """Prompts of 5 and 3 tokens in one pass, the first one's rest in another, and decode of both together."""
    first, second, rest = ids(5, 1), ids(3, 2), ids(2, 3)
    both = [ids(2, 10 + step) for step in range(3)]
    trace = read(
        tmp_path / "r.pt",
        dump(
            record(1, np.concatenate([first, second]), [*range(5), *range(3)], [5, 3]),
            record(2, rest, [5, 6], [2]),
            *(record(3 + step, both[step], [7 + step, 3 + step]) for step in range(3)),
        ),
    )
    assert isinstance(trace, Trace)
    wanted = [first, rest, *(rows[:1] for rows in both), second, *(rows[1:] for rows in both)]
    assert (trace.experts == np.concatenate(wanted)).all() and trace.shape.top_k == TOP_K
    assert trace.sequence.tolist() == [0] * 10 + [1] * 6
    sizes = [(item.phase, item.stop - item.start) for item in trace.passes]
    assert sizes == [(Phase.PREFILL, 5), (Phase.PREFILL, 2), *[(Phase.DECODE, 1)] * 3] + [
        (Phase.PREFILL, 3),
        *[(Phase.DECODE, 1)] * 3,
    ]
    assert trace.position.tolist() == [*range(10), *range(6)] and trace.token_id[5:8].tolist() == [200, 201, 300]
    assert "5 of 8 slots per layer are -1" in trace.info.options["notes"][0]


def test_requests_at_the_same_position_are_refused(tmp_path: Path) -> None:
    prompts = record(1, ids(4, 1), [0, 1, 0, 1], [2, 2])
    with pytest.raises(TraceError, match="a token at position 2 could belong to 2 requests; record with one request"):
        read(tmp_path / "r.pt", dump(prompts, record(2, ids(2, 2), [2, 2])))
    with pytest.raises(TraceError, match="a token at position 9 could belong to 0 requests"):
        read(tmp_path / "r.pt", dump(prompts, record(2, ids(1, 2), [9])))


def test_a_prompt_behind_a_prefix_cache(tmp_path: Path) -> None:
    trace = read(tmp_path / "r.pt", dump(record(1, ids(3, 1), [6, 7, 8], [3]), record(2, ids(1, 2), [9])))
    assert isinstance(trace, Trace) and trace.position.tolist() == [6, 7, 8, 9]
    assert "the tokens before it came from the prefix cache" in trace.info.options["notes"][0]


def test_physical_ids_become_logical_ones(tmp_path: Path) -> None:
    """18 physical experts; the last two are replicas of experts 3 and 5, and the first two changed places."""
    logical = np.tile([1, 0, *range(2, EXPERTS), 3, 5], (LAYERS, 1))
    rows = ids(4, 1)
    rows[2, 0], rows[3, 1] = [3, 7, 9], [2, 5, 8]
    physical = rows.copy()
    physical[rows == 0], physical[rows == 1] = 1, 0
    physical[2][rows[2] == 3] = 16
    physical[3][rows[3] == 5] = 17
    content = dump(record(1, physical, [0, 1, 2, 3], [4]), logical=logical)
    trace = read(tmp_path / "r.pt", content)
    assert isinstance(trace, Trace) and (trace.experts == rows).all()
    assert any("replaced by the recorded map" in note for note in trace.info.options["notes"])
    with pytest.raises(TraceError, match="has expert 1[67] of 16: .* physical ids"):
        read(tmp_path / "r.pt", {"records": content["records"]})


def test_counts_of_passes_and_of_statistics(tmp_path: Path) -> None:
    table = np.arange(LAYERS * 18).reshape(LAYERS, 18)
    logical = np.tile([*range(EXPERTS), 3, 5], (LAYERS, 1))
    wanted = table[:, :EXPERTS].copy()
    wanted[:, 3] += table[:, 16]
    wanted[:, 5] += table[:, 17]
    passes = [{"forward_pass_id": n, "rank": 0, "global_physical_count": torch.tensor(table)} for n in range(2)]
    counts = read(tmp_path / "r.pt", dump(*passes, logical=logical))
    assert isinstance(counts, ExpertCounts) and (counts.counts == 2 * wanted).all()
    statistics = {"rank": 0, "logical_count": torch.tensor(np.stack([wanted, wanted])), "average_utilization": 0.5}
    counts = read(tmp_path / "r.pt", statistics)
    assert isinstance(counts, ExpertCounts) and (counts.counts == 2 * wanted).all()


def test_a_dump_that_could_run_code_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds Python objects beside tensors, which could run code"):
        read(tmp_path / "r.pt", {"records": [Path("x")]})


def test_other_and_cut_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.pt"
    with pytest.raises(TraceError, match="neither 'records' nor 'logical_count'"):
        read(path, {"weight": torch.zeros(3)})
    with pytest.raises(TraceError, match="holds a list, wanted a dump"):
        read(path, [1, 2])
    with pytest.raises(TraceError, match=r"has ids of 4 tokens, 4 positions and requests of \[5\] tokens"):
        read(path, dump(record(1, ids(4, 1), [0, 1, 2, 3], [5])))
    with pytest.raises(TraceError, match="positions that do not follow each other"):
        read(path, dump(record(1, ids(4, 1), [0, 1, 3, 4], [4])))
    read(path, dump(record(1, ids(4, 1), [0, 1, 2, 3], [4])))
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(TraceError, match="cannot be read as a torch file"):
        import_file(path, "sglang-recorder", ImportOptions(SHAPE), ALL_IMPORTERS)
