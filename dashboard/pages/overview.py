"""Overview: what a folder holds, what was predicted and measured, and a place to drop a trace."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, State, dcc, html

from dashboard import figures, parts, views
from dashboard.address import Query
from dashboard.data import OTHER_NAMES, Snapshot, Workspace
from dashboard.inventory import inventory
from dashboard.summary import summary_cards
from dashboard.uploads import MAX_UPLOAD_BYTES, save_trace
from trace_capture.errors import StudioError

NO_FILES = (
    "Nothing here yet. Drop a trace above, or let 'moe-studio demo --out FOLDER' fill a folder with traces, runs and "
    "a tuned configuration."
)
_COLUMNS = (
    {"field": "kind", "headerName": "kind", "width": 150},
    {"field": "name", "headerName": "file", "flex": 1, "minWidth": 220},
    {"field": "about", "headerName": "about", "flex": 2, "minWidth": 300, "tooltipField": "about"},
    parts.number_column("tpot_ms", "time per token (ms)", 2),
    parts.number_column("hit_percent", "hit rate (%)", 1),
)


def layout(snapshot: Snapshot, query: Query) -> Any:
    """The page for a folder; the address says nothing here."""
    comparison = views.compare(snapshot.runs)
    return dmc.Stack(
        [
            parts.problems(snapshot.problems),
            dmc.SimpleGrid([parts.card(card) for card in summary_cards(snapshot)], cols={"base": 1, "sm": 2, "lg": 4}),
            parts.section(
                "Predicted against measured",
                *[parts.note(text) for text in comparison.sentences],
                parts.graph("overview-comparison", "Predicted and measured time per token of each strategy"),
                parts.comparison_table(comparison, "overview-table"),
            ),
            parts.section(
                "What a token's time is made of",
                parts.note(views.tpot_terms(snapshot.runs).sentence),
                parts.graph("overview-terms", "Parts of the time per token of each run"),
            ),
            parts.section("In this folder", *_files(snapshot)),
            parts.section("Tuned configuration", *_tuned(snapshot)),
        ],
        gap="md",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Connect the figures and the upload. Every callback reads the folder through the cache of `workspace`."""

    def draw_comparison(scheme: str | None) -> tuple[Any, Any]:
        runs = workspace.read().runs
        dark = scheme == "dark"
        return (
            figures.predicted_against_measured(views.compare(runs), dark=dark),
            figures.tpot_terms(views.tpot_terms(runs), dark=dark),
        )

    def take_in(content: str | None, name: str | None) -> tuple[Any, list[dict[str, Any]], None]:
        if not content or not name:
            message = None
        else:
            try:
                trace = save_trace(workspace.folder, name, content)
                text = f"{name} is in the folder now: {trace.num_tokens:,} tokens of {trace.shape.name}. "
                message = dmc.Alert(
                    [text, dcc.Link("Look at its routing", href=f"/routing?trace={name}")],
                    color="green",
                    title="Taken in",
                )
            except StudioError as error:
                message = dmc.Alert(str(error), color="orange", title="Not taken in", className="problem")
        return message, _rows(workspace.read()), None

    app.callback(Output("overview-comparison", "figure"), Output("overview-terms", "figure"), Input("scheme", "data"))(
        draw_comparison
    )
    app.callback(
        Output("overview-upload-note", "children"),
        Output("overview-files", "rowData"),
        Output("overview-upload", "contents"),
        Input("overview-upload", "contents"),
        State("overview-upload", "filename"),
        prevent_initial_call=True,
    )(take_in)


def _files(snapshot: Snapshot) -> list[Any]:
    """Where to drop a trace, and the table of files."""
    size = f"{MAX_UPLOAD_BYTES // (1024 * 1024)} MB"
    upload = dcc.Upload(
        html.Button(
            ["Drop a trace (.parquet) here, or choose a file", html.Span(f"at most {size}; it is checked first")],
            type="button",
            className="drop",
        ),
        id="overview-upload",
        accept=".parquet",
        max_size=MAX_UPLOAD_BYTES,
        multiple=False,
    )
    rows = _rows(snapshot)
    table = parts.grid("overview-files", "Files of the folder", _COLUMNS, rows)
    return [upload, html.Div(id="overview-upload-note", role="status"), parts.note("" if rows else NO_FILES), table]


def _rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    return [
        asdict(row) | {"hit_percent": None if row.hit_rate is None else 100 * row.hit_rate}
        for row in inventory(snapshot)
    ]


def _tuned(snapshot: Snapshot) -> list[Any]:
    """The tuned configuration, and what else lies in the folder."""
    tuned = snapshot.tuned
    shown = html.Pre(html.Code(tuned.text), tabIndex=0) if tuned is not None else parts.note(views.NO_TUNED)
    uses = dict(zip(OTHER_NAMES, ("open it in any browser", "open it in ui.perfetto.dev"), strict=True))
    others = [parts.note(f"{snapshot.folder / name}: {uses[name]}") for name in snapshot.other_files]
    return [parts.note(tuned.name if tuned is not None else ""), shown, *others]
