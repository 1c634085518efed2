"""What-if: settings by name, grids, sweeps that resume, the same answers whoever computes them."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from dashboard.whatif_figures import sweep_figure
from runtime.cli import whatif  # noqa: F401 - the verb registers itself
from runtime.cli.app import app
from simulator.policies.config import parse_config
from simulator.replay import simulate
from simulator.result_store import ResultStore
from simulator.scenario import GIB, Scenario, put_together, resident_bytes, with_context
from simulator.sweep import answer, grid, sweep
from simulator.upgrades import upgrades
from trace_capture.errors import ConfigError, StudioError
from trace_capture.hardware import HardwareProfile
from trace_capture.known_shapes import known_shape
from trace_capture.synthetic import synthetic_trace
from trace_capture.trace import Phase, Trace

CARD = {"hardware": "rtx3060-pcie4x16"}


@pytest.fixture(scope="module")
def trace() -> Trace:
    shape = known_shape("qwen3-30b-a3b")
    layers = 4
    small = shape.model_copy(
        update={
            "num_layers": layers,
            "moe_layer_ids": tuple(range(layers)),
            "expert_bytes": shape.expert_bytes[:layers],
            "dense_bytes": shape.dense_bytes[:layers],
            "attention": (),
            "attention_bytes": shape.attention_bytes[:layers],
            "router_bytes": shape.router_bytes[:layers],
            "shared_bytes": shape.shared_bytes[:layers],
        }
    )
    return synthetic_trace(small, 2, 4, 30, reuse_ratio=0.5, skew=0.5, predictor_recall=0.8, seed=3)


def test_an_answer_is_what_simulate_says(trace: Trace) -> None:
    scenario = Scenario(**CARD, budget_ratio=0.4, strategy="lfu", prefetch="previous-token")
    config = parse_config({"cache": {"policy": "lfu", "budget_ratio": 0.4}, "prefetch": {"source": "previous-token"}})
    run = simulate(trace, HardwareProfile.load(Path("rtx3060-pcie4x16")), config)
    found = answer(trace, scenario)
    assert found["tpot_ms"] == run.metrics.tpot_ms
    assert found["bound_ms"] == run.info.bounds["max_ms"] and found["regret_ratio"] == run.regret_ratio
    assert sum(share["ms"] for share in found["critical_path"]) == pytest.approx(found["tpot_ms"])


def test_without_a_budget_experts_get_what_the_device_has_left(trace: Trace) -> None:
    question = put_together(trace, Scenario(**CARD, vram_gb=3, reserve_gb=0.5, draft_mib=64))
    context = int(trace.position.max()) + 1
    left = 2.5 * GIB - 64 * 2**20 - resident_bytes(trace.shape, context)
    assert question.config.cache.budget_bytes == int(left)
    assert put_together(trace, Scenario(**CARD, vram_gb=80)).config.cache.budget_bytes == trace.shape.total_expert_bytes
    with pytest.raises(ConfigError, match="does not fit"):
        put_together(trace, Scenario(**CARD, vram_gb=0.2))
    assert "does not fit" in answer(trace, Scenario(**CARD, vram_gb=0.2))["error"]


def test_context_moves_generated_tokens_only(trace: Trace) -> None:
    moved = with_context(trace, 4096)
    for sequence in trace.sequences():
        generated = moved.position[(moved.sequence == sequence) & (moved.phase != Phase.PREFILL)]
        assert generated.tolist() == list(range(4096, 4096 + len(generated)))
    prefill = trace.phase == Phase.PREFILL
    assert np.array_equal(moved.position[prefill], trace.position[prefill])
    near, far = (answer(trace, Scenario(**CARD, budget_ratio=0.5, context=tokens)) for tokens in (0, 65536))
    assert far["tpot_ms"] > near["tpot_ms"] and far["decode_hit_rate"] == near["decode_hit_rate"]


def test_settings_by_name(trace: Trace) -> None:
    scenario = Scenario().set_values(
        {
            "gpu": "rtx3090",
            "host": "ddr4-3200-2ch",
            "vram_gb": "12",
            "host.cores": "6",
            "config.cache.seed": "5",
            "budget_ratio": "0.5",
            "preload": "true",
            "context": "none",
        }
    )
    question = put_together(trace, scenario)
    assert "3090" in question.hardware.device.name and question.hardware.device.memory_bytes.value == 12 * GIB
    assert question.hardware.host is not None and question.hardware.host.cores.value == 6
    assert question.config.cache.seed == 5 and question.config.cache.preload is True
    for wrong, message in (
        ({"vram": "8"}, "vram_gb"),
        ({"vram_gb": "plenty"}, "vram_gb = plenty"),
        ({"scope": "galaxy"}, "scope = galaxy"),
    ):
        with pytest.raises(ConfigError, match=message):
            Scenario().set_values(wrong)
    for wrong, message in (({"gpu": "rtx9999"}, "rtx9999"), ({"config.cache.polcy": "lru"}, "cache.policy")):
        with pytest.raises(StudioError, match=message):
            put_together(trace, Scenario(budget_ratio=0.5).set_values(wrong))


def test_a_grid_has_every_combination() -> None:
    found = grid(Scenario(), {"vram_gb": ["8", "12"], "link": ["pcie3x16", "pcie4x16", "pcie5x16"]})
    assert [(scenario.vram_gb, scenario.link) for _, scenario in found][:4] == [
        (8, "pcie3x16"),
        (8, "pcie4x16"),
        (8, "pcie5x16"),
        (12, "pcie3x16"),
    ]
    assert len(found) == 6 and grid(Scenario(), {}) == [({}, Scenario())]
    with pytest.raises(ConfigError, match="no values"):
        grid(Scenario(), {"link": []})


def test_a_stopped_sweep_goes_on_where_it_was(trace: Trace, tmp_path: Path) -> None:
    scenarios = grid(Scenario(**CARD), {"budget_ratio": ["0.25", "0.5", "1"], "strategy": ["lru", "lfu"]})
    store = ResultStore(tmp_path / "results.sqlite")

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(trace, scenarios, store=store, progress=stop)
    assert len(store) == 3
    seen: list[int] = []
    resumed = sweep(
        trace, scenarios, store=ResultStore(tmp_path / "results.sqlite"), progress=lambda d, t: seen.append(d)
    )
    assert seen == [3, 4, 5, 6]
    assert [point.answer for point in resumed] == [point.answer for point in sweep(trace, scenarios)]
    (tmp_path / "text").write_text("no database, but long enough to be taken for a file of some other kind" * 9)
    with pytest.raises(StudioError, match="no store of results"):
        ResultStore(tmp_path / "text")


def test_scenarios_that_come_to_the_same_are_simulated_once(trace: Trace, tmp_path: Path) -> None:
    """Memory beyond all experts, a reserve within one slot; but not another link, nor bounds."""
    every = resident_bytes(trace.shape, int(trace.position.max()) + 1) + trace.shape.total_expert_bytes
    enough = math.ceil(10 * every / GIB) / 10 + 1.5
    cards = {"vram_gb": [f"{enough:.1f}", f"{enough + 8:.1f}", f"{enough + 80:.1f}"], "link": ["pcie3x16", "pcie4x16"]}
    slot_gb = max(trace.shape.expert_bytes) / GIB
    scenarios = grid(Scenario(**CARD), cards)
    scenarios += grid(
        Scenario(**CARD, vram_gb=enough), {"reserve_gb": [f"{1.5 + part * slot_gb:.9f}" for part in (3.2, 3.3)]}
    )
    store, seen = ResultStore(tmp_path / "results.sqlite"), []
    points = sweep(trace, scenarios, store=store, bounds=False, progress=lambda done, _: seen.append(done))
    assert seen == [0, 3, 6, 8] and len(store) == 3
    assert [point.answer for point in points] == [answer(trace, scenario, False) for _, scenario in scenarios]
    sweep(trace, scenarios[:1], store=store, bounds=True)
    assert len(store) == 4


def test_processes_and_a_dask_cluster_give_the_same_answers(trace: Trace) -> None:
    scenarios = grid(Scenario(**CARD), {"link": ["pcie3x16", "pcie4x16"], "vram_gb": ["3", "0.2"]})
    alone = [point.answer for point in sweep(trace, scenarios, bounds=False)]
    assert [point.answer for point in sweep(trace, scenarios, jobs=2, bounds=False)] == alone
    assert [point.answer for point in sweep(trace, scenarios, jobs=2, cluster="dask", bounds=False)] == alone
    assert "does not fit" in alone[1]["error"] and alone[0]["tpot_ms"] > alone[2]["tpot_ms"]
    with pytest.raises(ConfigError, match="unknown cluster 'slurm'"):
        sweep(trace, scenarios, cluster="slurm")


def test_upgrades_are_simulated_and_ranked(trace: Trace) -> None:
    scenario = Scenario(**CARD, vram_gb=3, link="pcie3x16", cpu_experts="misses", host="ddr4-3200-2ch")
    now = answer(trace, scenario)["tpot_ms"]
    found = {upgrade.what: upgrade for upgrade in upgrades(trace, scenario, now)}
    assert set(found) == {"link", "device memory", "RAM rate", "CPU cores", "drafting"}
    assert found["device memory"].change == "vram_gb=6"
    for upgrade in found.values():
        assert upgrade.saved_ms == pytest.approx(now - upgrade.answer["tpot_ms"])
    saved = [upgrade.saved_ms for upgrade in upgrades(trace, scenario, now)]
    assert saved == sorted(saved, reverse=True)


def test_the_command_writes_tables_and_a_picture(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "t.parquet")
    arguments = ["whatif", str(tmp_path / "t.parquet"), "--set", "hardware=rtx3060-pcie4x16", "--set", "vram_gb=3"]
    arguments += ["--sweep", "link=pcie3x16,pcie4x16", "--explain"]
    outputs = {name: tmp_path / f"out.{name}" for name in ("csv", "parquet")}
    more = [item for name, path in outputs.items() for item in (f"--{name}", str(path))]
    result = CliRunner().invoke(
        app, [*arguments, *more, "--plot", str(tmp_path / "p.html"), "--json"], catch_exceptions=False
    )
    points = json.loads(result.stdout)["points"]
    assert [point["link"] for point in points] == ["pcie3x16", "pcie4x16"]
    assert points[0]["upgrades"][0]["saved_ms"] >= points[0]["upgrades"][-1]["saved_ms"]
    rows = list(csv.DictReader(outputs["csv"].read_text().splitlines()))
    assert [float(row["tpot_ms"]) for row in rows] == [point["tpot_ms"] for point in points]
    assert pq.read_table(outputs["parquet"]).column("tokens_per_s").to_pylist() == [p["tokens_per_s"] for p in points]
    assert "plotly" in (tmp_path / "p.html").read_text()
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "limit" in shown and "next: moe-studio tune" in shown
    assert "a faster CPU or RAM would change nothing" in shown
    names = [*arguments, "--sweep", "vram_gb=3", "--sweep", "config.cache.policy=lru", "--sweep", "strategy=lfu"]
    narrow = CliRunner().invoke(
        app, [*names, "--sweep", "prefetch=none"], env={"COLUMNS": "40"}, catch_exceptions=False
    )
    assert "config.cache.policy" in narrow.stdout and "\u2026" not in narrow.stdout
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        CliRunner().invoke(app, [*arguments, "--set", "gpu"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="unknown gpu 'rtx9999'"):
        CliRunner().invoke(app, [*arguments, "--set", "gpu=rtx9999"], catch_exceptions=False)


def test_the_figure_has_a_line_per_combination_and_says_when_there_is_none() -> None:
    rows = [
        {
            "vram_gb": size,
            "link": link,
            "tpot_ms": 10.0 + place,
            "tpot_low_ms": 9.0,
            "tpot_high_ms": 12.0,
            "bound_ms": 5,
        }
        for place, (size, link) in enumerate((s, li) for s in ("8", "12") for li in ("a", "b"))
    ]
    figure = sweep_figure(rows, ["vram_gb", "link"])
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert [line.name for line in lines] == ["vram_gb 8", "vram_gb 12"]
    assert list(lines[1].x) == ["a", "b"] and list(lines[1].y) == [12.0, 13.0]
    assert list(lines[0].error_y.array) == [2.0, 1.0]
    nothing = sweep_figure([{"link": "a", "error": "does not fit"}], ["link"])
    assert "does not fit" in nothing.layout.annotations[0].text
