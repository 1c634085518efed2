"""Windows of a timeline: exact blocks, and shares of time where there are too many."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dashboard import timeline_figure, timeline_view
from dashboard.data import NamedRun
from dashboard.timeline_view import counterpart, default_window, pass_ids, runs_with_spans, timeline
from trace_capture.run import Run, Span

MakeRun = Callable[..., Run]


def test_a_window_holds_the_spans_of_its_passes(make_run: MakeRun) -> None:
    run = make_run("tuned", "measured")
    view = timeline(NamedRun("x", run), 4, 6)
    chosen = [span for span in run.spans if 4 <= span.pass_id <= 6]
    assert (view.first, view.last, view.num_passes, view.num_spans) == (4, 6, 31, len(chosen))
    assert view.tracks == ("link", "device", "host")
    begin = min(span.start_ns for span in chosen)
    assert sorted((b.start_ms, b.end_ms) for b in view.blocks) == pytest.approx(
        np.array(sorted(((s.start_ns - begin) / 1e6, (s.end_ns - begin) / 1e6) for s in chosen))
    )
    assert view.pass_starts_ms[0] == (4, 0.0) and len(view.pass_starts_ms) == 3
    loads = [block for block in view.blocks if block.track == "link"]
    assert all("expert" in block.text and "reason" in block.text and "295 kB" in block.text for block in loads)
    assert {block.concept for block in loads} == {"demand load", "prefetch load"}
    assert view.emulated and not view.is_aggregated
    assert view.sentence.startswith("Passes 4 to 6 of 0 to 30: ")


def test_a_window_beyond_the_run_is_moved_into_it(make_run: MakeRun) -> None:
    view = timeline(NamedRun("x", make_run("a")), 500, -3)
    assert (view.first, view.last) == (30, 30) and view.blocks


def test_many_spans_become_shares_that_keep_the_busy_time(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("a", hit_every=1)
    exact = timeline(NamedRun("x", run), 0, 30)
    monkeypatch.setattr(timeline_view, "MAX_SPANS", 100)
    binned = timeline(NamedRun("x", run), 0, 30)
    assert binned.is_aggregated and "zoom in or choose fewer passes" in binned.sentence
    assert len(binned.blocks) <= timeline_view.NUM_BINS * 8

    def busy(view: timeline_view.TimelineView) -> dict[tuple[str, str], float]:
        totals: dict[tuple[str, str], float] = {}
        for block in view.blocks:
            key = (block.track, block.concept)
            totals[key] = totals.get(key, 0.0) + (block.end_ms - block.start_ms) * (block.high - block.low)
        return totals

    assert busy(binned) == pytest.approx(busy(exact), rel=0.01)
    assert all(0 <= block.low < block.high <= 1 for block in binned.blocks)


def test_a_quarter_of_a_million_spans_stay_quick(make_run: MakeRun) -> None:
    run = make_run("a")
    spans = tuple(Span("device", "experts", i * 10, i * 10 + 5, i // 1000, 0) for i in range(250_000))
    view = timeline(NamedRun("x", Run(run.info, run.token_ns, spans)), 0, 249)
    assert view.is_aggregated and len(view.blocks) == timeline_view.NUM_BINS
    assert view.blocks[7].high == pytest.approx(0.5, rel=0.02)


@pytest.fixture(scope="module")
def long_item(make_run: MakeRun) -> NamedRun:
    """50,000 spans in one pass: link and device take turns, a microsecond each, in 25,000 turns."""
    spans = []
    for turn in range(25_000):
        start = 2_000 * turn
        spans.append(Span("link", "load", start, start + 1_000, 0, turn % 48, turn % 128, 1_000, "demand"))
        spans.append(Span("device", "experts", start + 1_000, start + 2_000, 0, turn % 48))
    run = make_run("long")
    return NamedRun("long", Run(run.info, run.token_ns, tuple(spans)))


@pytest.mark.parametrize(
    ("zoom_ms", "resolution_ms"), [(None, 50 / 240), ((10.0, 30.0), 40 / 240), ((10.0, 10.2), 0.001)]
)
def test_what_is_drawn_is_bounded_and_zooming_in_refines(
    long_item: NamedRun, zoom_ms: tuple[float, float] | None, resolution_ms: float
) -> None:
    view = timeline(long_item, 0, 0, zoom_ms)
    figure = timeline_figure.timeline(view)
    assert sum(len(item.x) for item in figure.data) == len(view.blocks) <= timeline_view.MAX_SPANS
    widths = [block.end_ms - block.start_ms for block in view.blocks]
    assert max(widths) == pytest.approx(resolution_ms, rel=0.01)
    assert list(figure.layout.xaxis.range) == list(zoom_ms or (0, 50.0))
    low, high = zoom_ms or (0, 50.0)
    for track in ("link", "device"):
        on_track = [block for block in view.blocks if block.track == track]
        busy = sum((min(b.end_ms, high) - max(b.start_ms, low)) * (b.high - b.low)
                   for b in on_track if b.end_ms > low and b.start_ms < high)  # fmt: skip
        assert busy == pytest.approx((high - low) / 2, rel=0.01)
        assert on_track[0].start_ms <= max(0, low - 0.4 * (high - low)) and on_track[-1].end_ms >= min(50, high)
    assert view.is_aggregated == (resolution_ms > 0.01)
    if not view.is_aggregated:
        load = next(b for b in view.blocks if b.track == "link" and b.start_ms >= 10.1)
        turn = round(load.start_ms / 0.002)
        assert f"layer {turn % 48}, expert {turn % 128}, reason: demand, 1.00 kB" in load.text
    share = "link 50 %, device 50 %"
    assert share in view.sentence


def test_a_zoom_beyond_the_window_shows_all_of_it(long_item: NamedRun) -> None:
    for zoom_ms in ((60.0, 70.0), (-5.0, -1.0)):
        assert timeline(long_item, 0, 0, zoom_ms).zoom_ms is None
    assert "from 49.0 ms on" in timeline(long_item, 0, 0, (49.0, 60.0)).sentence


def test_two_runs_share_the_axis_and_the_legend(make_run: MakeRun) -> None:
    live, simulated = NamedRun("m", make_run("a", "measured", scale=1.2)), NamedRun("p", make_run("a"))
    assert counterpart(live, [live, simulated]) is simulated and counterpart(simulated, [live, simulated]) is live
    assert counterpart(None, [live]) is None and counterpart(live, [live]) is None
    upper, lower = timeline(live, 2, 3), timeline(simulated, 2, 3)
    figure = timeline_figure.timeline(upper, lower)
    assert figure.layout.xaxis.matches == "x2" and not figure.layout.xaxis.title.text
    assert "(ms)" in figure.layout.xaxis2.title.text and "emulated link" in figure.layout.xaxis2.title.text
    assert list(figure.layout.xaxis2.range) == [0, upper.length_ms] and upper.length_ms > lower.length_ms
    for axis, view in (("x", upper), ("x2", lower)):
        assert sum(len(bar.x) for bar in figure.data if bar.xaxis == axis) == view.num_spans
    names = [bar.name for bar in figure.data if bar.showlegend]
    assert len(names) == len(set(names))
    titles = [note.text for note in figure.layout.annotations if "(emulated" in note.text]
    assert titles == ["a, measured (emulated link)", "a, predicted (emulated link)"]


def test_evictions_are_moments_beside_the_blocks(make_run: MakeRun) -> None:
    run = make_run("a")
    at = next(span for span in run.spans if span.pass_id == 2).start_ns
    moments = tuple(Span("host", "evict", at + 1000 * i, at + 1000 * i, 2, 1, i, 294_912) for i in range(3))
    view = timeline(NamedRun("x", Run(run.info, run.token_ns, run.spans + moments)), 2, 2)
    assert [(moment.track, moment.at_ms) for moment in view.moments] == [
        ("host", 0.0),
        ("host", 0.001),
        ("host", 0.002),
    ]
    assert view.moments[1].text == "eviction: layer 1, expert 1, 295 kB"
    assert view.num_spans == len(view.blocks) == sum(span.pass_id == 2 for span in run.spans)
    assert view.sentence.endswith(" 3 evictions.")
    figure = timeline_figure.timeline(view)
    assert [item.mode for item in figure.data if item.name == "eviction"] == ["markers"]


def test_reasons_for_an_empty_timeline(make_run: MakeRun) -> None:
    assert "moe-studio demo" in timeline(None, 0, 0).empty
    assert "without spans" in timeline(NamedRun("x", make_run("a", spans=False)), 0, 0).empty
    run = make_run("a")
    odd = Run(run.info, run.token_ns, (Span("moon", "load", 0, 1, 0, 0),))
    assert "known" in timeline(NamedRun("x", odd), 0, 0).empty


def test_the_default_window_leaves_the_prefill_out(make_run: MakeRun) -> None:
    item = NamedRun("a", make_run("a"))
    assert pass_ids(item) == list(range(31))
    assert default_window(item) == (1, 3)
    assert default_window(NamedRun("a", make_run("a", spans=False))) == (0, 0)


def test_measured_runs_come_first(make_run: MakeRun) -> None:
    runs = [
        NamedRun("p", make_run("a")),
        NamedRun("slow", make_run("b", "measured", hit_every=1)),
        NamedRun("fast", make_run("c", "measured", hit_every=5)),
        NamedRun("none", make_run("d", "measured", spans=False)),
    ]
    assert [item.name for item in runs_with_spans(runs)] == ["fast", "slow", "p"]
