"""Export: a configuration in the words of another engine, with what is lost and how fast it should be there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, dcc, html

from dashboard import jobs, parts
from dashboard.address import Query, address_sink, keep_in_address, one_of, whole_number
from dashboard.data import Snapshot, Workspace
from dashboard.export_view import NO_CONFIG, Wanted, archive_name, headline, machine_warning, make_export, zip_of
from dashboard.machines import NONE, machine_select
from simulator.exports import TARGETS, Export
from simulator.exports.prediction import Prediction
from trace_capture.errors import StudioError

_CONTROLS = {
    name: (f"export-{name}", "value")
    for name in ("config", "target", "trace", "hardware", "model_path", "draft_model", "context")
}
"""Name in the address -> control; the fields of `Wanted`, in its order."""
_NO_CHOICE = {"allowDeselect": False, "className": "control"}
_DOWNLOAD_ONE = """(clicks, files) => {
  const at = window.dash_clientside.callback_context.triggered_id;
  if (!at || !clicks.some(Boolean)) return window.dash_clientside.no_update;
  return {filename: files[at.place].name, content: files[at.place].text, type: "text/plain"};
}"""


def layout(snapshot: Snapshot, query: Query) -> Any:
    """The page for the choices that the address names."""
    return dmc.Stack(
        [
            address_sink("export"),
            dcc.Store(id="export-files", data=[]),
            dcc.Download(id="export-download"),
            dcc.Download(id="export-download-zip"),
            parts.problems(snapshot.problems),
            parts.section("What to export", _pickers(snapshot, query), _fields(query)),
            jobs.progress_panel("export"),
            html.Div(parts.note("" if snapshot.configs else NO_CONFIG), id="export-result"),
        ],
        gap="md",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Connect the controls. What is predicted is simulated, so it is a background job."""
    inputs = [Input(*place) for place in _CONTROLS.values()]
    outputs = [Output("export-result", "children"), Output("export-files", "data")]
    jobs.background(app, "export", outputs, inputs, _work(workspace.folder), run_on_load=True, stops_on_leaving=True)
    app.clientside_callback(
        _DOWNLOAD_ONE,
        Output("export-download", "data"),
        Input({"type": "export-file", "place": ALL}, "n_clicks"),
        State("export-files", "data"),
        prevent_initial_call=True,
    )

    def pack(clicks: int | None, files: list[dict[str, str]], config: str, target: str) -> Any:
        return dcc.send_bytes(zip_of(files), archive_name(config, target)) if clicks and files else None

    app.callback(
        Output("export-download-zip", "data"),
        Input("export-zip", "n_clicks"),
        State("export-files", "data"),
        State("export-config", "value"),
        State("export-target", "value"),
        prevent_initial_call=True,
    )(pack)
    keep_in_address(app, "export", _CONTROLS)


def _pickers(snapshot: Snapshot, query: Query) -> Any:
    configs = [item.name for item in snapshot.configs]
    traces = [*[item.name for item in snapshot.traces], NONE]
    targets = [{"value": name, "label": target.title} for name, target in TARGETS.items()]
    config = dmc.Select(
        id="export-config",
        label="Configuration",
        data=configs,
        value=one_of(query.get("config"), configs),
        disabled=not configs,
        placeholder="none in this folder",
        **_NO_CHOICE,
    )
    target = dmc.Select(
        id="export-target",
        label="Target",
        data=targets,
        value=one_of(query.get("target"), tuple(TARGETS), "llama.cpp"),
        **_NO_CHOICE,
    )
    trace = dmc.Select(
        id="export-trace",
        label="Trace (counts of experts, and predictions)",
        data=traces,
        value=one_of(query.get("trace"), traces),
        **_NO_CHOICE,
    )
    machine = machine_select("export-hardware", snapshot, query, optional=True)
    return dmc.SimpleGrid([config, target, trace, machine], cols={"base": 1, "sm": 2})


