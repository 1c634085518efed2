"""The figure of what speculative counts tell: entropy and signal to noise over the draft length."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard.figures import empty_figure
from dashboard.theme import GREY, colour_of, template
from trace_capture.information import Information


def information_figure(rows: Sequence[Information], model: str = "", *, dark: bool = False) -> go.Figure:
    """Two panels over gamma, entropy of the counts and their signal to noise: measured, and binomial as reference.

    Args:
        rows: of `trace_capture.information.speculative_information`.
        model: whose trace it was, for the title.
        dark: for a dark page.
    """
    if not rows:
        return empty_figure("There is nothing to count here; capture a trace with generated tokens.", dark=dark)
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    panels = (
        ("entropy of the counts (bits)", "entropy_bits", "binomial_entropy_bits"),
        ("signal to noise (mean / deviation)", "signal_to_noise", "binomial_signal_to_noise"),
    )
    for column, (title, measured, reference) in enumerate(panels, start=1):
        lines = ((measured, "this trace", colour_of("measured"), "solid"), (reference, "binomial", GREY, "dash"))
        for name, label, colour, dash in lines:
            line = go.Scatter(
                x=[row.gamma for row in rows],
                y=[getattr(row, name) for row in rows],
                name=label,
                mode="lines+markers",
                line={"color": colour, "dash": dash},
                showlegend=column == 1,
                legendgroup=label,
                hovertemplate="%{x} drafts<br>%{y:.3f}<extra>" + label + "</extra>",
            )
            figure.add_trace(line, row=1, col=column)
        figure.update_xaxes(title_text="drafts per pass", dtick=1, row=1, col=column)
        figure.update_yaxes(title_text=title, rangemode="tozero", row=1, col=column)
    figure.update_layout(template=template(dark), height=360)
    if model:
        figure.update_layout(title={"text": f"What speculative counts tell: {escape(model)}", "font": {"size": 15}})
        figure.update_layout(margin={"t": 80})
    return figure
