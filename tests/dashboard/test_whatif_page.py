"""The what-if page: set-ups as text, answers as rows and figures, and the page itself in a real Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboard.data import Workspace
from dashboard.setups import (
    MAX_SETUPS,
    choices,
    chosen,
    parse_setup,
    parse_setups,
    scenario_of,
    setup_text,
    setups_text,
    title,
)
from dashboard.texts import format_ms
from dashboard.whatif_figures import setups_figure
from dashboard.whatif_view import setup_rows
from simulator.sweep import answer


def test_setups_survive_the_address_and_nothing_that_is_not_offered_does(folder: Path) -> None:
    snapshot = Workspace(folder).read()
    offered = choices(snapshot, snapshot.trace)
    values = {"gpu": "rtx3060", "strategy": "lfu", "vram_gb": 12, "gamma": 4, "acceptance": 0.7, "link": "as it is"}
    picked = chosen(values, offered)
    assert picked == {"gpu": "rtx3060", "strategy": "lfu", "vram_gb": "12", "gamma": "4"}
    assert parse_setup(setup_text(picked), offered) == picked
    assert parse_setups(setups_text([picked, {}]), offered)[0] == picked
    assert len(parse_setups(setups_text([picked] * 9), offered)) == MAX_SETUPS - 1
    evil = "gpu=/etc/passwd;hardware=../secret.toml;strategy=os.system;vram_gb=1e99;nonsense=1;link=pcie4x16"
    assert parse_setup(evil, offered) == {"link": "pcie4x16"}
    assert "acceptance" not in chosen({"gamma": 0, "acceptance": 0.3}, offered)
    assert title({}) == "as it is" and title({"vram_gb": "12"}) == "vram 12"


def test_a_setup_is_the_scenario_that_the_library_answers(folder: Path) -> None:
    snapshot = Workspace(folder).read()
    offered = choices(snapshot, snapshot.trace)
    assert offered[0].default == "hardware.toml (this folder)"
    own = scenario_of({}, offered, snapshot)
    assert own.hardware == str(folder / "hardware.toml") and own.budget_ratio == 0.5
    shipped = scenario_of({"hardware": "rtx3060-pcie4x16", "vram_gb": "8"}, offered, snapshot)
    assert shipped.hardware == "rtx3060-pcie4x16" and shipped.vram_gb == 8 and shipped.budget_ratio is None


def test_rows_and_figure_have_the_answers_numbers(folder: Path) -> None:
    snapshot = Workspace(folder).read()
    offered = choices(snapshot, snapshot.trace)
    setups = [{}, {"hardware": "rtx3060-pcie4x16"}, {"hardware": "rtx3060-pcie4x16", "vram_gb": "0.1"}]
    answers = [answer(snapshot.trace, scenario_of(one, offered, snapshot)) for one in setups]
    rows = setup_rows([title(one) for one in setups], answers)
    assert rows[0].tpot_ms == answers[0]["tpot_ms"] and sum(rows[0].parts_ms.values()) == pytest.approx(rows[0].tpot_ms)
    assert format_ms(answers[0]["tpot_ms"]) in rows[0].headline and "emulated" in rows[0].headline
    assert rows[2].tpot_ms is None and "does not fit" in rows[2].sentence
    figure = setups_figure(rows)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [sum(bar.x[place] for bar in bars) for place in (0, 1)] == pytest.approx([rows[0].tpot_ms, rows[1].tpot_ms])
    band = next(trace for trace in figure.data if "band" in trace.name)
    assert band.x[1] + band.error_x.array[1] == pytest.approx(rows[1].high_ms)
    assert "(ms)" in figure.layout.xaxis.title.text and "emulated" in figure.layout.xaxis.title.text
    assert "does not fit" in setups_figure(rows[2:]).layout.annotations[0].text
    assert "drop one" in setups_figure([]).layout.annotations[0].text.replace("<br>", " ")


@pytest.mark.browser
def test_a_change_is_simulated_kept_and_shared(visit, address: str, folder: Path, screenshots: Path) -> None:
    snapshot = Workspace(folder).read()
    offered = choices(snapshot, snapshot.trace)

    def expected(values: dict[str, str]) -> str:
        return format_ms(answer(snapshot.trace, scenario_of(values, offered, snapshot))["tpot_ms"])

    bars = "#whatif-figure .barlayer .point"
    with visit(f"{address}/whatif", bars) as page:
        page.wait_for_selector(f"#whatif-value:has-text('{expected({})}')")
        page.get_by_role("button", name="Keep for comparison").click()
        page.locator("#whatif-link").click()
        page.get_by_role("option", name="pcie3x4", exact=True).click()
        page.wait_for_selector(f"#whatif-value:has-text('{expected({'link': 'pcie3x4'})}')")
        page.wait_for_selector("#whatif-table [col-id=setup]:has-text('as it is')")
        assert page.locator("#whatif-table .ag-center-cols-container [role=row]").count() == 2
        assert "link=pcie3x4" in page.url and "pins=" in page.url
        shared = page.url
        page.screenshot(path=screenshots / "whatif-1280-light.png", full_page=True)
    with visit(shared, bars, width=390, scheme="dark") as page:
        page.wait_for_selector(f"#whatif-value:has-text('{expected({'link': 'pcie3x4'})}')")
        assert page.locator("#whatif-link").input_value() == "pcie3x4"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.screenshot(path=screenshots / "whatif-390-dark.png", full_page=True)
