"""All formats that can be imported: those of `trace_capture.importers`, and those whose files only torch can read."""

from __future__ import annotations

from runtime.sglang_recorder import is_torch_file, read_recorder
from trace_capture.importers import IMPORTERS, Importer

ALL_IMPORTERS: dict[str, Importer] = IMPORTERS | {
    "sglang-recorder": Importer(
        "SGLang's expert distribution recorder and kt-kernel 'logical_count', .pt (needs torch)",
        "either",
        is_torch_file,
        read_recorder,
    ),
}
