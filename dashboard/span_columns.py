"""A timeline as arrays, so that a window of many thousand spans is cut and added up without a loop over spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_capture.run import TRACKS, Span

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpanColumns:
    """Spans on known tracks in order of their start, one array [N] per field of `Span`.

    Attributes:
        concepts: what colours stand for: a load's reason, or the kind of work.
        concept: place in `concepts` of each span.
        track: place in `trace_capture.run.TRACKS`.
        order: place of each span in the run.
        is_moment: evictions, which have no length.
        start_ns, end_ns, pass_id, layer, expert, num_bytes: as in `Span`.
        pass_ids: passes in order of their start.
        pass_starts_ns, pass_ends_ns: first start and last end in each of `pass_ids`.
    """

    concepts: tuple[str, ...]
    concept: Ints
    track: Ints
    order: Ints
    is_moment: npt.NDArray[np.bool_]
    start_ns: Ints
    end_ns: Ints
    pass_id: Ints
    layer: Ints
    expert: Ints
    num_bytes: Ints
    pass_ids: Ints
    pass_starts_ns: Ints
    pass_ends_ns: Ints

    def __len__(self) -> int:
        return len(self.start_ns)


def span_columns(spans: Sequence[Span]) -> SpanColumns:
    """The columns of a run's spans; those on tracks that are not known are left out."""
    known = [(place, span) for place, span in enumerate(spans) if span.track in TRACKS]
    known.sort(key=lambda item: item[1].start_ns)
    chosen = [span for _, span in known]
    names = [concept_of(span) for span in chosen]
    concepts = tuple(dict.fromkeys(names))
    place_of = {name: place for place, name in enumerate(concepts)}
    pass_id, start_ns, end_ns = (_ints(span[field] for span in chosen) for field in (4, 2, 3))
    pass_ids, starts, ends = _passes(pass_id, start_ns, end_ns)
    return SpanColumns(
        concepts=concepts,
        concept=_ints(place_of[name] for name in names),
        track=_ints(TRACKS.index(span.track) for span in chosen),
        order=_ints(place for place, _ in known),
        is_moment=np.array([span.kind == "evict" for span in chosen], dtype=np.bool_),
        start_ns=start_ns,
        end_ns=end_ns,
        pass_id=pass_id,
        layer=_ints(span.layer for span in chosen),
        expert=_ints(span.expert for span in chosen),
        num_bytes=_ints(span.num_bytes for span in chosen),
        pass_ids=pass_ids,
        pass_starts_ns=starts,
        pass_ends_ns=ends,
    )


def concept_of(span: Span) -> str:
    """What a span's colour stands for: a load's reason, or the kind of work."""
    return f"{span.reason or 'demand'} load" if span.kind == "load" else span.kind


def _ints(values: Any) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _passes(pass_id: Ints, start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints, Ints]:
    """Passes in order of their start, with that start and their last end."""
    ids, place = np.unique(pass_id, return_inverse=True)
    starts = np.full(len(ids), np.iinfo(np.int64).max)
    ends = np.full(len(ids), np.iinfo(np.int64).min)
    np.minimum.at(starts, place, start_ns)
    np.maximum.at(ends, place, end_ns)
    order = np.argsort(starts, kind="stable")
    return ids[order], starts[order], ends[order]
