"""Routing: which experts the tokens went to, how soon they come again, and how well they are foreseen."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, State

from dashboard import figures, parts, routing_figures, views
from dashboard.address import Query, address_sink, keep_in_address, number_pair, one_of, whole_number
from dashboard.data import NamedTrace, Snapshot, Workspace
from dashboard.routing_view import DEFAULT_STRIP_TOKENS, layers_view, pairs_view, reuse_view, strip_view

TRACE, PHASE, LAYER, TOKENS = "routing-trace", "routing-phase", "routing-layer", "routing-tokens"


def layout(snapshot: Snapshot, query: Query) -> Any:
    """The page for the trace that the address names: `trace`, `phase`, `layer`, `tokens`."""
    chosen = snapshot.named_trace(query.get("trace"))
    choices, layer, last, tokens = _fit(chosen, query)
    phase = dmc.SegmentedControl(
        id=PHASE,
        data=[{"value": name, "label": name} for name in views.PHASES],
        value=one_of(query.get("phase"), views.PHASES),
        size="xs",
        **{"aria-label": "Phase of the tokens"},
    )
    layer_select = dmc.Select(
        id=LAYER,
        label="Layer in detail",
        data=choices,
        value=layer,
        allowDeselect=False,
        disabled=not choices,
        className="control",
    )
    window = parts.range_slider(TOKENS, "Tokens (first and last)", last, tokens, ("First token", "Last token"))
    controls = dmc.Group([parts.trace_select(TRACE, snapshot, query), layer_select], className="controls")
    return dmc.Stack(
        [
            address_sink("routing"),
            parts.problems(snapshot.problems),
            controls,
            _drawn("load", "Which experts the tokens went to", "Heat map of layer by expert: share of tokens", phase),
            _pair(
                _drawn("layer-load", "Load of the layer", "Share of tokens of each expert of one layer"),
                _drawn("entropy", "Evenness and neighbours, by layer", "Load entropy and overlap of each layer"),
            ),
            parts.section(
                "Token by token",
                window,
                parts.note("", "routing-strip-note"),
                parts.graph("routing-strip", "Which experts of one layer each token used"),
            ),
            _pair(
                _drawn("reuse", "How soon an expert comes again", "Reuse distances of one layer"),
                _drawn("hits", "What a cache of the layer can hit", "Hit rate over slots, LRU and perfect eviction"),
            ),
            _pair(
                _drawn("recall", "How well experts are foreseen", "Recall of each predictor by layer"),
                _drawn("pairs", "Experts that are used together", "Co-activation of the experts of one layer"),
            ),
        ],
        gap="md",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Connect the controls. Every callback reads the folder through the cache of `workspace`."""

    def fit(name: str | None, layer: str | None) -> tuple[Any, Any, int, list[int]]:
        return _fit(workspace.read().named_trace(name), {"layer": layer or ""})

    app.callback(
        Output(LAYER, "data"),
        Output(LAYER, "value"),
        Output(TOKENS, "max"),
        Output(TOKENS, "value"),
        Input(TRACE, "value"),
        State(LAYER, "value"),
        prevent_initial_call=True,
    )(fit)
    _register_load(app, workspace)
    _register_layer(app, workspace)
    keep_in_address(
        app,
        "routing",
        {
            "trace": (TRACE, "value"),
            "phase": (PHASE, "value"),
            "layer": (LAYER, "value"),
            "tokens": (TOKENS, "value"),
        },
    )


