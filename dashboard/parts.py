"""Pieces that pages are made of: cards, sections, tables, alerts, figures with a text beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html

from dashboard.address import Query
from dashboard.data import Snapshot
from dashboard.figures import empty_figure
from dashboard.summary import Card
from dashboard.table import COLUMN_GROUPS, TABLE_NOTE, Cell, cells
from dashboard.texts import MISSING
from dashboard.views import Comparison

MAX_GRID_ROWS = 12
"""Longer tables scroll in themselves."""
GRAPH_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "resetScale2d", "zoomIn2d", "zoomOut2d"],
}


def section(heading: str, *content: Any, controls: Any = None) -> Any:
    """A titled part of a page."""
    head = [dmc.Title(heading, order=2, size="h4")]
    if controls is not None:
        head.append(controls)
    return dmc.Paper(
        [dmc.Group(head, justify="space-between", className="section-head"), *content], className="section"
    )


def graph(graph_id: str, label: str, *, zoomable: bool = False) -> Any:
    """A figure that a callback fills; `label` is what a screen reader says. With `zoomable`, a double click shows all
    of it, also where the figure was drawn for a part."""
    config = GRAPH_CONFIG | ({"doubleClick": "autosize"} if zoomable else {})
    figure = dcc.Graph(id=graph_id, figure=empty_figure(""), config=config)
    return html.Div(figure, role="figure", className="graph", **{"aria-label": label})


def grid(grid_id: str, label: str, columns: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]] | None) -> Any:
    """A table that can be sorted and filtered, by keyboard too; dark where the page is. None: a callback fills it,
    perhaps with many rows."""
    scrolls = rows is None or len(rows) > MAX_GRID_ROWS
    options = {
        "domLayout": "normal" if scrolls else "autoHeight",
        "enableCellTextSelection": True,
        "ensureDomOrder": True,
        "suppressColumnVirtualisation": True,
        "tooltipShowDelay": 300,
    }
    table = dag.AgGrid(
        id=grid_id,
        columnDefs=list(columns),
        rowData=list(rows or ()),
        defaultColDef={"sortable": True, "filter": True, "resizable": True},
        dashGridOptions=options,
        style={"height": "420px" if scrolls else None, "width": "100%"},
    )
    return html.Div(table, role="region", className="grid", **{"aria-label": label})


def number_column(field: str, heading: str, digits: int) -> dict[str, Any]:
    """A column of numbers that sorts by value and shows `digits` places; a dash where there is none."""
    shown = f"params.value == null ? '{MISSING}' : d3.format(',.{digits}f')(params.value)"
    return {
        "field": field,
        "headerName": heading,
        "type": "rightAligned",
        "filter": "agNumberColumnFilter",
        "valueFormatter": {"function": shown},
        "width": 150,
        "wrapHeaderText": True,
    }


def card(content: Card) -> Any:
    """A summary card."""
    head = [dmc.Text(content.title, size="sm", c="dimmed")]
    if content.badge:
        head.append(badge(content.badge))
    return dmc.Paper(
        [
            dmc.Group(head, justify="space-between", gap="xs"),
            dmc.Text(content.value, className="card-value"),
            dmc.Text(content.detail, size="sm", c="dimmed", className="wrap-anywhere"),
        ],
        className="section card",
    )


def badge(text: str) -> Any:
    """A label that must not be overlooked."""
    return html.Span(text, className="badge")


def problems(lines: tuple[str, ...]) -> Any:
    """Files that could not be read, one line each; nothing where there are none."""
    if not lines:
        return None
    return dmc.Alert(
        [html.P(line, className="problem") for line in lines], title="Files that could not be read", color="orange"
    )


def note(text: str, note_id: str = "") -> Any:
    """A paragraph below a heading or a figure."""
    return dmc.Text(text, size="sm", className="note", **({"id": note_id} if note_id else {}))


def comparison_table(comparison: Comparison, table_id: str) -> Any:
    """The comparison as a table; nothing where there are no rows."""
    if not comparison.rows:
        return None
    groups = [html.Th(group, colSpan=len(names), scope="colgroup") for group, names in COLUMN_GROUPS]
    names = [html.Th(name, scope="col") for _, group in COLUMN_GROUPS for name in group]
    body = [html.Tr([_cell(cell) for cell in cells(row)]) for row in comparison.rows]
    table = html.Table([html.Thead([html.Tr(groups), html.Tr(names)]), html.Tbody(body)], id=table_id)
    scroll = html.Div(table, className="table-scroll", tabIndex=0, role="region", **{"aria-label": "Comparison table"})
    return html.Div([scroll, html.P(TABLE_NOTE, className="remark")])


def _cell(cell: Cell) -> Any:
    remark = [html.Div(cell.remark, className="remark")] if cell.remark else []
    value = {} if cell.value is None else {"data-value": repr(cell.value)}
    return html.Td([html.Span(cell.text), *remark], **value)


def trace_select(select_id: str, snapshot: Snapshot, query: Query) -> Any:
    """A choice of the folder's traces, set to the one that the address names in `trace`."""
    names = [item.name for item in snapshot.traces]
    chosen = snapshot.named_trace(query.get("trace"))
    return dmc.Select(
        id=select_id,
        label="Trace",
        data=names,
        value=chosen.name if chosen is not None else None,
        allowDeselect=False,
        disabled=not names,
        placeholder="no trace in this folder",
        className="control",
    )


def range_slider(
    slider_id: str, label: str, last: int, window: list[int], thumbs: tuple[str, str], *, disabled: bool = False
) -> Any:
    """A window of whole numbers from 0 to `last`, under a label; `thumbs` is what a screen reader calls its ends."""
    slider = dmc.RangeSlider(
        id=slider_id,
        min=0,
        max=last,
        minRange=0,
        step=1,
        value=window,
        disabled=disabled,
        thumbFromLabel=thumbs[0],
        thumbToLabel=thumbs[1],
    )
    return html.Div([dmc.Text(label, size="sm", fw=500), slider], className="control wide")
