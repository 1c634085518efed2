"""The tune page in a real Chromium: what it finds, keeps and stops."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dashboard.texts import format_ms
from dashboard.tune_view import budget_bytes
from simulator.config_file import load_config
from simulator.policies.config import DeviceConfig
from simulator.tune import TuneOptions, tune
from tests.dashboard.screenshots import shoot
from trace_capture.hardware import HardwareProfile
from trace_capture.trace import Trace

pytestmark = pytest.mark.browser

Visit = Callable[..., object]


def workers() -> set[psutil.Process]:
    """Processes that this one started and that still run: the browser's, and those of background jobs."""
    return {one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE}


def ended(jobs: set[psutil.Process]) -> bool:
    """Whether all of them end, which a slow machine is given a minute for."""
    _, alive = psutil.wait_procs(jobs, timeout=60)
    return all(one.status() == psutil.STATUS_ZOMBIE for one in alive)


@pytest.fixture
def inside(folder: Path, tmp_path: Path) -> Path:
    """A folder of this test's own, since it saves into it."""
    for name in ("trace.parquet", "hardware.toml", "tuned.toml"):
        shutil.copy(folder / name, tmp_path / name)
    return tmp_path


def test_what_is_found_is_what_the_library_finds(visit, serving, inside: Path, screenshots: Path) -> None:
    trace, machine = Trace.load(inside / "trace.parquet"), HardwareProfile.load(inside / "hardware.toml")
    budget, device = budget_bytes(trace.shape, 40), DeviceConfig.for_machine(machine)
    expected = tune(trace, machine, budget_bytes=budget, device=device)
    with serving(inside) as address, visit(f"{address}/tune?budget=40&trials=0", "#tune-start") as page:
        page.get_by_role("button", name="Start").press("Enter")
        value = page.locator("#tune-chosen")
        value.wait_for()
        assert value.inner_text() == expected.config.title
        assert float(value.get_attribute("data-value")) == expected.chosen.metrics.tpot_ms
        sentence = page.locator("#tune-sentence").inner_text()
        assert format_ms(expected.baseline.metrics.tpot_ms) in sentence and format_ms(expected.regret_ms) in sentence
        fastest = f"{expected.candidates[0].train_tpot_ms:.3f}"
        page.wait_for_selector(f"#tune-candidates [row-index='0'] [col-id=tpot_ms]:has-text('{fastest}')")
        page.wait_for_selector("#tune-slots .barlayer .point", state="attached")
        page.wait_for_selector("#tune-front .scatterlayer .point", state="attached")
        shoot(page, "tune-result", screenshots)
        page.get_by_label("Save as").fill("tuned.toml")
        page.get_by_role("button", name="Save").click()
        page.wait_for_selector("#tune-saved >> text=tuned.toml is here already")
        page.get_by_label("Save as").fill("found.toml")
        page.get_by_role("button", name="Save").click()
        page.get_by_role("link", name="Export it").wait_for()
        assert load_config(inside / "found.toml") == expected.config
        page.reload()
        value.wait_for()
        assert page.locator("#tune-budget").input_value() == "40"
        page.get_by_label("Save as").fill("more.toml")


def test_one_pool_and_drafts_are_tried_where_asked_for(visit, serving, inside: Path) -> None:
    trace, machine = Trace.load(inside / "trace.parquet"), HardwareProfile.load(inside / "hardware.toml")
    asked = {"device": DeviceConfig.for_machine(machine), "options": TuneOptions(trials=8, drafts=2)}
    expected = tune(trace, machine, budget_bytes=budget_bytes(trace.shape, 40), scopes=("layer", "global"), **asked)
    assert expected.config.cache.scope == "global"
    place = "tune?budget=40&trials=8&pools=both&drafts=2"
    with serving(inside) as address, visit(f"{address}/{place}", "#tune-start") as page:
        page.get_by_role("button", name="Start").click()
        page.locator("#tune-chosen").wait_for()
        assert page.locator("#tune-chosen").inner_text() == expected.config.title
        assert f"of {len(expected.candidates)} configurations" in page.locator("#tune-view").inner_text()
        page.wait_for_selector("#tune-slots .annotation-text", state="attached")
        assert "All layers share one pool" in page.locator("#tune-slots .annotation-text").text_content()


def test_a_search_tells_how_long_it_takes_and_stops(visit, serving, inside: Path) -> None:
    with serving(inside) as address, visit(f"{address}/tune?trials=5000", "#tune-start") as page:
        others = workers()
        page.get_by_role("button", name="Start").click()
        page.wait_for_selector("#tune-progress-text:has-text('left')")
        assert page.locator("#tune-start").is_disabled()
        first = workers() - others
        assert first
        page.get_by_role("button", name="Stop").click()
        page.wait_for_selector("#tune-status:has-text('Stopped at')")
        assert re.search(r"\d+ of [\d,]+ simulations", page.locator("#tune-status").inner_text())
        page.locator("#tune-job").wait_for(state="hidden")
        assert page.locator("#tune-start").is_enabled()
        assert ended(first)
        assert page.locator("#tune-chosen").count() == 0
        page.get_by_role("button", name="Start").click()
        page.wait_for_selector("#tune-progress-text:has-text('left')")
        second = workers() - others
        assert second and page.locator("#tune-status").inner_text() == ""
        page.locator("#shell-link-overview").click()
        page.wait_for_selector("#overview-files")
        assert ended(second)


def test_a_budget_that_is_too_small_and_a_folder_without_a_trace(visit, serving, address: str, tmp_path: Path) -> None:
    with visit(f"{address}/tune?budget=3&trials=0", "#tune-start") as page:
        page.wait_for_selector("#tune-budget-note:has-text('top-2 needs 12.5 %')")
        page.get_by_role("button", name="Start").click()
        page.wait_for_selector("#tune-view >> text=cannot hold the top-2 experts")
    with serving(tmp_path) as empty, visit(f"{empty}/tune", "#tune-start") as page:
        assert page.locator("#tune-start").is_disabled()
        assert "There is no trace in this folder" in page.locator("#page").inner_text()
