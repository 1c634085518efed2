"""What the export page says, and the files it hands out. Pure: no Dash, no plotly."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dashboard.data import Snapshot
from dashboard.machines import machine_named
from dashboard.texts import EMULATED, format_ms
from simulator.exports import Export, ExportOptions, export
from simulator.exports.inputs import tuned_format, tuned_shape
from simulator.exports.prediction import Prediction
from simulator.policies.config import OffloadConfig
from trace_capture.errors import ConfigError
from trace_capture.trace import Trace

NO_CONFIG = (
    "There is no configuration in this folder. Make one on the Tune page, or with "
    "'moe-studio tune trace.parquet --out tuned.toml'."
)
NO_TRACE_CHOSEN = "choose a trace of it, which says how many layers and experts it has"
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Wanted:
    """What the controls are set to; names are those of the folder, of targets and of shipped machines."""

    config: str | None
    target: str
    trace: str | None
    hardware: str | None
    model_path: str | None = None
    draft_model: str | None = None
    context: int | None = None


def make_export(snapshot: Snapshot, wanted: Wanted) -> Export:
    """The export of what was chosen, by the same library call as on the command line. It may simulate for a while.

    Raises:
        StudioError: nothing was chosen, or `simulator.exports.export` refuses it.
    """
    named = next((item for item in snapshot.configs if item.name == wanted.config), None)
    if named is None:
        raise ConfigError(NO_CONFIG if not snapshot.configs else "choose a configuration")
    found = next((item.trace for item in snapshot.traces if item.name == wanted.trace), None)
    trace = None if found is None else _in_tuned_format(named.config, found)
    try:
        shape = tuned_shape(named.config) if trace is None else trace.shape
    except ConfigError as error:
        raise ConfigError(f"{named.name} does not tell its model well enough: {NO_TRACE_CHOSEN}") from error
    return export(
        named.config,
        wanted.target,
        shape,
        hardware=machine_named(snapshot, wanted.hardware),
        trace=trace,
        options=ExportOptions(wanted.model_path or None, wanted.draft_model or None, wanted.context or None),
    )


def _in_tuned_format(config: OffloadConfig, trace: Trace) -> Trace:
    weights = tuned_format(config, trace.shape)
    if weights is None:
        return trace
    return replace(trace, info=trace.info.model_copy(update={"shape": trace.shape.with_weights(weights)}))


def headline(prediction: Prediction) -> str:
    """The number with its band, or that there is none."""
    if prediction.tpot_ms is None or prediction.band is None:
        return "no predicted speed"
    low_ms, high_ms = (prediction.tpot_ms * ratio for ratio in (prediction.band.low_ratio, prediction.band.high_ratio))
    return f"{format_ms(prediction.tpot_ms)} per output token ({format_ms(low_ms)} to {format_ms(high_ms)})"


def machine_warning(snapshot: Snapshot, hardware: str | None) -> str:
    """The label of an emulated link where the chosen machine has one."""
    profile = machine_named(snapshot, hardware)
    return EMULATED if profile is not None and profile.emulated else ""


def archive_name(config: str, target: str) -> str:
    """Name of the file that holds all files of an export, such as `tuned-llama.cpp.zip`."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{config.removesuffix('.toml')}-{target}").strip("-.")
    return f"{stem or 'export'}.zip"


def zip_of(files: Sequence[Mapping[str, str]]) -> bytes:
    """Files (`name`, `text`) as one archive, the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.writestr(zipfile.ZipInfo(file["name"], _ZIP_TIME), file["text"], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
