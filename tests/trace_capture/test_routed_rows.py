"""Every fault that is known of engines' arrays of routed experts is found and told, and sound arrays pass untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trace_capture import NO_EXPERT, Phase
from trace_capture.errors import TraceError
from trace_capture.importers import ImportOptions, import_trace
from trace_capture.importers.assemble import split_at_prompt
from trace_capture.importers.routed_rows import WARMUP_RUN, RoutedRows, routed_rows

Ids = npt.NDArray[np.int64]


def some_ids(tokens: int = 12, layers: int = 3, experts: int = 8, top_k: int = 2, seed: int = 0) -> Ids:
    """Distinct random ids [T, L, K], none of them the pair of zeros."""
    random = np.random.default_rng(seed)
    return np.argsort(random.random((tokens, layers, experts)), axis=2)[:, :, :top_k]


def checked(make: Any, ids: npt.NDArray[Any], **shape: Any) -> RoutedRows:
    return routed_rows(ids, make.shape(**shape), "a.npy")


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, np.int64])
def test_a_sound_array_passes_untouched(make: Any, kind: type) -> None:
    ids = some_ids()
    rows = checked(make, ids.astype(kind))
    assert rows.experts.dtype == np.uint16 and (rows.experts == ids).all()
    assert rows.notes == () and rows.dropped == 0 and rows.shape == make.shape()


@pytest.mark.parametrize("runs", [[WARMUP_RUN], [40, 25]])
def test_leading_runs_of_one_row_are_left_out_as_warm_up(make: Any, runs: list[int]) -> None:
    """vLLM's memory profiling repeats a dummy token: 2,048 of 6,519 rows in a public file, and 16,384 and then 256."""
    ids = some_ids()
    dummies = [np.repeat(some_ids(1, seed=9 + run), run, axis=0) for run in runs]
    rows = checked(make, np.concatenate([*dummies, ids]))
    assert (rows.experts == ids).all() and rows.dropped == sum(runs)
    assert f"{sum(runs)} of {sum(runs) + 12} rows in front repeat one row" in rows.notes[0]


def test_short_repeats_and_repeats_inside_are_routing(make: Any) -> None:
    ids = some_ids()
    repeated = np.concatenate([np.repeat(ids[:1], WARMUP_RUN - 1, axis=0), ids[1:6], np.repeat(ids[6:7], 30, axis=0)])
    assert checked(make, repeated).dropped == 0


def test_nothing_but_a_warm_up_is_refused(make: Any) -> None:
    with pytest.raises(TraceError, match=r"a.npy repeats one row 40 times, as a warm-up pass does; record some real"):
        checked(make, np.repeat(some_ids(1), 40, axis=0))


def test_rows_of_zeros_in_the_prompt_are_not_routing(make: Any) -> None:
    """A prefix cache spares the first tokens; expert 0 must not be counted for them."""
    ids = some_ids()
    ids[:5] = 0
    rows = checked(make, ids)
    assert (rows.experts[:5] == NO_EXPERT).all() and (rows.experts[5:] == ids[5:]).all()
    assert "5 of 12 rows hold zeros in all layers" in rows.notes[0] and "prefix cache off" in rows.notes[0]


def test_many_rows_of_zeros_are_no_warm_up(make: Any) -> None:
    ids = np.concatenate([np.zeros((40, 3, 2), dtype=np.int64), some_ids()])
    rows = checked(make, ids)
    assert rows.dropped == 0 and (rows.experts[:40] == NO_EXPERT).all()


def test_a_generated_token_without_routing_is_refused(make: Any) -> None:
    ids = some_ids()
    ids[[3, 8]] = 0
    experts = checked(make, ids).experts
    assert split_at_prompt(experts[:8], 4, "a.npy").prefill == (4,)
    with pytest.raises(TraceError, match="row 8 is of a generated token and lacks routing"):
        split_at_prompt(experts, 4, "a.npy")


@pytest.mark.parametrize(
    ("layer", "rows", "message"),
    [
        (1, slice(None), r"MoE layer 1 \(decoder layer 1\) is zero in all rows"),
        (1, slice(4, 5), "row 4, MoE layer 1 holds 2 zeros, which no top-k gives"),
        (2, slice(4, 5), "row 4, MoE layer 2 holds 2 zeros"),
    ],
)
def test_zeros_where_no_reason_is_known_are_refused(make: Any, layer: int, rows: slice, message: str) -> None:
    ids = some_ids()
    ids[rows, layer] = 0
    with pytest.raises(TraceError, match=message):
        checked(make, ids)


def test_nothing_but_zeros_is_refused(make: Any) -> None:
    with pytest.raises(TraceError, match="nothing but zeros: the engine recorded no routing"):
        checked(make, np.zeros((40, 3, 2), dtype=np.uint8))


def test_with_one_expert_per_token_zeros_are_routing(make: Any) -> None:
    ids = np.zeros((5, 3, 1), dtype=np.int64)
    assert (checked(make, ids, top_k=1).experts == 0).all()


def test_an_expert_twice_in_a_row_is_refused(make: Any) -> None:
    ids = some_ids()
    ids[7, 2] = [5, 5]
    with pytest.raises(TraceError, match=r"row 7, MoE layer 2 has the same expert twice \(\[5, 5\]\).* draft model"):
        checked(make, ids)


