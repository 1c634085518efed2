"""Validation: predictions beside what was measured, live on this machine and published by others."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, dcc, html

from dashboard import parts, validation_figures
from dashboard.address import Query, address_sink, keep_in_address, one_of
from dashboard.data import Snapshot, Workspace
from dashboard.validation_view import ValidationView, papers_table, validation_view, validations

RECORD = "validation-record"
_COLUMNS = (
    {"field": "id", "headerName": "strategy or row", "flex": 1, "minWidth": 200},
    {"field": "family", "headerName": "family", "width": 140},
    parts.number_column("predicted_ms", "predicted", 3),
    parts.number_column("measured_ms", "measured", 3),
    parts.number_column("error_percent", "error (%)", 1),
    {"field": "inside", "headerName": "band", "width": 120},
)


def layout(snapshot: Snapshot, query: Query) -> Any:
    """The page for the record that the address names in `record`."""
    found = validations(snapshot)
    choices = [{"value": item.name, "label": item.title} for item in found]
    select = dmc.Select(
        id=RECORD,
        label="Measurements",
        data=choices,
        value=one_of(query.get("record"), [item.name for item in found]),
        allowDeselect=False,
        disabled=not found,
        placeholder="nothing was validated",
        className="control",
    )
    sections = [
        parts.section(
            "Predicted against measured",
            parts.note("", "validation-note"),
            parts.graph("validation-scatter", "Measured over predicted time per token, with the band"),
        ),
        parts.section(
            "Error by strategy",
            parts.note("Shaded: the band that predictions get. Nine in ten further measurements should lie in it."),
            parts.graph("validation-errors", "Errors of each strategy family"),
        ),
    ]
    papers = papers_table()
    return dmc.Stack(
        [
            address_sink("validation"),
            parts.problems(snapshot.problems),
            dmc.Group(select),
            dmc.SimpleGrid(sections, cols={"base": 1, "lg": 2}),
            parts.section(
                "Every pair",
                parts.note("", "validation-unit"),
                parts.grid("validation-pairs", "Pairs of predicted and measured times", _COLUMNS, None),
            ),
            parts.section(
                "Figures of papers",
                html.Div(dcc.Markdown(papers, className="papers"), className="table-scroll", tabIndex=0),
            )
            if papers
            else None,
        ],
        gap="md",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Connect the choice of the record."""

    def draw(name: str | None, scheme: str | None) -> tuple[Any, Any, str, list[dict[str, Any]], str]:
        found = validations(workspace.read())
        view = validation_view(next((item for item in found if item.name == name), None))
        dark = scheme == "dark"
        unit = "in units of the measured one" if view.is_relative else "in ms"
        return (
            validation_figures.scatter(view, dark=dark),
            validation_figures.errors(view, dark=dark),
            view.sentence,
            _rows(view),
            f"Predicted and measured time per output token {unit}." if view.pairs else "",
        )

    app.callback(
        Output("validation-scatter", "figure"),
        Output("validation-errors", "figure"),
        Output("validation-note", "children"),
        Output("validation-pairs", "rowData"),
        Output("validation-unit", "children"),
        Input(RECORD, "value"),
        Input("scheme", "data"),
    )(draw)
    keep_in_address(app, "validation", {"record": (RECORD, "value")})


def _rows(view: ValidationView) -> list[dict[str, Any]]:
    return [
        asdict(row) | {"error_percent": 100 * row.error_ratio, "inside": "inside" if row.is_inside_band else "outside"}
        for row in view.pairs
    ]
