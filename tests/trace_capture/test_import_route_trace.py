"""The importer for BigMoeOnEdge route traces, on hand-made files and on the public recordings."""

from __future__ import annotations

import csv
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_capture import NO_EXPERT, Phase, Trace
from trace_capture.errors import TraceError
from trace_capture.importers import IMPORTERS, detect_format, import_trace

Write = Callable[[str], Path]
BUDGET_BYTES = 4000 * 2**20


def test_rows_become_passes_positions_and_ids(make: Any, write_route: Write) -> None:
    trace = import_trace(write_route(make.route_text(make.route_rows())))
    assert [(p.phase, p.start, p.stop) for p in trace.passes] == [
        (Phase.PREFILL, 0, 3),
        (Phase.DECODE, 3, 4),
        (Phase.DECODE, 4, 5),
    ]
    assert trace.position.tolist() == [0, 1, 2, 3, 4] and trace.sequence.tolist() == [0] * 5
    assert trace.experts[1].tolist() == [[1, 2], [2, 3], [NO_EXPERT, NO_EXPERT]]
    assert trace.experts[4].tolist() == [[4, 5], [5, 6], [6, 7]]
    assert trace.weights[4, 0].tolist() == [0.75, 0.25] and set(trace.token_id.tolist()) == {-1}
    shape = trace.shape
    assert (shape.name, shape.architecture, shape.weight_dtype) == ("Tiny-Q4_K_M", "tiny", "Q4_K_M")
    assert (shape.num_experts, shape.top_k, shape.expert_bytes) == (8, 2, (100, 101, 102))
    assert trace.info.source == "import:route-trace" and trace.info.options["file"] == "x.route.csv"


def test_result_does_not_depend_on_the_order_of_rows_or_columns(make: Any, write_route: Write) -> None:
    text = make.route_text(make.route_rows())
    wanted = import_trace(write_route(text)).digest
    lines = text.splitlines()
    head, body = lines[:6], lines[6:]
    assert import_trace(write_route("\n".join([*head, *reversed(body)]) + "\n")).digest == wanted
    table = [line.split(",") for line in [head[5], *body]]
    moved = ["appended," + ",".join([*reversed(row)]) for row in table]
    assert import_trace(write_route("\n".join([*head[:5], *moved]) + "\n")).digest == wanted


def test_each_turn_is_a_sequence_with_a_prefill_of_its_own(make: Any, write_route: Write) -> None:
    trace = import_trace(write_route(make.route_text(make.route_rows() + make.route_rows(turn=1))))
    assert trace.sequence.tolist() == [0] * 5 + [1] * 5
    assert [p.phase for p in trace.passes] == [Phase.PREFILL, Phase.DECODE, Phase.DECODE] * 2


def test_dense_layers_are_counted_with_the_next_moe_layer(make: Any, write_route: Write) -> None:
    text = make.route_text([row for row in make.route_rows() if row[3] != 1])
    trace = import_trace(write_route(text.replace("# layer=1 expert_bytes=101", "# layer=1 expert_bytes=0")))
    assert trace.shape.moe_layer_ids == (0, 2) and trace.shape.num_layers == 3
    assert trace.shape.expert_bytes == (100, 102) and trace.shape.dense_bytes == (50, 100)
    assert trace.experts[4].tolist() == [[4, 5], [6, 7]]


