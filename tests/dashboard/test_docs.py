"""The tour of the dashboard in the docs has a picture of every page, made by the command it names."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from dashboard.app import PAGES
from tests.dashboard.screenshots import WIDTHS

DOCS = Path(__file__).parents[2] / "docs"
MOST_BYTES = 1_500_000


def test_every_page_has_its_picture() -> None:
    text = (DOCS / "dashboard.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [page.title for page in PAGES]
    assert "python -m tests.dashboard.screenshots studio-demo docs/dashboard --docs" in text
    pictures = [DOCS / name for name in re.findall(r"!\[.+?\]\((.+?)\)", text)]
    assert set(pictures) == set((DOCS / "dashboard").iterdir()) and len(pictures) == len(PAGES)
    contents = [path.read_bytes() for path in pictures]
    assert sum(map(len, contents)) < MOST_BYTES
    assert {struct.unpack(">8s4x4sI", content[:20])[1:] for content in contents} == {(b"IHDR", WIDTHS[0])}
