"""The search beyond the grid: never worse, resumed without loss, the same whoever replays, quality only on a budget."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import simulator.tune_run as tune_run
from dashboard.tune_figures import front_figure
from runtime.cli.tune import tune_json
from simulator import simulate, tune
from simulator.policies.config import DeviceConfig
from simulator.tune import TuneOptions, split_trace
from simulator.tune_goal import Figures, Goal
from simulator.tune_quality import CommitCost, parse_quality_budget, read_commit_cost
from simulator.tune_replays import TuningStopped
from simulator.tune_space import Space
from tests.simulator.builders import make_hardware, make_host, make_shape, mixed_trace
from trace_capture.errors import ConfigError
from trace_capture.trace import Trace

LINK = make_hardware(bytes_per_s=1e9, latency_ns=137, issue_ns=53, wakeup_ns=71, launch_ns=211)
BUDGET = 18_000


def small_trace(**more: Any) -> Trace:
    return mixed_trace(make_shape(layers=3), seed=8, sequences=3, decode=10, **more)


def tuned(trace: Trace, hardware: Any = LINK, **options: Any) -> Any:
    calls = {name: options.pop(name) for name in ("progress", "cancelled") if name in options}
    return tune(trace, hardware, budget_bytes=BUDGET, options=TuneOptions(**options), **calls)


def evaluation(tmp_path: Path, recalls: dict[int, float], kl: float = 0.06, mode: str = "commit", **more: Any) -> Path:
    """A record with the fields of `moe-studio evaluate --json`."""
    raw = {
        "model": "toy",
        "config": {"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "quasi-hidden"}},
        "modes": [
            {
                "mode": mode,
                "kl_nats": {"value": kl / 2, "low": 0.0, "high": kl},
                "recall": [{"layer": layer, "slot": {"value": value}} for layer, value in recalls.items()],
            }
        ],
        "seconds": 1.0,
    }
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(raw | more))
    return path


def test_more_trials_never_do_worse_on_the_training_part() -> None:
    trace = small_trace()
    grid, searched = tuned(trace), tuned(trace, trials=12)
    assert searched.candidates[0].train_tpot_ms <= grid.candidates[0].train_tpot_ms
    known = {one.config.model_copy(update={"label": ""}).model_dump_json() for one in searched.candidates}
    full = [one for one in grid.candidates if "eighths" not in one.config.label]
    assert all(one.config.model_copy(update={"label": ""}).model_dump_json() in known for one in full)
    assert len(searched.candidates) > len(grid.candidates), "nothing was proposed that the grid has not"
    train = split_trace(trace)[0]
    for one in searched.candidates:
        assert simulate(train, LINK, one.config, bounds=False).metrics.tpot_ms == one.train_tpot_ms
        assert one.figures.device_bytes <= BUDGET and one.kl_nats == 0
        modes = one.config.prefetch.modes(3)
        assert "commit" not in modes


class _StopAt:
    """Stops a search once so many steps are done."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0

    def progress(self, done: int, total: int) -> None:
        self._done = done

    def cancelled(self) -> bool:
        return self._done >= self._steps