def _register_load(app: Dash, workspace: Workspace) -> None:
    """What shows all layers."""

    def draw_load(name: str | None, phase: str, layer: str | None, scheme: str | None) -> tuple[Any, Any, str]:
        chosen = workspace.read().named_trace(name)
        view = views.expert_load(chosen.trace if chosen is not None else None, phase)
        dark = scheme == "dark"
        detail = figures.layer_load(view, whole_number(layer, 0), dark=dark)
        return figures.load_heat_map(view, dark=dark), detail, view.sentence

    def draw_layers(name: str | None, scheme: str | None) -> tuple[Any, str, Any, str]:
        chosen = workspace.read().named_trace(name)
        view = layers_view(chosen.trace if chosen is not None else None)
        dark = scheme == "dark"
        recall = routing_figures.predictability(view, dark=dark)
        told = view.recall_sentence if view.recall else ""
        return routing_figures.entropy(view, dark=dark), view.sentence, recall, told

    app.callback(
        Output("routing-load", "figure"),
        Output("routing-layer-load", "figure"),
        Output("routing-load-note", "children"),
        Input(TRACE, "value"),
        Input(PHASE, "value"),
        Input(LAYER, "value"),
        Input("scheme", "data"),
    )(draw_load)
    app.callback(
        Output("routing-entropy", "figure"),
        Output("routing-entropy-note", "children"),
        Output("routing-recall", "figure"),
        Output("routing-recall-note", "children"),
        Input(TRACE, "value"),
        Input("scheme", "data"),
    )(draw_layers)


def _register_layer(app: Dash, workspace: Workspace) -> None:
    """What shows the chosen layer."""

    def draw_strip(name: str | None, layer: str | None, tokens: list[int], scheme: str | None) -> tuple[Any, str]:
        chosen = workspace.read().named_trace(name)
        trace = chosen.trace if chosen is not None else None
        view = strip_view(trace, whole_number(layer, 0), tokens[0], tokens[1] + 1)
        return routing_figures.strip(view, dark=scheme == "dark"), view.sentence

    def draw_layer(name: str | None, layer: str | None, scheme: str | None) -> tuple[Any, str, Any, Any, str]:
        chosen = workspace.read().named_trace(name)
        trace = chosen.trace if chosen is not None else None
        reuse, pairs = reuse_view(trace, whole_number(layer, 0)), pairs_view(trace, whole_number(layer, 0))
        dark = scheme == "dark"
        return (
            routing_figures.hit_curves(reuse, dark=dark),
            reuse.sentence,
            routing_figures.reuse(reuse, dark=dark),
            routing_figures.pairs(pairs, dark=dark),
            pairs.sentence,
        )

    app.callback(
        Output("routing-strip", "figure"),
        Output("routing-strip-note", "children"),
        Input(TRACE, "value"),
        Input(LAYER, "value"),
        Input(TOKENS, "value"),
        Input("scheme", "data"),
    )(draw_strip)
    app.callback(
        Output("routing-hits", "figure"),
        Output("routing-hits-note", "children"),
        Output("routing-reuse", "figure"),
        Output("routing-pairs", "figure"),
        Output("routing-pairs-note", "children"),
        Input(TRACE, "value"),
        Input(LAYER, "value"),
        Input("scheme", "data"),
    )(draw_layer)


def _fit(chosen: NamedTrace | None, query: Query) -> tuple[list[dict[str, str]], str | None, int, list[int]]:
    """Choices of layers, the chosen one, the last token, and the window of tokens, for a trace."""
    if chosen is None or not chosen.trace.num_tokens:
        return [], None, 1, [0, 0]
    layer_ids, last = chosen.trace.shape.moe_layer_ids, chosen.trace.num_tokens - 1
    layer = whole_number(query.get("layer"), 0)
    window = number_pair(query.get("tokens"), allow_equal=True) or (0, DEFAULT_STRIP_TOKENS - 1)
    first = int(min(max(0, window[0]), last))
    tokens = [first, int(min(last, max(first, window[1])))]
    choices = [{"value": str(place), "label": f"layer {layer_id}"} for place, layer_id in enumerate(layer_ids)]
    return choices, str(layer if layer < len(layer_ids) else 0), max(1, last), tokens


def _drawn(name: str, heading: str, label: str, controls: Any = None) -> Any:
    graph = parts.graph(f"routing-{name}", label)
    return parts.section(heading, parts.note("", f"routing-{name}-note"), graph, controls=controls)


def _pair(left: Any, right: Any) -> Any:
    return dmc.SimpleGrid([left, right], cols={"base": 1, "lg": 2})