DECODE_ROW = "0,1,4,2,1,7,0.25,0,0\n"
"""The last row of the hand-made file: turn, phase, step, layer, slot, expert, weight, residency, bytes."""


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("0,1,4,2,1,7,0.2", "line 32 ends without a line break, so it was cut off"),
        ("0,1,4,2,1,7,0.25\n", "line 32 has 7 cells for 9 columns"),
        ("0,1,4,2,1,,0.25,0,0\n", "line 32 holds something that is no number"),
        ("0,1,4,2,1,seven,0.25,0,0\n", "line 32 holds something that is no number"),
        ("0,1,4,2,1,7,,0,0\n", "line 32 holds something that is no number"),
        ("0,1,4,2,1,7,nan,0,0\n", "line 32 has weight nan"),
        ("0,1,4,2,1,8,0.25,0,0\n", "line 32 has expert 8 of 8"),
        ("0,1,4,2,1,-1,0.25,0,0\n", "line 32 has expert -1 of 8"),
        ("0,1,4,3,1,7,0.25,0,0\n", "line 32 has layer 3, which has no '# layer=' line"),
        ("0,1,4,2,2,7,0.25,0,0\n", "line 32 has slot 2 of top-2"),
        ("0,2,4,2,1,7,0.25,0,0\n", "line 32 has phase 2"),
        ("0,0,4,2,1,7,0.25,0,0\n", "line 32 has another phase than the rest of its step"),
        ("0,1,-4,2,1,7,0.25,0,0\n", "line 32 has step -4"),
        ("0,1,4294967300,2,1,7,0.25,0,0\n", "line 32 has step 4294967300"),
        (f"0,1,4,2,1,{2**70},0.25,0,0\n", "beyond 64 bits"),
        ("0,1,4,2,1,6,0.25,0,0\n", "line 32 has expert 6 a second time in step 4, layer 2"),
        (DECODE_ROW + DECODE_ROW, "line 33 has step 4, layer 2, slot 1 a second time"),
        ("", "turn 0, step 4 lacks 1 of 2 slots in layer 2"),
        ("0,1,6,2,1,7,0.25,0,0\n", "turn 0, step 6 follows step 4: steps between them are missing"),
    ],
)
def test_damaged_row_is_named_by_line_or_step(make: Any, write_route: Write, new: str, message: str) -> None:
    text = make.route_text(make.route_rows())
    assert text.endswith(DECODE_ROW)
    path = write_route(text.removesuffix(DECODE_ROW) + new)
    with pytest.raises(TraceError) as caught:
        import_trace(path)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda turn, phase, step, layer, slot, expert: (step, layer) != (4, 1), "step 4 has no rows for layer 1"),
        (lambda turn, phase, step, layer, slot, expert: (step, layer) != (1, 0), "step 1 has no rows for layer 0"),
        (lambda turn, phase, step, layer, slot, expert: (step, layer) != (2, 2), "step 2 has no rows for layer 2"),
        (lambda turn, phase, step, layer, slot, expert: (step, layer) != (4, 2), "step 4 has no rows for layer 2"),
        (lambda turn, phase, step, layer, slot, expert: step != 3, "step 4 follows step 2"),
    ],
)
def test_only_the_last_layer_of_a_prefill_may_lack_tokens(
    make: Any, write_route: Write, keep: Callable[..., bool], message: str
) -> None:
    rows = [row for row in make.route_rows() if keep(*row)]
    with pytest.raises(TraceError, match=message):
        import_trace(write_route(make.route_text(rows)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# route_trace v1", "# route_trace v2", "route_trace version v2, this program reads v1"),
        ("# route_trace v1", "# route_trace", "route_trace version none"),
        ("# model=", "# modell=", "has no '# model="),
        (" n_expert_used=2", "", "lacks n_expert_used"),
        ("n_expert_used=2", "n_expert_used=9", "do not fit together: .*top_k = 9"),
        ("# layer=1 expert_bytes=101 dense_bytes=50\n", "", "has layer 1, which has no '# layer=' line"),
        (" dense_bytes=50\n# layer=2", "\n# layer=2", "the comment of layer 1 lacks its bytes"),
        ("turn,phase", "turn,stage", "is not a header with phase"),
    ],
)
def test_damaged_head_is_named(make: Any, write_route: Write, old: str, new: str, message: str) -> None:
    text = make.route_text(make.route_rows())
    assert old in text
    with pytest.raises(TraceError, match=message):
        import_trace(write_route(text.replace(old, new)))


def test_files_without_rows_or_format(make: Any, write_route: Write, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="empty"):
        import_trace(write_route(""))
    with pytest.raises(TraceError, match="is empty"):
        import_trace(write_route(""), format="route-trace")
    with pytest.raises(TraceError, match="has no routing rows"):
        import_trace(write_route(make.route_text([])))
    with pytest.raises(TraceError, match="in no known trace format .*route-trace"):
        import_trace(write_route("pos,layer,id0\n"))
    with pytest.raises(TraceError, match="is not a route trace"):
        import_trace(write_route("pos,layer,id0\n"), format="route-trace")
    with pytest.raises(TraceError, match="unknown trace format 'mbolt' .*choose one of: .*route-trace"):
        import_trace(write_route("x"), format="mbolt")
    with pytest.raises(TraceError, match="cannot read .*gone"):
        import_trace(tmp_path / "gone.csv")
    binary = tmp_path / "binary"
    binary.write_bytes(b"# route_trace v1\n\xff\xfe\n")
    with pytest.raises(TraceError, match="not a text file"):
        import_trace(binary)
    assert detect_format(write_route(make.route_text([]))) == "route-trace" and "route-trace" in IMPORTERS