def _fields(query: Query) -> Any:
    model, draft = (
        dmc.TextInput(id=f"export-{name}", label=label, placeholder=hint, value=query.get(name, ""), debounce=400)
        for name, label, hint in (
            ("model_path", "Model path where the engine will run", "/models/model.gguf"),
            ("draft_model", "Draft model path (optional)", "/models/draft.gguf"),
        )
    )
    context = dmc.NumberInput(
        id="export-context",
        label="Context (tokens; optional)",
        placeholder="the engine's own default",
        value=whole_number(query.get("context"), 0) or "",
        min=1,
        max=99_999_999,
        hideControls=True,
        allowDecimal=False,
        allowNegative=False,
        debounce=400,
    )
    return dmc.SimpleGrid([model, draft, context], cols={"base": 1, "sm": 3}, mt="sm")


def _work(folder: Path) -> Callable[..., Any]:
    """The job for a folder, which it reads by itself: it runs in a process of its own."""

    def work(report: jobs.Report, *values: Any) -> tuple[Any, list[dict[str, str]]]:
        wanted = Wanted(*values)
        report(0, 1, f"exporting to {wanted.target}, and predicting its speed")
        snapshot = Workspace(folder).read(runs=False)
        try:
            made = make_export(snapshot, wanted)
        except StudioError as error:
            if not snapshot.configs:
                return parts.note(NO_CONFIG), []
            return dmc.Alert(str(error), title="Not exported", color="orange", className="problem"), []
        warning = machine_warning(snapshot, wanted.hardware)
        return _result(made, warning), [{"name": file.name, "text": file.text} for file in made.files]

    return work


def _result(made: Export, warning: str) -> Any:
    """All there is to say about an export, and its files."""
    lost = [dmc.ListItem(sentence) for sentence in made.lost]
    all_said = parts.note("Everything that the configuration says can be expressed.")
    notes = [parts.note(sentence) for sentence in made.notes]
    everything = dmc.Button("Download all (zip)", id="export-zip", size="xs")
    command = _copied("export-command", "command", made.command) if made.command else parts.note("There is none.")
    return dmc.Stack(
        [
            parts.section("Predicted speed", *_predictions(made, warning)),
            parts.section("What the target cannot express", dmc.List(lost, size="sm") if lost else all_said, *notes),
            parts.section("Command", command),
            parts.section("Files", *_files(made), controls=everything),
        ],
        gap="md",
    )


def _predictions(made: Export, warning: str) -> list[Any]:
    told: list[Any] = [_prediction("export-predicted", f"With these files ({made.engine})", made.predicted)]
    if made.target != "native":
        told.append(_prediction("export-configured", "The configuration in MoE Offload Studio", made.configured))
    return [parts.badge(warning), *told] if warning else told


def _prediction(element_id: str, what: str, prediction: Prediction) -> Any:
    number = {} if prediction.tpot_ms is None else {"data-value": repr(prediction.tpot_ms)}
    value = html.Div(headline(prediction), id=element_id, className="card-value", **number)
    return html.Div([dmc.Text(what, size="sm", c="dimmed"), value, parts.note(prediction.text)])


def _files(made: Export) -> list[Any]:
    shown = []
    for place, file in enumerate(made.files):
        button = dmc.Button(
            "Download",
            id={"type": "export-file", "place": place},
            size="xs",
            variant="default",
            **{"aria-label": f"Download {file.name}"},
        )
        shown.append(_copied(f"export-text-{place}", file.name, file.text, button))
    return shown


def _copied(element_id: str, name: str, text: str, *buttons: Any) -> Any:
    """A text that can be selected, scrolled by keyboard and copied."""
    copy = dmc.CopyButton(
        value=text,
        children="Copy",
        copiedChildren="Copied",
        size="xs",
        variant="default",
        **{"aria-label": f"Copy {name}"},
    )
    head = dmc.Group([dmc.Text(name, size="sm", fw=500, className="wrap-anywhere"), dmc.Group([copy, *buttons])])
    return html.Div([head, html.Pre(html.Code(text), id=element_id, tabIndex=0, **{"aria-label": name})])
