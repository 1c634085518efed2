"""Ablations: each takes away its part and nothing else, by the same names in every command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from runtime.cli import machines, whatif  # noqa: F401 - the verbs register themselves
from runtime.cli.app import app
from simulator.ablation import ABLATIONS, ablated, ablated_trace, draft_left, read_ablations
from simulator.config_file import save_config
from simulator.policies.config import OffloadConfig, parse_config
from simulator.replay import simulate
from simulator.scenario import Scenario, put_together
from tests.simulator.builders import make_shape
from trace_capture.errors import ConfigError
from trace_capture.hardware import HardwareProfile
from trace_capture.rewindow import rewindow
from trace_capture.synthetic import synthetic_trace
from trace_capture.trace import Phase, Trace

CARD = "rtx4090-pcie4x16"


@pytest.fixture(scope="module")
def trace() -> Trace:
    shape = make_shape(layers=3, experts=16, top_k=2, expert_bytes=4_000_000)
    plain = synthetic_trace(shape, 1, 4, 40, reuse_ratio=0.5, skew=1.0, predictor_recall=0.5, seed=0)
    return rewindow(plain, 4, 0.8)


@pytest.fixture
def full() -> OffloadConfig:
    return parse_config(
        {
            "cache": {"policy": "utility", "budget_ratio": 0.4},
            "utility": {"gamma": 4, "loads": "drafting", "window": "round", "boundaries": "capacity", "up": 2},
            "cpu": {"policy": "balanced", "hot_misses": "balance"},
        }
    )


def changed(config: OffloadConfig, full: OffloadConfig) -> set[str]:
    """Dotted names of the keys that differ."""
    left, right = config.model_dump(), full.model_dump()
    tables = ("cache", "prefetch", "utility", "cpu", "prefill", "device")
    return {f"{table}.{key}" for table in tables for key in left[table] if left[table][key] != right[table][key]}


def test_each_takes_its_part_away_and_leaves_the_others(full: OffloadConfig) -> None:
    found = {name: changed(ablated(full, [name]), full) for name in ABLATIONS}
    assert found == {
        "estimator": {"utility.signal", "utility.boundaries"},
        "balancer": {"utility.tau"},
        "thresholds": {"utility.boundaries"},
        "drafts": {"utility.gamma", "utility.up"},
        "cpu": {"cpu.policy"},
    }
    both = ablated(full, ["balancer", "cpu"])
    assert changed(both, full) == {"utility.tau", "cpu.policy"}
    assert "no balancer, no cpu" in both.label
    assert ablated(full, []) == full


def test_what_is_not_there_cannot_be_taken_away(full: OffloadConfig, trace: Trace) -> None:
    plain = OffloadConfig.for_fraction(0.5)
    for name in set(ABLATIONS) - {"drafts"}:
        with pytest.raises(ConfigError, match=f"{name}: the configuration has no such part"):
            ablated(plain, [name])
    with pytest.raises(ConfigError, match="thresholds: the configuration has no such part"):
        ablated(full, ["estimator", "thresholds"])
    with pytest.raises(ConfigError, match="no verify passes"):
        ablated_trace(rewindow(trace, 0, 0.0), ["drafts"])
    with pytest.raises(ConfigError, match="nothing is drafted"):
        draft_left(None, ["drafts"])
    assert draft_left("demo", ["drafts"]) is None and draft_left("demo", ["cpu"]) == "demo"
    with pytest.raises(ConfigError, match="did you mean 'drafts'"):
        read_ablations("draft")
    assert read_ablations("cpu, drafts+cpu") == ("cpu", "drafts") and read_ablations("none") == ()


def test_without_drafts_the_same_tokens_are_decoded_one_by_one(trace: Trace) -> None:
    alone = ablated_trace(trace, ["drafts"])
    assert not (alone.phase == Phase.VERIFY).any() and ablated_trace(trace, ["cpu"]) is trace
    assert np.array_equal(alone.experts, trace.experts[trace.accepted])


def test_every_command_says_the_same(trace: Trace, full: OffloadConfig, tmp_path: Path) -> None:
    trace.save(tmp_path / "t.parquet")
    save_config(full, tmp_path / "c.toml")
    where = [str(tmp_path / "t.parquet"), "--json"]
    for name in ("estimator", "drafts", "balancer,cpu"):
        parts = read_ablations(name)
        run = simulate(ablated_trace(trace, parts), HardwareProfile.load(Path(CARD)), ablated(full, parts))
        options = ["--config", str(tmp_path / "c.toml"), "--hardware", CARD, "--ablate", name]
        said = json.loads(CliRunner().invoke(app, ["simulate", *where, *options]).stdout)
        assert said["tpot_ms"] == run.metrics.tpot_ms and said["label"] == run.info.label
        settings = {"config": str(tmp_path / "c.toml"), "ablate": name.replace(",", "+")}
        question = put_together(trace, Scenario().set_values(settings))
        assert simulate(question.trace, question.hardware, question.config).metrics.tpot_ms == run.metrics.tpot_ms
