"""The shell, the overview and the report in a real Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboard.app import PAGES
from dashboard.report import write_report
from dashboard.texts import format_number
from tests.dashboard.screenshots import DRAWN, WIDTHS, settle, shoot
from trace_capture.run import Run

pytestmark = pytest.mark.browser

Visit = Callable[..., object]


def test_the_overview_shows_the_measured_numbers_and_sorts_files(visit, address: str, folder: Path) -> None:
    with visit(f"{address}/", DRAWN["Overview"]) as page:
        assert page.title() == "Overview · MoE Offload Studio"
        for label, name in (("on-demand", "on-demand"), ("tuned", "tuned"), ("LRU, half of the experts", "lru")):
            expected = Run.load(folder / f"{name}-measured.run.json").metrics.tpot_ms
            row = page.locator("#overview-table tbody tr").filter(has_text=label)
            cell = row.locator("td").nth(3)
            assert cell.inner_text() == format_number(expected)
            assert float(cell.get_attribute("data-value")) == expected
            assert "emulated link" in row.inner_text()
        cells = "#overview-files .ag-center-cols-container [col-id=tpot_ms]"
        page.wait_for_selector(cells, state="attached")
        page.locator("#overview-files .ag-header-cell[col-id=tpot_ms] .ag-header-cell-text").click()
        page.locator("#overview-files .ag-header-cell[col-id=tpot_ms] .ag-header-cell-text").click()
        slowest = max(Run.load(path).metrics.tpot_ms for path in folder.glob("*.run.json"))
        page.wait_for_function(
            "([cells, text]) => document.querySelectorAll('#overview-files [row-index=\"0\"] [col-id=tpot_ms]')[0]"
            "?.innerText === text",
            arg=[cells, f"{slowest:.2f}"],
        )


@pytest.mark.parametrize("title", [page.title for page in PAGES])
def test_looks(visit, address: str, screenshots: Path, title: str) -> None:
    path = next(page.path for page in PAGES if page.title == title)
    with visit(f"{address}{path}", DRAWN[title]) as page:
        assert page.locator("h1").inner_text() == title
        unnamed = "[...document.querySelectorAll('#page input, #page button, #page [role=slider]')].filter(e => "
        unnamed += "e.offsetParent && !(e.ariaLabel || e.labels?.length || e.innerText || e.title || "
        unnamed += "e.getAttribute('aria-labelledby') || ['hidden', 'file'].includes(e.type))).map(e => e.outerHTML)"
        assert page.evaluate(unnamed) == []
        assert {path.name for path in shoot(page, title.lower(), screenshots)} == {
            f"{title.lower()}-{scheme}-{width}.png" for scheme in ("light", "dark") for width in (1280, 390)
        }


def test_navigation_by_keyboard_keeps_what_pages_share(visit, address: str) -> None:
    with visit(f"{address}/?trace=trace.parquet&theme=dark", DRAWN["Overview"]) as page:
        assert page.locator("html").get_attribute("data-mantine-color-scheme") == "dark"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.innerText") == "Skip to content"
        page.locator("#shell-link-overview").focus()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector(DRAWN["Routing"], state="attached")
        assert page.url == f"{address}/routing?trace=trace.parquet&theme=dark"
        assert page.locator("[aria-current=page]").inner_text() == "Routing"
        assert page.title() == "Routing · MoE Offload Studio"
        page.go_back()
        page.wait_for_selector(DRAWN["Overview"], state="attached")


def test_the_menu_of_a_narrow_screen(visit, address: str) -> None:
    with visit(f"{address}/", DRAWN["Overview"], width=390) as page:
        link = page.locator("#shell-link-timeline")
        assert not link.is_visible()
        page.get_by_role("button", name="Pages").click()
        link.wait_for(state="visible")
        link.click()
        page.wait_for_selector(DRAWN["Timeline"], state="attached")
        link.wait_for(state="hidden")


def test_the_switch_turns_dark_and_stays_dark(visit, address: str) -> None:
    with visit(f"{address}/routing", DRAWN["Routing"]) as page:
        ink = "document.querySelector('#routing-load .xtick text').style.fill"
        light = page.evaluate(ink)
        page.get_by_role("button", name="Switch between light and dark").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("html[data-mantine-color-scheme=dark]", state="attached")
        page.wait_for_function(f"light => {ink} !== light", arg=light)
        assert "theme=dark" in page.url
        page.goto(f"{address}/")
        page.wait_for_selector(DRAWN["Overview"], state="attached")
        page.wait_for_selector("html[data-mantine-color-scheme=dark][data-ag-theme-mode=dark]", state="attached")


def test_an_empty_and_a_damaged_folder(visit, serving, tmp_path: Path, screenshots: Path) -> None:
    (tmp_path / "bad.run.json").write_text("{", encoding="utf-8")
    with serving(tmp_path) as address:
        with visit(f"{address}/", "#overview-terms .annotation-text") as page:
            assert "bad.run.json is not a run record" in page.locator("#page").inner_text()
            assert "moe-studio" in page.locator("#overview-comparison .annotation-text").text_content()
            page.screenshot(path=screenshots / "overview-empty.png", full_page=True)
            for link, figure in (("routing", "#routing-load"), ("timeline", "#timeline-figure")):
                page.locator(f"#shell-link-{link}").click()
                page.wait_for_selector(f"{figure} .annotation-text", state="attached")
                assert "moe-studio" in page.locator(f"{figure} .annotation-text").text_content()


def test_a_dropped_trace_is_checked_and_taken_in(visit, serving, folder: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 nothing")
    good = tmp_path / "mine.parquet"
    shutil.copy(folder / "trace.parquet", good)
    with serving(inside) as address, visit(f"{address}/", "#overview-upload input") as page:
        page.set_input_files("#overview-upload input", bad)
        page.wait_for_selector("#overview-upload-note >> text=bad.parquet was not taken in")
        assert not list(inside.iterdir())
        page.set_input_files("#overview-upload input", good)
        page.wait_for_selector("#overview-upload-note >> text=mine.parquet is in the folder now: 54 tokens of tiny-moe")
        page.wait_for_selector("#overview-files [col-id=name]:has-text('mine.parquet')")
        assert (inside / "mine.parquet").read_bytes() == good.read_bytes()
        page.get_by_role("link", name="Look at its routing").click()
        page.wait_for_selector(DRAWN["Routing"], state="attached")
        assert page.locator("#routing-trace").input_value() == "mine.parquet"


def test_the_report_opens_by_double_click(visit, folder: Path, tmp_path: Path, screenshots: Path) -> None:
    out = write_report(folder, tmp_path / "report.html")
    with visit(out.as_uri(), "#figure-timeline-1 .barlayer .point") as page:
        assert page.locator(".js-plotly-plot .main-svg").count() >= 5
        expected = Run.load(folder / "tuned-measured.run.json").metrics.tpot_ms
        row = page.locator("#comparison tbody tr").filter(has_text=re.compile("^tuned"))
        assert float(row.locator("td").nth(3).get_attribute("data-value")) == expected
        for width in WIDTHS:
            settle(page, width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.screenshot(path=screenshots / f"report-{width}.png", full_page=True)
