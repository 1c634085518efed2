"""The application and the report in a real Chromium.

Screenshots go to the folder named by MOE_STUDIO_SCREENSHOTS, else to pytest's temporary folder; the path is printed.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboard.app import bind_server
from dashboard.report import write_report
from dashboard.texts import format_number
from trace_capture.run import Run

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
BAR = "#overview-timeline .barlayer .point"


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        reason = "no Chromium found; install it with 'apt-get install chromium'"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    if os.environ.get("CI") != "true":
        pytest.importorskip("playwright.sync_api", reason="playwright is not installed; it is in the extra 'test'")
    from playwright import sync_api as playwright

    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("MOE_STUDIO_SCREENSHOTS")
    place = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    place.mkdir(parents=True, exist_ok=True)
    print(f"screenshots: {place}")
    return place


def serve_in_thread(folder: Path) -> Iterator[str]:
    server = bind_server(folder, port=0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    yield from serve_in_thread(folder)


class Visit:
    """A page that was opened, with everything that went wrong on it."""

    def __init__(self, browser, address: str, *, width: int = 1280, scheme: str = "light", wait_for: str = BAR) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("response", lambda r: self.complaints.append(f"{r.status} {r.url}") if r.status >= 400 else None)
        home = address.split("?")[0]
        self.page.on(
            "request",
            lambda r: None if r.url.startswith((home, "data:", "blob:", "file:")) else self.foreign.append(r.url),
        )
        self.page.goto(address)
        self.page.wait_for_selector(wait_for, state="attached", timeout=30_000)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert self.complaints == [] and self.foreign == []

    def bars(self) -> int:
        return self.page.locator(BAR).count()

    def wait_until_bars_differ(self, before: int) -> None:
        self.page.wait_for_function(
            "([selector, before]) => document.querySelectorAll(selector).length !== before", arg=[BAR, before]
        )


def test_the_page_shows_the_measured_numbers(browser, address: str, folder: Path) -> None:
    with Visit(browser, address) as visit:
        assert visit.page.title() == "MoE Offload Studio"
        for label, name in (("on-demand", "on-demand"), ("tuned", "tuned"), ("LRU, half of the experts", "lru")):
            expected = Run.load(folder / f"{name}-measured.run.json").metrics.tpot_ms
            row = visit.page.locator("#overview-table tbody tr").filter(has_text=label)
            cell = row.locator("td").nth(3)
            assert cell.inner_text() == format_number(expected)
            assert float(cell.get_attribute("data-value")) == expected
            assert "emulated link" in row.inner_text()
        assert visit.page.locator(".js-plotly-plot").count() == 5
        assert visit.page.locator("#overview-load .heatmaplayer image").count() == 1


def test_the_controls_change_the_figures_and_the_address(browser, address: str) -> None:
    with Visit(browser, address) as visit:
        page = visit.page
        before = visit.bars()
        page.get_by_role("slider", name="Last pass").focus()
        for _ in range(4):
            page.keyboard.press("ArrowRight")
        visit.wait_until_bars_differ(before)
        page.wait_for_function("document.querySelector('#overview-timeline-note').innerText.includes('Passes 1 to 7')")
        assert "to=7" in page.url
        before = visit.bars()
        page.locator("#overview-run").click()
        page.get_by_role("option", name="on-demand, predicted (emulated link)").click()
        visit.wait_until_bars_differ(before)
        assert "run=on-demand-predicted" in page.url
        note = page.locator("#overview-load-note").inner_text()
        page.get_by_text("prefill", exact=True).click()
        page.wait_for_function("before => document.querySelector('#overview-load-note').innerText !== before", arg=note)
        page.locator("#overview-layer").click()
        page.get_by_role("option", name="layer 4").click()
        page.wait_for_selector("#overview-layer-load text:has-text('expert of decoder layer 4')")
        shown = page.url
    with Visit(browser, shown) as visit:
        assert visit.page.locator("#overview-run").input_value() == "on-demand, predicted (emulated link)"
        assert visit.page.locator("#overview-layer").input_value() == "layer 4"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_looks(browser, address: str, screenshots: Path, scheme: str, width: int) -> None:
    with Visit(browser, address, width=width, scheme=scheme) as visit:
        page = visit.page
        assert page.locator("html").get_attribute("data-mantine-color-scheme") == scheme
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.wait_for_timeout(500)
        page.screenshot(path=screenshots / f"overview-{scheme}-{width}.png", full_page=True)


def test_the_switch_turns_dark_and_stays_dark(browser, address: str) -> None:
    with Visit(browser, address) as visit:
        page = visit.page
        ink = "document.querySelector('#overview-load .xtick text').style.fill"
        light = page.evaluate(ink)
        page.get_by_role("button", name="Switch between light and dark").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("html[data-mantine-color-scheme=dark]", state="attached")
        page.wait_for_function(f"light => {ink} !== light", arg=light)
        page.reload()
        page.wait_for_selector(BAR, state="attached")
        page.wait_for_selector("html[data-mantine-color-scheme=dark]", state="attached")


def test_an_empty_and_a_damaged_folder(browser, tmp_path: Path, screenshots: Path) -> None:
    (tmp_path / "bad.run.json").write_text("{", encoding="utf-8")
    for address in serve_in_thread(tmp_path):
        with Visit(browser, address, wait_for="#overview-timeline .annotation-text") as visit:
            text = visit.page.locator("#page").inner_text()
            assert "bad.run.json is not a run record" in text
            assert "moe-studio" in visit.page.locator("#overview-comparison .annotation-text").text_content()
            visit.page.screenshot(path=screenshots / "overview-empty.png", full_page=True)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_opens_by_double_click(browser, folder: Path, tmp_path: Path, screenshots: Path, width: int) -> None:
    out = write_report(folder, tmp_path / "report.html")
    with Visit(browser, out.as_uri(), width=width, wait_for="#figure-timeline-1 .barlayer .point") as visit:
        page = visit.page
        assert page.locator(".js-plotly-plot .main-svg").count() >= 5
        expected = Run.load(folder / "tuned-measured.run.json").metrics.tpot_ms
        row = page.locator("#comparison tbody tr").filter(has_text="tuned")
        assert float(row.locator("td").nth(3).get_attribute("data-value")) == expected
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=screenshots / f"report-{width}.png", full_page=True)
