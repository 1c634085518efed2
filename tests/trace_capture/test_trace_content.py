"""Trace: passes, active experts, digests; and the checks that refuse impossible ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trace_capture import NO_EXPERT, Phase, Trace
from trace_capture.errors import TraceError
from trace_capture.trace_checks import check_trace


def test_passes_cut_the_rows_where_the_pass_changes(trace: Trace) -> None:
    assert [(p.phase, p.sequence, p.start, p.stop) for p in trace.passes][:3] == [
        (Phase.PREFILL, 0, 0, 4),
        (Phase.DECODE, 0, 4, 5),
        (Phase.DECODE, 0, 5, 6),
    ]
    assert len(trace.passes) == 2 * (1 + 6)
    assert trace.passes[7].phase == Phase.PREFILL and trace.passes[7].sequence == 1
    assert trace.passes[-1].stop == trace.num_tokens == 20


def test_active_experts_are_distinct_in_order_of_first_appearance(trace: Trace, make: Any) -> None:
    def routing(experts: Any) -> None:
        experts[0:4, 0] = [[5, 1], [1, 7], [5, 7], [2, 1]]

    changed = make.edited(trace, experts=routing)
    assert changed.active_experts(0, 4, 0) == [5, 1, 7, 2]
    assert [experts for layer, experts in changed.iter_layers(changed.passes[0]) if layer == 0] == [[5, 1, 7, 2]]


def test_layer_routed_for_the_last_prefill_token_only_has_its_top_k(trace: Trace) -> None:
    assert trace.active_experts(0, 4, 2) == trace.experts[3, 2].tolist()


def test_predictions_of_an_unknown_predictor_name_the_known_ones(trace: Trace) -> None:
    with pytest.raises(TraceError, match=r"no predictions of 'oracle' \(it has: guess\)"):
        trace.predictions("oracle")


def test_rows_keep_pass_ids_and_predictions(trace: Trace) -> None:
    decode = trace.rows(trace.phase == Phase.DECODE)
    assert decode.num_tokens == 12
    assert decode.pass_id.tolist() == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13]
    np.testing.assert_array_equal(decode.predicted["guess"], trace.predicted["guess"][trace.phase == 1])


def test_digest_changes_with_any_column_and_not_with_provenance(trace: Trace, make: Any) -> None:
    assert trace.digest == make.trace().digest
    renamed = replace(trace, info=trace.info.model_copy(update={"tokenizer": "another"}))
    assert renamed.digest == trace.digest
    token = make.edited(trace, token_id=lambda column: np.add(column, 1, out=column))
    weight = make.edited(trace, weights=lambda column: column.__setitem__((0, 0, 0), 0.125))
    assert len({trace.digest, token.digest, weight.digest, replace(trace, predicted={}).digest}) == 4


def test_empty_trace_has_no_passes(trace: Trace) -> None:
    empty = trace.rows(np.zeros(trace.num_tokens, dtype=np.bool_))
    assert empty.passes == () and empty.sequences() == []
    check_trace(empty)


IMPOSSIBLE = {
    "row 5 has experts beyond 7": {"experts": lambda c: c.__setitem__((5, 1, 0), 8)},
    "row 6 has experts with the same expert twice": {"experts": lambda c: c.__setitem__((6, 1), 3)},
    "row 7 has experts missing for a part": {"experts": lambda c: c.__setitem__((7, 0, 1), NO_EXPERT)},
    "row 3 has a weight that is not a finite": {"weights": lambda c: c.__setitem__((3, 0, 0), np.inf)},
    "row 9 has an unknown phase": {"phase": lambda c: c.__setitem__(9, 3)},
    "row 2 has a negative position": {"position": lambda c: c.__setitem__(2, -1)},
    "row 8 has a pass_id lower": {"pass_id": lambda c: c.__setitem__(8, 0)},
    "row 2 has another phase than": {"phase": lambda c: c.__setitem__(2, 1)},
    "row 1 has another sequence than": {"sequence": lambda c: c.__setitem__(1, 1)},
    "row 6 has a second token in one decode pass": {"pass_id": lambda c: c.__setitem__(6, c[5])},
    "row 4 has a rejected token outside a verify": {"accepted": lambda c: c.__setitem__(4, False)},
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_check_names_the_first_impossible_row(trace: Trace, make: Any, message: str) -> None:
    check_trace(trace)
    with pytest.raises(TraceError, match=f"^some.parquet: {message}"):
        check_trace(make.edited(trace, **IMPOSSIBLE[message]), where="some.parquet")


def test_check_names_predictions_and_lengths(trace: Trace) -> None:
    guess = trace.predicted["guess"].copy()
    guess[11, 2] = 4
    with pytest.raises(TraceError, match="row 11 has predicted 'guess' with the same expert twice"):
        check_trace(replace(trace, predicted={"guess": guess}))
    with pytest.raises(TraceError, match="column 'position' has 19 rows of 20"):
        check_trace(replace(trace, position=trace.position[:-1]))
    with pytest.raises(TraceError, match=r"do not fit 3 layers x top-2"):
        check_trace(replace(trace, experts=trace.experts[:, :2]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_layer_ids": ()}, "no Mixture-of-Experts layer"),
        ({"moe_layer_ids": (0, 1, 3)}, "stay below num_layers = 3"),
        ({"moe_layer_ids": (0, 2, 1)}, "must rise"),
        ({"expert_bytes": (1, 2)}, "expert_bytes has 2 entries for 3"),
        ({"top_k": 9}, "top_k = 9 exceeds num_experts = 8"),
    ],
)
def test_shape_refuses_counts_that_do_not_fit(make: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make.shape(**fields)


def test_shape_sums_bytes_over_layers(make: Any) -> None:
    shape = make.shape()
    assert shape.total_expert_bytes == 8 * (100 + 101 + 102)
    assert shape.bytes_per_token == 2 * (100 + 101 + 102)
