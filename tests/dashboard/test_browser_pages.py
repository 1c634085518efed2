"""Routing, timeline and validation in a real Chromium: interact, and compare what is shown with the library."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest

from dashboard.data import NamedRun
from dashboard.texts import format_percent
from dashboard.timeline_view import timeline
from simulator.validation.families import PUBLISHED_RECORD
from simulator.validation.record import ValidationRecord
from trace_capture.run import Run, Span
from trace_capture.samples import sample_folder
from trace_capture.statistics import lru_hit_curve, num_lookups
from trace_capture.trace import Trace

pytestmark = pytest.mark.browser

BAR = "#timeline-figure .barlayer .point"


def test_routing_of_a_layer_is_the_librarys(visit, address: str, trace: Trace) -> None:
    with visit(f"{address}/routing", "#routing-hits .scatterlayer .trace") as page:
        page.locator("#routing-layer").click()
        page.get_by_role("option", name="layer 4").click()
        page.wait_for_selector("#routing-hits text:has-text('slots of decoder layer 4')")
        assert page.url == f"{address}/routing?trace=trace.parquet&phase=all&layer=4&tokens=0,53"
        slots, shown = re.match(
            r"With (\d+) slots? LRU hits ([\d.]+ %)", page.locator("#routing-hits-note").inner_text()
        ).groups()
        assert shown == format_percent(lru_hit_curve(trace)[4, int(slots)] / num_lookups(trace)[4])
        drawn = page.evaluate("document.querySelector('#routing-hits .js-plotly-plot')._fullData[1].y.length")
        assert drawn == trace.shape.num_experts + 1
        note = page.locator("#routing-load-note").inner_text()
        page.get_by_text("prefill", exact=True).click()
        page.wait_for_function("before => document.querySelector('#routing-load-note').innerText !== before", arg=note)
        page.get_by_role("slider", name="Last token").focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_function("document.querySelector('#routing-strip-note').innerText.includes('Tokens 0 to 52 of')")
        page.go_back()
        page.go_back()
        page.wait_for_function("document.querySelector('#routing-strip-note')?.innerText.includes('Tokens 0 to 53')")
        assert page.locator("#routing-layer").input_value() == "layer 4"


def test_the_timeline_keeps_runs_and_passes_in_the_address(visit, address: str, folder: Path) -> None:
    with visit(f"{address}/timeline?run=on-demand-measured&below=nothing", BAR) as page:
        page.wait_for_timeout(300)
        assert page.url == f"{address}/timeline?run=on-demand-measured&below=nothing"
        page.get_by_role("slider", name="Last pass").focus()
        for _ in range(4):
            page.keyboard.press("ArrowRight")
        page.wait_for_function("document.querySelector('#timeline-note').innerText.includes('Passes 1 to 7')")
        expected = timeline(NamedRun("x", Run.load(folder / "on-demand-measured.run.json")), 1, 7)
        assert expected.sentence in page.locator("#timeline-note").inner_text()
        assert page.locator(BAR).count() == expected.num_spans
        assert "passes=1,7" in page.url
        page.locator("#timeline-below").click()
        page.get_by_role("option", name="its counterpart").click()
        page.wait_for_selector("#timeline-figure text:has-text('on-demand, predicted')")
        page.reload()
        page.wait_for_selector("#timeline-figure text:has-text('on-demand, predicted')")
        assert page.locator("#timeline-run").input_value() == "on-demand, measured (emulated link)"
        page.go_back()
        page.wait_for_function("n => document.querySelectorAll('#timeline-figure .point').length === n",
                               arg=expected.num_spans)  # fmt: skip


def test_zooming_into_50000_spans_refines_and_stays_small(
    visit, serving, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    spans = []
    for turn in range(25_000):
        start = 2_000 * turn
        spans.append(Span("link", "load", start, start + 1_000, 0, turn % 48, turn % 128, 1_000, "demand"))
        spans.append(Span("device", "experts", start + 1_000, start + 2_000, 0, turn % 48))
    run = make_run("long")
    Run(run.info, run.token_ns, tuple(spans)).save(tmp_path, "long")
    marks = f"document.querySelectorAll('{BAR}').length"
    with serving(tmp_path) as address, visit(f"{address}/timeline", BAR) as page:
        assert "heights show shares of time" in page.locator("#timeline-note").inner_text()
        assert 0 < page.evaluate(marks) <= 1_500
        box = page.locator("#timeline-figure .nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.505, box["y"] + 40, steps=3)
        page.mouse.move(box["x"] + box["width"] * 0.51, box["y"] + 40, steps=3)
        page.mouse.up()
        page.wait_for_function(
            "document.querySelector('#timeline-note').innerText.includes('from 2')"
            " && !document.querySelector('#timeline-note').innerText.includes('heights show')"
        )
        assert 0 < page.evaluate(marks) <= 1_500
        assert re.search(r"zoom=2[\d.]+,2[\d.]+$", page.url)
        hover = page.locator("#timeline-figure .hoverlayer text:has-text('layer')")
        for step in range(300):  # a pointer that stands still while the figure is drawn anew points at nothing
            page.mouse.move(box["x"] + box["width"] * 0.5 + step % 20, box["y"] + 50)
            page.wait_for_timeout(200)
            if hover.count():
                break
        assert hover.count()
        page.get_by_role("button", name="Whole window").click()
        page.wait_for_function("document.querySelector('#timeline-note').innerText.includes('heights show')")
        assert "zoom" not in page.url
        page.get_by_role("button", name="Zoom in").press("Enter")
        page.wait_for_function("document.querySelector('#timeline-note').innerText.includes('from 12.5 ms')")
        assert "zoom=12.5,37.5" in page.url


def test_validation_shows_the_errors_of_a_record(visit, address: str, folder: Path) -> None:
    with visit(f"{address}/validation", "#validation-errors .scatterlayer .point") as page:
        assert "published measurements by others" not in page.locator("#validation-record").input_value()
        record = ValidationRecord.load(sample_folder() / PUBLISHED_RECORD)
        page.locator("#validation-record").click()
        page.get_by_role("option", name="published measurements by others").click()
        page.wait_for_function(
            "text => document.querySelector('#validation-note').innerText.startsWith(text)",
            arg=f"{len(record.pairs)} pairs of predicted and measured time per token",
        )
        overall = next(band for band in record.bands if band.family == "any")
        assert (
            f"{format_percent(overall.median_abs_error)} in the median" in page.locator("#validation-note").inner_text()
        )
        assert page.locator("#validation-errors .scatterlayer .point").count() == len(record.pairs)
        assert "record=@published" in unquote(page.url)
        assert "V1-1K" in page.locator(".papers").inner_text()
        page.go_back()
        page.wait_for_function("document.querySelector('#validation-note')?.innerText.startsWith('3 pairs')")
        cells = page.locator("#validation-pairs [row-index='0'] [col-id=error_percent]")
        tuned = [Run.load(folder / f"tuned-{kind}.run.json").metrics.tpot_ms for kind in ("predicted", "measured")]
        assert float(cells.inner_text().replace("\u2212", "-")) == round(100 * (tuned[0] / tuned[1] - 1), 1)
