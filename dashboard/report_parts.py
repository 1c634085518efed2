"""Pieces of the report's HTML, and its sections on routing and validation."""

from __future__ import annotations

from html import escape

import numpy as np
import plotly.graph_objects as go
import plotly.io

from dashboard import routing_figures, validation_figures
from dashboard.data import Snapshot
from dashboard.routing_view import DEFAULT_STRIP_TOKENS, layers_view, pairs_view, reuse_view, strip_view
from dashboard.validation_view import validation_view, validations


def section(heading: str, text: str, content: str) -> str:
    """A titled part: a paragraph, escaped, and content that is HTML already."""
    paragraph = f"<p>{escape(text)}</p>" if text else ""
    return f"<section><h2>{escape(heading)}</h2>{paragraph}{content}</section>"


def figure_html(figure: go.Figure, name: str) -> str:
    """A figure as an element with the id `figure-<name>`; plotly.js comes from elsewhere in the file."""
    config = {"displaylogo": False, "responsive": True}
    return str(
        plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, div_id=f"figure-{name}", config=config)
    )


def routing_sections(snapshot: Snapshot) -> list[str]:
    """The figures of the routing page for the folder's first trace; in detail the layer with the least even load."""
    trace = snapshot.trace
    if trace is None:
        return []
    layers = layers_view(trace)
    entropy = layers.entropy_ratio
    layer = int(np.nanargmin(entropy)) if entropy is not None and np.isfinite(entropy).any() else 0
    name = f"decoder layer {trace.shape.moe_layer_ids[layer]}, whose load is the least even"
    strip = strip_view(trace, layer, 0, DEFAULT_STRIP_TOKENS)
    reuse, pairs = reuse_view(trace, layer), pairs_view(trace, layer)
    return [
        section(
            "Evenness and neighbours, by layer",
            layers.sentence,
            figure_html(routing_figures.entropy(layers), "entropy"),
        ),
        section(f"Token by token: {name}", strip.sentence, figure_html(routing_figures.strip(strip), "strip")),
        section(
            f"Reuse and what a cache can hit: {name}",
            reuse.sentence,
            figure_html(routing_figures.hit_curves(reuse), "hits") + figure_html(routing_figures.reuse(reuse), "reuse"),
        ),
        section(
            "How well experts are foreseen",
            layers.recall_sentence if layers.recall else "",
            figure_html(routing_figures.predictability(layers), "recall"),
        ),
        section(
            f"Experts that are used together: {name}",
            pairs.sentence,
            figure_html(routing_figures.pairs(pairs), "pairs"),
        ),
    ]


def validation_sections(snapshot: Snapshot) -> list[str]:
    """Every validation record of the folder, its runs, and the published record that ships."""
    parts = []
    for place, chosen in enumerate(validations(snapshot)):
        view = validation_view(chosen)
        scatter = figure_html(validation_figures.scatter(view), f"validation-{place}")
        errors = figure_html(validation_figures.errors(view), f"errors-{place}")
        parts.append(section(f"Validation: {chosen.title}", view.sentence, scatter + errors))
    return parts
