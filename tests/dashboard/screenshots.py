"""Makes the screenshots of the docs: every page of the dashboard, light and dark, at 1280 and 390 pixels.

    python -m tests.dashboard.screenshots studio-demo screenshots

The first argument is a folder such as `moe-studio demo` fills, the second where the images go.
"""

from __future__ import annotations

import argparse
import shutil
import threading
from pathlib import Path
from typing import Any

from dashboard.app import PAGES
from dashboard.server import bind_server

SCHEMES = ("light", "dark")
WIDTHS = (1280, 390)
SETTLE_MS = 400
"""Until figures have taken a new width."""


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
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(SETTLE_MS)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
            made.append(out / f"{name}-{scheme}-{width}.png")
            page.screenshot(path=made[-1], full_page=True)
        page.locator("#scheme-switch").click()
    return made


def main() -> None:
    """Serve the folder, visit every page, print the images."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    server = bind_server(asked.folder, port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        for place in PAGES:
            page = chromium.new_page(viewport={"width": WIDTHS[0], "height": 900}, color_scheme=SCHEMES[0])
            page.goto(f"http://127.0.0.1:{server.port}{place.path}?theme={SCHEMES[0]}")
            page.wait_for_selector("#page h1")
            page.wait_for_load_state("networkidle")
            for path in shoot(page, place.title.lower(), asked.out):
                print(path)
            page.close()
        chromium.close()
    server.shutdown()


if __name__ == "__main__":
    main()