def test_a_search_that_was_broken_off_goes_on_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off in the grid, within a round of proposals, and in the round after it."""
    replayed: list[str] = []
    real = tune_run.Replays._computed

    def counted(self: Any, missing: Any) -> Any:
        for key, result in real(self, missing):
            replayed.append(key)
            yield key, result

    monkeypatch.setattr(tune_run.Replays, "_computed", counted)
    trace, study = small_trace(), tmp_path / "study.sqlite"
    trace.predicted.clear()
    steps: list[tuple[int, int]] = []

    def search(trials: int, **more: Any) -> Any:
        options = TuneOptions(trials=trials, seed=3, study=more.pop("study", study))
        return tune(trace, LINK, budget_bytes=BUDGET, scopes=("global",), options=options, **more)

    whole = search(7, study=None, progress=lambda *step: steps.append(step))
    grid_size = steps[-1][1] - 7 - 2 - 3
    replayed.clear()
    for stop in (5, grid_size + 2, grid_size + 6):
        watch = _StopAt(stop)
        with pytest.raises(TuningStopped, match=r"stopped after \d+ of \d+ steps; the same call .* goes on"):
            search(7, progress=watch.progress, cancelled=watch.cancelled)
    resumed = search(7)
    assert resumed.config == whole.config and resumed.candidates == whole.candidates
    assert len(replayed) == len(set(replayed)), "a replay was done twice"
    replayed.clear()
    fewer = search(6)
    known = {one.config.label for one in whole.candidates}
    assert {one.config.label for one in fewer.candidates if "eighths" not in one.config.label} <= known
    assert len(replayed) <= 2, "the first trials do not depend on how many are asked for; smaller budgets may"


def test_processes_do_not_change_what_is_found() -> None:
    trace = small_trace()
    assert tuned(trace, trials=5, jobs=2).candidates == tuned(trace, trials=5).candidates


def test_a_file_that_is_no_study_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are notes and not a database, which has another beginning")
    with pytest.raises(ValueError, match="notes.txt"):
        tuned(small_trace(), trials=2, study=path)


def test_nothing_commits_without_a_record_and_never_beyond_its_budget(tmp_path: Path) -> None:
    trace = small_trace()
    cost = read_commit_cost(evaluation(tmp_path, {1: 0.9, 2: 0.7}), trace.shape)
    assert cost.source == "quasi-hidden" and cost.order == [1, 2]
    assert cost.kl_nats[0] == math.inf and cost.kl_nats[1:] == pytest.approx((0.015, 0.045))
    assert [cost.most_layers(nats) for nats in (0.0, 0.014, 0.016, 0.061)] == [0, 0, 1, 2]
    result = tuned(trace, trials=24, commit=(cost,), quality_nats=0.016, seed=1)
    committed = [one for one in result.candidates if "commit" in one.config.prefetch.modes(3)]
    assert committed and all(
        one.config.prefetch.modes(3) in {("hint", "commit", m) for m in ("hint", "verify")} for one in committed
    )
    assert all(one.kl_nats == pytest.approx(0.015) for one in committed)
    assert all(one.kl_nats == 0 for one in result.candidates if one not in committed)
    nothing = tuned(trace, trials=24, commit=(cost,), quality_nats=0.01, seed=1)
    assert not any("commit" in one.config.prefetch.modes(3) for one in nothing.candidates)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "another"}, "evaluates another, and the trace is of toy"),
        ({"modes": []}, "says nothing of the mode commit"),
        ({"config": {}}, "is no record of"),
    ],
)
def test_records_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_commit_cost(evaluation(tmp_path, {1: 0.9}, **change), make_shape(layers=3))


def test_quality_budgets_are_read() -> None:
    assert parse_quality_budget("kl=0.02") == 0.02
    for text in ("0.02", "kl=", "kl=-1", "ppl=3", "kl=nan"):
        with pytest.raises(ConfigError, match="kl=NATS"):
            parse_quality_budget(text)


def test_objectives_score_what_they_say() -> None:
    fast, lean = Figures(2.0, 9.0, 3.0, 0.5, 800), Figures(2.1, 4.0, 5.0, 0.5, 400)
    assert [Goal(name).score(fast) < Goal(name).score(lean) for name in ("tpot", "ttft", "throughput")] == [
        True,
        False,
        True,
    ]
    memory = Goal("memory", budget_bytes=800, limit_ms=2.2)
    assert memory.score(lean) == 0.5 < memory.score(fast) == 1.0
    strict = Goal("memory", budget_bytes=800, limit_ms=2.05)
    assert strict.score(fast) == 1.0 < strict.score(lean)
    assert memory.score(None) == math.inf
    with pytest.raises(ConfigError, match="did you mean|unknown objective"):
        Goal("speed")


def test_memory_is_saved_within_the_slowdown() -> None:
    trace = small_trace()
    result = tuned(trace, trials=12, objective="memory", slowdown_ratio=0.3)
    best_ms = min(one.train_tpot_ms for one in result.candidates if one.figures.device_bytes >= BUDGET - 1000)
    first = result.candidates[0]
    assert first.figures.device_bytes < BUDGET and first.train_tpot_ms <= 1.3 * best_ms + 1e-12


def test_first_token_is_faster_when_prompts_are_read_another_way() -> None:
    trace = small_trace()
    result = tuned(trace, trials=16, objective="ttft")
    plain = [one for one in result.candidates if one.config.prefill.strategy == "on-demand"]
    assert result.candidates[0].figures.ttft_ms <= min(one.figures.ttft_ms for one in plain)
    assert any(one.config.prefill.strategy == "stream" for one in result.candidates)


def test_drafts_are_tried_up_to_what_is_asked_for() -> None:
    result = tuned(small_trace(), trials=20, drafts=3, acceptance_ratio=0.9)
    assert {one.gamma for one in result.candidates} == {0, 1, 2, 3}
    origin = result.config.provenance
    assert origin is not None and origin.gamma == result.candidates[0].gamma and origin.gamma > 0
    assert result.config.utility.gamma == origin.gamma
    assert result.chosen.metrics.accepted_drafts > 0
    assert any(one.config.cache.policy == "utility" for one in result.candidates)


def test_cpu_choices_become_configurations_of_the_budget() -> None:
    host = make_host(ram=1e12, cores=1, core_rate=1e9, layer_ns=200)
    result = tuned(small_trace(), make_hardware(bytes_per_s=1e9, host=host), trials=16)
    proposed = [one.config for one in result.candidates if one.config.cpu.policy == "threshold"]
    assert proposed
    for one in result.candidates:
        slots = one.config.cache.slots_per_layer
        if slots and one.config.cpu.layers:
            assert all(count == 0 for count in slots[: one.config.cpu.layers])


def test_a_mode_per_layer_goes_to_the_layers_that_are_foreseen_best() -> None:
    trace = small_trace()
    space = Space(trace, trace, ("lru",), ("even",), ("quasi-hidden",), BUDGET, DeviceConfig(), lambda *_: (6, 6, 6))
    choices = {"cache.policy": "lru", "split": "even", "prefetch.source": "quasi-hidden", "prefetch.verify_layers": 1}
    modes = space.config_of(choices).prefetch.modes(3)
    from trace_capture.statistics import predictor_recall

    recall = predictor_recall(trace)["quasi-hidden"]
    assert modes[1 if recall[1] >= recall[2] else 2] == "verify" and modes.count("verify") == 1


def test_nothing_on_the_front_is_dominated_and_nothing_off_it_is_not() -> None:
    cost = CommitCost("quasi-hidden", (math.inf, 0.01, 0.02))
    result = tuned(small_trace(), trials=16, commit=(cost,), quality_nats=0.1)
    points = [(one.train_tpot_ms, one.figures.device_bytes, one.kl_nats) for one in result.candidates]
    best = {p for p in points if not any(o != p and all(a <= b for a, b in zip(o, p, strict=True)) for o in points)}
    shown = {(point.speed_ms, point.device_bytes, point.kl_nats) for point in result.front}
    assert best <= shown
    assert [point for point in result.front if point.is_chosen] and len(shown - best) <= 1
    raw = tune_json(result)
    figure = front_figure(raw["front"])
    assert len(figure.data[0].x) == len(result.front) and figure.data[1].name == "chosen"
    assert max(figure.data[0].x) == pytest.approx(max(point.device_bytes for point in result.front) / 2**20)
    assert front_figure([]).layout.annotations[0].text
