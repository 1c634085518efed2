"""The report: one file, the runs' own numbers, nothing loaded from anywhere, nothing taken for HTML."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dashboard.data import Workspace
from dashboard.report import report_html, timeline_runs, write_report
from trace_capture.errors import StudioError
from trace_capture.files import file_digest
from trace_capture.run import Run

LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Page(HTMLParser):
    """What a report holds: tags, texts, the cells of the comparison, and everything a browser would fetch."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[str | None]] = []
        self.texts: list[str] = []
        self.tags: list[str] = []
        self._stack: list[str] = []
        self._in_table = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self._stack.append(tag)
        self.ids.append(values.get("id") or "")
        if tag in LOADS and values.get(LOADS[tag]):
            self.fetched.append(values[LOADS[tag]] or "")
        if tag == "table":
            self._in_table = values.get("id") == "comparison"
        if tag == "tr" and self._in_table:
            self.rows.append([])
        if tag == "td" and self._in_table:
            self.rows[-1].append(values.get("data-value"))

    def handle_data(self, data: str) -> None:
        if self._stack and self._stack[-1] not in ("script", "style"):
            self.texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._stack:
            while self._stack.pop() != tag:
                pass

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(scope="module")
def page(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    out = tmp_path_factory.mktemp("out") / "deep" / "report.html"
    assert write_report(folder, out) == out
    return Page(out.read_text(encoding="utf-8"))


def test_the_table_has_the_numbers_of_the_runs(page: Page, folder: Path) -> None:
    body = [row for row in page.rows if row]
    assert len(body) == 3
    for row, name in zip(body, ("tuned", "lru", "on-demand"), strict=True):
        predicted = Run.load(folder / f"{name}-predicted.run.json").metrics
        measured = Run.load(folder / f"{name}-measured.run.json").metrics
        numbers = [None if value is None else float(value) for value in row]
        assert numbers[1] == predicted.tpot_ms and numbers[3] == measured.tpot_ms
        assert numbers[2] == pytest.approx(0.1)
        assert numbers[4] == pytest.approx(predicted.tpot_ms / measured.tpot_ms - 1)
        assert numbers[5:9] == [
            predicted.decode_hit_rate, measured.decode_hit_rate, predicted.bytes_per_token, measured.bytes_per_token,
        ]  # fmt: skip
    assert f"{float(body[0][3] or 0):.2f}" in page.texts


def test_nothing_is_loaded_from_anywhere(page: Page, folder: Path) -> None:
    assert [target for target in page.fetched if not target.startswith("data:")] == []
    html = report_html(Workspace(folder).read())
    head = html[: html.index("<script>")]
    assert "default-src 'none'" in head
    assert not re.search(r"@import|url\(", head)
    assert html.count("plotly.js v") == 1


def test_all_figures_are_there(page: Page) -> None:
    for name in (
        "comparison", "terms", "load", "timeline-0", "timeline-1", "entropy", "strip", "hits", "reuse", "recall",
        "pairs", "validation-0", "errors-0", "validation-1", "errors-1",
    ):  # fmt: skip
        assert page.ids.count(f"figure-{name}") == 1
    assert "3 pairs of predicted and measured time per token" in page.text
    assert "Validation: published measurements by others" in page.text


def test_provenance_and_emulation_are_stated(page: Page, folder: Path) -> None:
    assert "emulated link" in page.text
    assert "Copies were paced by software" in page.text
    for name in ("tuned-measured.run.json", "trace.parquet", "hardware.toml", "tuned.toml"):
        assert file_digest(folder / name) in page.text
    assert Workspace(folder).read().trace.digest in page.text  # type: ignore[union-attr]
    assert "moe-studio 0.1.0" in page.text


def test_both_sides_of_the_fastest_strategy_are_shown(folder: Path) -> None:
    assert [item.name for item in timeline_runs(Workspace(folder).read())] == ["tuned-measured", "tuned-predicted"]


def test_an_empty_folder_gives_a_report_that_says_what_to_do(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "moe-studio tune" in page.text and "table" in page.tags and page.rows == []
    assert "emulated" not in page.text


def test_texts_from_files_are_never_html(folder: Path, tmp_path: Path, make_run: Callable[..., Run]) -> None:
    evil = "</script><script>alert(1)</script><img src=http://evil.example/x>"
    make_run(evil).save(tmp_path, "evil")
    make_run(evil, "measured").save(tmp_path, "<b>name")
    (tmp_path / "tuned.toml").write_text(f"# {evil}", encoding="utf-8")
    (tmp_path / "broken<i>.run.json").write_text(evil, encoding="utf-8")
    shutil.copy(folder / "trace.parquet", tmp_path)
    html = report_html(Workspace(tmp_path).read())
    page = Page(html)
    plain = Page(report_html(Workspace(folder).read()))
    assert "img" not in page.tags and "i" not in page.tags and "b" not in page.tags
    assert page.tags.count("script") == plain.tags.count("script")
    assert "<script>alert" not in html
    assert evil in page.text


def test_a_place_that_cannot_be_written_is_a_studio_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StudioError):
        write_report(folder, tmp_path / "file" / "report.html")
    with pytest.raises(StudioError):
        write_report(tmp_path / "absent", tmp_path / "report.html")
