"""All formats that can be imported: those of `trace_capture.importers`, and those whose files only torch can read."""

from __future__ import annotations

from trace_capture.importers import IMPORTERS, Importer

ALL_IMPORTERS: dict[str, Importer] = dict(IMPORTERS)
