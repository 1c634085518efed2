"""The shipped scenario: what its documentation says of it holds in the simulator."""

from __future__ import annotations

from simulator.ablation import ABLATIONS
from tests.benchmarks.spac_scenario import (
    BASELINE,
    BASELINE_AIM,
    FULL,
    ON_DEMAND,
    ON_DEMAND_AIM,
    shipped,
    simulated,
)
from trace_capture.rewindow import acceptance_counts


def test_all_parts_together_beat_each_ablation_and_the_baselines() -> None:
    found = simulated(*shipped())
    ms = {name: metrics.tpot_ms for name, metrics in found.items()}
    assert {f"no {name}" for name in ABLATIONS} < set(ms)
    assert all(value > ms[FULL] for name, value in ms.items() if name != FULL), ms
    assert ms[ON_DEMAND] > ON_DEMAND_AIM * ms[FULL] and ms[BASELINE] > BASELINE_AIM * ms[FULL]


def test_the_trace_is_as_documented() -> None:
    trace, _, config = shipped()
    assert trace.info.draft is not None and trace.info.draft.gamma == config.utility.gamma
    assert acceptance_counts(trace).tokens_per_pass > 3
