"""A `.npy` file of routed experts: vLLM's `CompletionOutput.routed_experts`, saved with numpy.

[rows, F, K] of one prompt and its continuation; F is the MoE layers or all decoder layers, with zeros in dense ones.
The last sampled token has no row.
"""

from __future__ import annotations

from pathlib import Path

from trace_capture.errors import TraceError
from trace_capture.importers.assemble import split_at_prompt, to_trace
from trace_capture.importers.formats import FileHead, ImportOptions, provenance
from trace_capture.importers.responses import load_npy
from trace_capture.importers.routed_rows import routed_rows
from trace_capture.trace import Trace


def is_array(head: FileHead) -> bool:
    """Whether a file is a numpy array."""
    return head.start.startswith(b"\x93NUMPY")


def read_array(path: Path, options: ImportOptions) -> Trace:
    """Read the array of one sequence.

    Raises:
        TraceError: cut, not of whole numbers in three axes, or its rows are impossible or do not fit the model.
    """
    shape, prompt_tokens = options.require_shape(path), options.require_prompt_tokens(path)
    try:
        with path.open("rb") as stream:
            values = load_npy(stream, str(path))
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}; give the path of a recorded array") from error
    rows = routed_rows(values, shape, str(path))
    notes = rows.notes
    if rows.dropped:
        notes = (*notes, f"the {prompt_tokens} prompt tokens are counted behind the rows that were left out")
    sequence = split_at_prompt(rows.experts, prompt_tokens, str(path))
    return to_trace(rows.shape, [sequence], "routed-array", provenance(path, notes), str(path))
