"""Makes screenshots of the dashboard's pages.

    python -m tests.dashboard.screenshots studio-demo screenshots
    python -m tests.dashboard.screenshots studio-demo docs/dashboard --docs

The first argument is a folder such as `moe-studio demo` fills, the second where the images go: every page, light and
dark, at 1280 and 390 pixels; or, with `--docs`, the pictures of `docs/dashboard.md`, one per page and small.
"""

from __future__ import annotations

import argparse
import io
import shutil
import threading
from pathlib import Path
from typing import Any

from dashboard.app import PAGES
from dashboard.server import bind_server

SCHEMES = ("light", "dark")
WIDTHS = (1280, 390)
_SETTLED = """new Promise((done, fail) => {
    const begin = performance.now();
    const fits = figure =>
        Math.abs(figure.querySelector('.main-svg')?.getBoundingClientRect().width - figure.clientWidth) < 2;
    const all = selector => [...document.querySelectorAll(selector)];
    const look = () => {
        const loading = document.querySelector('[data-dash-is-loading=true]');
        if (!loading && all('.dash-graph').every(graph => graph.offsetHeight && graph.querySelector('.main-svg'))
            && all('.js-plotly-plot').filter(figure => figure.offsetParent).every(fits)
            && all('.ag-root-wrapper').every(grid => grid.querySelector('.ag-header-cell'))) done();
        else if (performance.now() - begin > 90000) fail(new Error('figures and tables do not take their places'));
        else requestAnimationFrame(look);
    };
    requestAnimationFrame(() => requestAnimationFrame(look));
})"""
PATIENCE_MS = 300_000
DRAWN = {
    "Overview": "#overview-comparison .barlayer .point",
    "Routing": "#routing-load .heatmaplayer image",
    "Timeline": "#timeline-figure .barlayer .point",
    "What-if": "#whatif-figure .barlayer .point",
    "Tune": "#tune-start",
    "Export": "#export-command",
    "Validation": "#validation-errors .scatterlayer .point",
}
"""Per page, what there is once it has drawn its figures."""
ADDRESSES = {
    "Routing": "layer=4",
    "Timeline": "run=3-lru-cache-prefetch.measured",
    "What-if": "strategy=lfu&pins=gamma=0~strategy=s3-fifo~prefetch=quasi-hidden",
    "Tune": "trials=20&pools=layer",
    "Export": "config=tuned.toml&target=llama.cpp&hardware=rtx4090-pcie4x16",
    "Validation": "record=@published",
}
"""What the pictures of the docs show, as the pages' own addresses say it."""
DOCS_HEIGHT = 1400
DOCS_COLOURS = 256


def settle(page: Any, width: int, height: int = 900) -> None:
    """Give a page a size, and wait until its figures have taken it."""
    page.set_viewport_size({"width": width, "height": height})
    page.evaluate(_SETTLED)


def shoot(page: Any, name: str, out: Path) -> list[Path]:
    """Images of an open page in both schemes and widths; it begins in the first scheme.

    Args:
        page: of Playwright.
        name: begin of the file names.
        out: an existing folder.
    """
    made = []
    for scheme in SCHEMES:
        page.wait_for_selector(f"html[data-mantine-color-scheme={scheme}]", state="attached")
        for width in WIDTHS:
            settle(page, width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
            made.append(out / f"{name}-{scheme}-{width}.png")
            page.screenshot(path=made[-1], full_page=True)
        page.locator("#scheme-switch").click()
    return made


def shoot_for_docs(page: Any, title: str, out: Path) -> Path:
    """The upper part of an open page in few colours; a search is run first where the page has one."""
    from PIL import Image

    if title == "Tune":
        page.get_by_role("button", name="Start").click()
        page.wait_for_selector("#tune-front .scatterlayer .point", state="attached", timeout=PATIENCE_MS)
    height = min(DOCS_HEIGHT, page.evaluate("document.querySelector('#page').getBoundingClientRect().bottom"))
    settle(page, WIDTHS[0], int(height))
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = out / f"{title.lower()}.png"
    picture.quantize(DOCS_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def main() -> None:
    """Serve the folder, visit every page, print the images."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--docs", action="store_true", help="the pictures of docs/dashboard.md")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    server = bind_server(asked.folder, port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        for place in PAGES:
            page = chromium.new_page(viewport={"width": WIDTHS[0], "height": 900}, color_scheme=SCHEMES[0])
            shown = ADDRESSES.get(place.title, "") if asked.docs else ""
            page.goto(f"http://127.0.0.1:{server.port}{place.path}?theme={SCHEMES[0]}&{shown}")
            page.wait_for_selector(DRAWN[place.title], state="attached", timeout=PATIENCE_MS)
            if asked.docs:
                print(shoot_for_docs(page, place.title, asked.out))
            else:
                print(*shoot(page, place.title.lower(), asked.out), sep="\n")
            page.close()
        chromium.close()
    server.shutdown()


if __name__ == "__main__":
    main()
