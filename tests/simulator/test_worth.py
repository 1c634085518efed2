"""Synthetic traces that fit another, and what would help a model, in words that agree with simulations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from runtime.cli import synthesize, traces  # noqa: F401 - the verbs register themselves
from runtime.cli.app import app
from simulator.scenario import Scenario
from simulator.sweep import answer
from simulator.worth import WORTH_RATIO, hit_curve, is_it_worth_it
from tests.simulator.builders import make_shape
from trace_capture.errors import ConfigError
from trace_capture.statistics import consecutive_overlap
from trace_capture.synthetic import synthetic_trace
from trace_capture.synthetic_fit import (
    fit_settings,
    fitted_trace,
    hit_ratios,
    published_statistics,
    statistics_of,
)
from trace_capture.trace import Trace

MACHINE = {"gpu": "rtx3060", "host": "ddr4-3600-2ch", "link": "pcie3x16", "budget_ratio": "0.3"}


@pytest.fixture(scope="module")
def trace() -> Trace:
    shape = make_shape(layers=4, experts=32, top_k=4, expert_bytes=2_000_000)
    return synthetic_trace(shape, 1, 16, 120, reuse_ratio=0.4, skew=0.5, memory=1.2, predictor_recall=0.9, seed=5)


def test_a_fit_has_the_reuse_and_the_hit_curve_of_what_it_fits(trace: Trace) -> None:
    wanted = statistics_of(trace)
    settings = fit_settings(wanted, trace.shape, 16, 120)
    again = fitted_trace(trace.shape, settings, 1, 16, 120, seed=9)
    assert float(np.nanmean(consecutive_overlap(again))) == pytest.approx(wanted.reuse_ratio, abs=0.03)
    assert np.allclose(hit_ratios(again), wanted.hit_ratios, atol=0.06)
    even = synthetic_trace(trace.shape, 1, 16, 120, reuse_ratio=0.4, skew=0.0, predictor_recall=1.0, seed=9)
    assert max(abs(a - b) for a, b in zip(hit_ratios(even), wanted.hit_ratios, strict=True)) > 0.1
    assert fit_settings(wanted, trace.shape, 16, 120) == settings
    with pytest.raises(ConfigError, match="--like"):
        published_statistics("unheard-of")


def test_memory_makes_sequences_return_to_their_experts(trace: Trace) -> None:
    rates = [
        hit_ratios(
            synthetic_trace(trace.shape, 1, 16, 120, reuse_ratio=0.4, skew=0, memory=memory, predictor_recall=1, seed=1)
        )[1]
        for memory in (0.0, 1.0, 2.0)
    ]
    assert rates == sorted(rates) and rates[2] > rates[0] + 0.1


def test_verdicts_agree_with_simulations(trace: Trace) -> None:
    scenario = Scenario().set_values(MACHINE)
    steps: list[int] = []
    verdicts = {
        one.technique: one for one in is_it_worth_it(trace, scenario, lambda done, total: steps.append(total - done))
    }
    assert steps == [4, 3, 2, 1, 0]
    assert list(verdicts) == ["cache", "prefetch", "CPU experts", "speculative decoding"]
    cached = answer(trace, scenario.set_values({"strategy": "lru"}))["tpot_ms"]
    for one in verdicts.values():
        found = answer(trace, scenario.set_values({"strategy": "lru"} | one.settings))
        assert one.after_ms == found["tpot_ms"]
        assert one.before_ms is not None and one.helps == (one.before_ms >= WORTH_RATIO * one.after_ms)
        expected = "helps" if one.helps else "changes little" if one.before_ms > one.after_ms / WORTH_RATIO else "hurts"
        assert expected in one.sentence or one.technique == "cache"
        assert one.technique == "cache" or one.before_ms == cached
    assert verdicts["cache"].helps and verdicts["prefetch"].settings == {"prefetch": "quasi-hidden"}


def test_a_machine_without_a_host_says_what_is_missing(trace: Trace) -> None:
    bare = Scenario(hardware="rtx3060+pcie3x16", budget_ratio=0.3)
    cpu = next(one for one in is_it_worth_it(trace, bare) if one.technique == "CPU experts")
    assert cpu.after_ms is None and not cpu.helps and "host=" in cpu.sentence


def test_hit_curves_rise_and_stay_below_perfect_eviction(trace: Trace) -> None:
    curve = hit_curve(trace)
    assert curve["lru"] == sorted(curve["lru"]) and curve["lru"][0] == 0
    for slots, belady in curve["belady"]:
        assert belady >= curve["lru"][slots] - 1e-9


def test_commands_give_a_first_answer_without_a_trace(tmp_path: Path, trace: Trace) -> None:
    trace.save(tmp_path / "like.parquet")
    made = tmp_path / "first.parquet"
    small = ["--prompts", "1", "--prompt-tokens", "4", "--tokens", "12", "--model", "qwen3-30b-a3b"]
    arguments = ["synthesize", *small, "--out", str(made), "--reuse", "0.5", "--skew", "0.6", "--memory", "1"]
    facts = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert facts["settings"]["memory"] == 1 and Trace.load(made).info.source == "synthetic"
    machine = [item for name, value in MACHINE.items() for item in ("--set", f"{name}={value}")]
    arguments = ["inspect", str(tmp_path / "like.parquet"), "--worth", *machine]
    facts = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert [one["technique"] for one in facts["verdicts"]][0] == "cache"
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert all(one["sentence"] in shown for one in facts["verdicts"])
