"""The figure of what speculative counts tell."""

from __future__ import annotations

from dashboard.information_figure import information_figure
from trace_capture.information import Information


def test_measured_and_binomial_lines_lie_in_both_panels() -> None:
    rows = [Information(gamma, 10, 0.5 + gamma, 0.3 + gamma, 0.1, 0.4 + gamma, 0.2 + gamma) for gamma in range(3)]
    figure = information_figure(rows, "a <b> model", dark=True)
    lines = [(line.name, list(line.x), list(line.y), line.xaxis) for line in figure.data]
    assert lines == [
        ("this trace", [0, 1, 2], [0.5, 1.5, 2.5], "x"),
        ("binomial", [0, 1, 2], [0.4, 1.4, 2.4], "x"),
        ("this trace", [0, 1, 2], [0.3, 1.3, 2.3], "x2"),
        ("binomial", [0, 1, 2], [0.2, 1.2, 2.2], "x2"),
    ]
    assert [line.showlegend for line in figure.data] == [True, True, False, False]
    assert "&lt;b&gt;" in figure.layout.title.text


def test_nothing_to_show_says_so() -> None:
    figure = information_figure([])
    assert not figure.data and "capture a trace" in figure.layout.annotations[0].text.replace("<br>", " ")
