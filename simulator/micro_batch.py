"""Prompts that are read in pieces: chunked prefill."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trace_capture.trace import Phase, Trace


def split_prefill(trace: Trace, micro_batch: int | None) -> Trace:
    """The same rows with every prefill pass cut into passes of at most `micro_batch` tokens; None: as it is.

    Smaller passes hold less at once and load experts again that several of them ask for (llama.cpp's `-ub`).
    """
    if micro_batch is None:
        return trace
    begins = np.zeros(trace.num_tokens, dtype=np.int32)
    for item in trace.passes:
        step = micro_batch if item.phase == Phase.PREFILL else item.stop - item.start
        begins[item.start : item.stop : step] = 1
    return replace(trace, pass_id=np.cumsum(begins, dtype=np.int32) - 1)