class Pool:
    """Plain-Python LRU over all layers with a byte budget, written without the project's code. Misses evict outside
    the set that its layer is about to run."""

    def __init__(self, budget: int) -> None:
        self.entries: OrderedDict[tuple[int, int], int] = OrderedDict()
        self.free = budget

    def touch(self, key: tuple[int, int], size: int, pinned: set[tuple[int, int]]) -> bool:
        hit = key in self.entries
        while not hit and self.free < size:
            victim = next(entry for entry in self.entries if entry not in pinned)
            self.free += self.entries.pop(victim)
        if not hit:
            self.free -= size
        self.entries[key] = size
        self.entries.move_to_end(key)
        return hit


def replay(trace: Trace, pin: bool) -> tuple[int, int]:
    """Look-ups and hits of one LRU of 4000 MiB: a prefill asks once per distinct expert and layer."""
    pool, lookups, hits = Pool(BUDGET_BYTES), 0, 0
    for item in trace.passes:
        for layer, size in enumerate(trace.shape.expert_bytes):
            ids = trace.experts[item.start : item.stop, layer].ravel().tolist()
            keys = [(layer, expert) for expert in dict.fromkeys(ids) if expert != NO_EXPERT]
            lookups += len(keys)
            hits += sum(pool.touch(key, size, set(keys) if pin else set()) for key in keys)
    return lookups, hits


@pytest.mark.parametrize(
    ("name", "lookups", "pinned_hits", "plain_hits"),
    [("qwen", 39_526, 29_600, 29_596), ("gemma", 24_578, 18_871, 18_862)],
)
def test_public_trace_replays_to_its_recorded_hit_rate(
    public_traces: Path, name: str, lookups: int, pinned_hits: int, plain_hits: int
) -> None:
    trace = import_trace(public_traces / f"{name}.route.csv")
    assert replay(trace, pin=True) == (lookups, pinned_hits)
    assert replay(trace, pin=False) == (lookups, plain_hits)
    recorded = {"qwen": 0.7488, "gemma": 0.7678}[name]
    assert abs(pinned_hits / lookups - recorded) < 0.0001


@pytest.mark.parametrize(("name", "lookups", "hits"), [("qwen", 39_526, 29_597), ("gemma", 24_578, 18_872)])
def test_public_trace_tells_hit_from_miss_as_recorded_row_by_row(
    public_traces: Path, name: str, lookups: int, hits: int
) -> None:
    """The recorder wrote for each row whether the expert was in its cache. An LRU of 4000 MiB that pins a layer's
    set, moved by every row of the imported trace, agrees at every look-up."""
    path = public_traces / f"{name}.route.csv"
    trace = import_trace(path)
    with path.open(encoding="utf-8") as stream:
        rows = csv.DictReader(line for line in stream if not line.startswith("#"))
        recorded = {tuple(int(row[k]) for k in ("step", "layer", "slot")): row["residency"] != "0" for row in rows}
    pool, outcomes = Pool(BUDGET_BYTES), []
    for item in trace.passes:
        for layer, size in enumerate(trace.shape.expert_bytes):
            block = trace.experts[item.start : item.stop, layer]
            pinned = {(layer, int(expert)) for expert in np.unique(block)}
            seen = set()
            for (token, slot), expert in np.ndenumerate(block):
                if expert == NO_EXPERT:
                    continue
                hit = pool.touch((layer, int(expert)), size, pinned)
                if expert not in seen:
                    outcomes.append((hit, recorded[int(trace.position[item.start + token]), layer, slot]))
                seen.add(expert)
    assert len(outcomes) == lookups
    assert sum(hit for hit, _ in outcomes) == hits
    assert sum(hit != told for hit, told in outcomes) == 0