@pytest.mark.parametrize("filling", [0, -1])
def test_dense_layers_are_left_out(make: Any, filling: int) -> None:
    ids = np.insert(some_ids(), 0, filling, axis=1)
    rows = checked(make, ids, num_layers=4, moe_layer_ids=(1, 2, 3), expert_bytes=(9,) * 3, dense_bytes=(9,) * 3)
    assert (rows.experts == ids[:, 1:]).all() and "1 of 4 layers are dense" in rows.notes[0]


def test_routing_in_a_dense_layer_tells_of_another_model(make: Any) -> None:
    shape = {"num_layers": 4, "moe_layer_ids": (1, 2, 3), "expert_bytes": (9,) * 3, "dense_bytes": (9,) * 3}
    with pytest.raises(TraceError, match="decoder layer 0 has routing, but tiny has no experts there"):
        checked(make, some_ids(layers=4), **shape)
    with pytest.raises(TraceError, match="has 5 layers; tiny has 4, 3 of them with experts"):
        checked(make, some_ids(layers=5), **shape)


def test_a_last_layer_that_routed_only_the_last_prompt_token(make: Any) -> None:
    ids = some_ids()
    ids[:7, 2] = 0
    rows = checked(make, ids)
    assert (rows.experts[:7, 2] == NO_EXPERT).all() and (rows.experts[7:] == ids[7:]).all()
    assert (rows.experts[:7, :2] == ids[:7, :2]).all()
    assert "the last layer routed none of 7 tokens" in rows.notes[0]


def test_ids_beyond_the_model_are_told_from_replicas(make: Any) -> None:
    ids = some_ids()
    ids[3, 1, 0] = 9
    with pytest.raises(TraceError, match="row 3, MoE layer 1 has expert 9 of 8: either another model .* physical ids"):
        checked(make, ids)
    ids[3, 1, 0] = -7
    with pytest.raises(TraceError, match="has expert -7 of 8"):
        checked(make, ids)


def test_a_lowered_top_k_is_told_and_kept(make: Any) -> None:
    rows = checked(make, some_ids(), top_k=4)
    assert rows.shape.top_k == 2 and rows.shape.bytes_per_token == 2 * sum(rows.shape.expert_bytes)
    assert "lowered from the model's top-4" in rows.notes[0]
    with pytest.raises(TraceError, match="has 4 experts per token and layer, tiny has top-2"):
        checked(make, some_ids(top_k=4))


def test_slots_that_the_writer_did_not_need(make: Any) -> None:
    """SGLang's recorder has room for 8 experts, whatever the model uses."""
    ids = some_ids()
    padded = np.concatenate([ids, np.full((12, 3, 6), -1)], axis=2)
    rows = checked(make, padded)
    assert (rows.experts == ids).all() and "6 of 8 slots per layer are -1" in rows.notes[0]
    padded[4, 1, 1] = -1
    with pytest.raises(TraceError, match="row 4, MoE layer 1 lacks a part of its 2 experts"):
        checked(make, padded)


@pytest.mark.parametrize("values", [np.zeros((3, 2)), np.zeros((3, 3, 2)), np.zeros((0, 3, 2), dtype=np.uint8)])
def test_other_arrays_are_refused(make: Any, values: npt.NDArray[Any]) -> None:
    with pytest.raises(TraceError, match=r"a.npy (holds float64 of shape|has shape \(0, 3, 2\))"):
        checked(make, values)


def test_a_file_of_one_sequence(make: Any, tmp_path: Path) -> None:
    path, ids, shape = tmp_path / "routed.npy", some_ids(), make.shape()
    np.save(path, ids.astype(np.uint8))
    trace = import_trace(path, options=ImportOptions(shape, 4))
    assert [item.phase for item in trace.passes] == [Phase.PREFILL] + [Phase.DECODE] * 8
    assert (trace.experts == ids).all() and trace.position.tolist() == list(range(12))
    assert trace.info.source == "import:routed-array" and trace.info.options["weights"] == "not recorded"
    with pytest.raises(TraceError, match=r"routed.npy does not say the model's layers.*give --model"):
        import_trace(path, options=ImportOptions(None, 4))
    with pytest.raises(TraceError, match="does not tell prefill from decode: give --prompt-tokens N"):
        import_trace(path, options=ImportOptions(shape))
    with pytest.raises(TraceError, match="has 12 rows, fewer than the prompt of 13 tokens"):
        import_trace(path, options=ImportOptions(shape, 13))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(TraceError, match=r"routed.npy is no readable .npy array"):
        import_trace(path, options=ImportOptions(shape, 4))


def test_python_objects_in_an_array_are_not_loaded(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "objects.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(TraceError, match="no readable .npy array"):
        import_trace(path, options=ImportOptions(make.shape(), 4))


def test_a_public_trace_survives_the_way_through_an_array(public_traces: Path, tmp_path: Path) -> None:
    """The routing of a real run, written as vLLM would and read back, is the same routing."""
    trace = import_trace(public_traces / "qwen.route.csv")
    ids = np.where(trace.experts == NO_EXPERT, 0, trace.experts)
    np.save(tmp_path / "q.npy", ids.astype(np.uint8))
    again = import_trace(tmp_path / "q.npy", options=ImportOptions(trace.shape, 28))
    assert (again.experts == trace.experts).all() and (again.phase == trace.phase).all()
    assert "the last layer routed none of 27 tokens" in " ".join(again.info.options["notes"])
