"""Options that turn a decoded trace into one of speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trace_capture.trace import Trace

Drafts = Annotated[int | None, typer.Option(min=0, help="What if so many tokens were drafted per verify pass?")]
Acceptance = Annotated[float, typer.Option(min=0, max=1, help="Share of drafts that are kept, with --drafts.")]
DraftMib = Annotated[float, typer.Option(min=0, help="Weights of the draft model, with --drafts; 0 for look-up.")]
DEFAULT_ACCEPTANCE = 0.7


def with_drafts(trace: Trace, drafts: int | None, acceptance: float, draft_mib: float = 0.0) -> Trace:
    """The trace as it is, or re-windowed where drafts are asked for."""
    if drafts is None:
        return trace
    from trace_capture.rewindow import rewindow

    return rewindow(trace, drafts, acceptance, draft_bytes=round(draft_mib * 2**20))
