"""Figures as data: what is drawn, in which unit, and what is said where nothing can be drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
import pytest

from dashboard import figures, timeline_figure, views
from dashboard.data import NamedRun, Workspace
from dashboard.theme import colour_of
from dashboard.timeline_view import timeline
from simulator.cost_model import TERMS
from trace_capture.run import Run
from trace_capture.trace import Trace

MakeRun = Callable[..., Run]


def axis_titles(figure: go.Figure) -> tuple[str, str]:
    return figure.layout.xaxis.title.text, figure.layout.yaxis.title.text or ""


def trace_named(figure: go.Figure, name: str) -> go.Bar:
    return next(item for item in figure.data if item.name == name)


def test_no_two_terms_of_a_token_have_one_colour() -> None:
    assert len({colour_of(term) for term in TERMS}) == len(TERMS)


def test_predicted_against_measured_draws_the_numbers_of_the_runs(folder: Path) -> None:
    snapshot = Workspace(folder).read()
    view = views.compare(snapshot.runs)
    figure = figures.predicted_against_measured(view)
    predicted, measured = trace_named(figure, "predicted"), trace_named(figure, "measured")
    for place, row in enumerate(view.rows):
        assert predicted.x[place] == row.predicted_tpot_ms
        assert measured.x[place] == row.measured_tpot_ms
        assert predicted.error_x.array[place] == pytest.approx(0.1 * row.predicted_tpot_ms)
    assert list(trace_named(figure, "lower bound").x) == [row.bound_ms for row in view.rows]
    assert "(ms)" in axis_titles(figure)[0] and "emulated link" in axis_titles(figure)[0]


def test_without_emulation_there_is_no_label(make_run: MakeRun) -> None:
    runs = [NamedRun("x", make_run("a", emulated=False))]
    for figure in (
        figures.predicted_against_measured(views.compare(runs)),
        figures.tpot_terms(views.tpot_terms(runs)),
        timeline_figure.timeline(timeline(runs[0], 0, 3)),
    ):
        assert "emulated" not in figure.to_json()


def test_what_no_run_says_is_not_drawn(make_run: MakeRun) -> None:
    runs = [NamedRun("x", make_run("a", band=None))]
    figure = figures.predicted_against_measured(views.compare(runs))
    assert [item.name for item in figure.data] == ["predicted", "lower bound"]
    assert figure.data[0].error_x.array is None


def test_terms_are_stacked_in_the_order_of_the_comparison(folder: Path) -> None:
    view = views.tpot_terms(Workspace(folder).read().runs)
    figure = figures.tpot_terms(view)
    assert figure.layout.barmode == "stack"
    assert len(figure.data) == 5 and all(len(bar.x) == 6 for bar in figure.data)
    assert len({bar.marker.color for bar in figure.data}) == 5
    assert "emulated link" in axis_titles(figure)[0]


def test_heat_map_is_layer_by_expert_in_percent(trace: Trace) -> None:
    view = views.expert_load(trace)
    figure = figures.load_heat_map(view)
    heat = figure.data[0]
    assert view.shares is not None and heat.z.shape == (6, 16)
    assert heat.z[2][5] == pytest.approx(view.shares[2, 5] * 100)
    assert axis_titles(figure) == ("expert", "decoder layer")
    assert heat.colorbar.title.text == "tokens (%)"
    assert heat.colorscale[0][1].lower() == "#00224e"  # the first colour of cividis


def test_layer_load_is_sorted_and_bounded(trace: Trace) -> None:
    view = views.expert_load(trace)
    figure = figures.layer_load(view, 99)
    heights = list(figure.data[0].y)
    assert heights == sorted(heights, reverse=True) and len(heights) == 16
    assert axis_titles(figure) == ("expert of decoder layer 5", "tokens (%)")


def test_timeline_blocks_lie_in_their_lanes(make_run: MakeRun) -> None:
    run = make_run("a")
    view = timeline(NamedRun("x", run), 2, 4)
    figure = timeline_figure.timeline(view)
    assert sum(len(bar.x) for bar in figure.data) == view.num_spans
    load = trace_named(figure, "demand load")
    assert set(load.base) == {2.0}  # link is the top lane of three
    total_ms = sum(sum(bar.width) for bar in figure.data)
    assert total_ms == pytest.approx(sum(s.end_ns - s.start_ns for s in run.spans if 2 <= s.pass_id <= 4) / 1e6)
    assert "expert" in load.hovertext[0] and "reason: demand" in load.hovertext[0] and "<br>" in load.hovertext[0]
    assert "(ms)" in axis_titles(figure)[0]
    marks = [note.text for note in figure.layout.annotations]
    assert marks == ["pass 2", "pass 3", "pass 4"]


@pytest.mark.parametrize("dark", [False, True])
def test_an_empty_view_is_a_figure_that_says_why(dark: bool) -> None:
    load = views.expert_load(None)
    for figure in (
        figures.predicted_against_measured(views.compare([]), dark=dark),
        figures.tpot_terms(views.tpot_terms([]), dark=dark),
        figures.load_heat_map(load, dark=dark),
        figures.layer_load(load, 0, dark=dark),
        timeline_figure.timeline(timeline(None, 0, 0), dark=dark),
    ):
        assert not figure.data and "moe-studio" in figure.layout.annotations[0].text.replace("<br>", " ")


def test_dark_and_light_differ_in_ink_alone(folder: Path) -> None:
    view = views.expert_load(Workspace(folder).read().trace)
    light, dark = figures.load_heat_map(view), figures.load_heat_map(view, dark=True)
    assert light.layout.template.layout.font.color != dark.layout.template.layout.font.color
    assert light.data == dark.data


def test_texts_from_files_are_escaped(make_run: MakeRun) -> None:
    runs = [NamedRun("x", make_run("<a href='http://x'>y</a>"))]
    assert "<a" not in str(figures.predicted_against_measured(views.compare(runs)).data[0].y)
    assert "<a" not in str(figures.tpot_terms(views.tpot_terms(runs)).data[0].y)
    run = runs[0].run
    odd = Run(run.info, run.token_ns, tuple(span._replace(reason="<b>") for span in run.spans))
    bars = timeline_figure.timeline(timeline(NamedRun("x", odd), 0, 2)).data
    assert "<b>" not in "".join(text for bar in bars for text in (bar.name, *bar.hovertext))
