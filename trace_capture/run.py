"""A run: what one strategy did with one workload, simulated or measured. Both are this one type.

A run is two files: `<name>.run.json`, a summary for people and programs, and `<name>.spans.parquet`, the timeline.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, model_validator

from trace_capture.band import ErrorBand, from_old_fields
from trace_capture.errors import TraceError
from trace_capture.files import atomic_path, write_text_atomic

RUN_SCHEMA_VERSION = 1
RUN_SUFFIX = ".run.json"
SPANS_SUFFIX = ".spans.parquet"

TRACKS = ("link", "device", "cpu", "host")
"""Serial servers: spans on one track never overlap."""
SPAN_KINDS = ("load", "dense", "experts", "cpu_experts", "stall", "decide", "overhead", "drafting", "evict")
"""`cpu_experts` is the device waiting for what the CPU runs, which is `experts` on the CPU's track. `evict` is a
moment, not work: a span of no length on the host's track at which an expert's place was given up, so that what is on
the device can be told from the loads' ends and these."""
REASONS = ("", "demand", "prefetch", "utility", "admission", "preload")
"""`admission`: an expert that the CPU ran is loaded for later; `preload`: before the first pass."""


class Span(NamedTuple):
    """One piece of work on one track. Times are nanoseconds since the run began; `expert` is -1 for none.

    For loads, `submit_ns` is when the copy was queued and `used_pass` the pass in which an expert that was prefetched
    was first asked for; -1 where that is not known, or it never was.
    """

    track: str
    kind: str
    start_ns: int
    end_ns: int
    pass_id: int
    layer: int
    expert: int = -1
    num_bytes: int = 0
    reason: str = ""
    submit_ns: int = -1
    used_pass: int = -1


class RunPass(NamedTuple):
    """One forward pass: its phase (`trace_capture.trace.Phase`), the tokens in it, the number of its prompt, and the
    tokens that it adds to the output."""

    phase: int
    tokens: int
    sequence: int
    output_tokens: int


class Metrics(BaseModel):
    """The figures of a run. `hit` means the expert was on the device when its layer asked for it."""

    model_config = ConfigDict(extra="forbid")

    prefill_tokens: int = 0
    decode_tokens: int = 0
    """Output tokens of decode and verify passes: one per decode pass; per verify pass the accepted drafts and one."""
    drafted_tokens: int = 0
    """Drafts that verify passes had."""
    accepted_drafts: int = 0
    """Those of them that were kept."""
    ttft_ms: float = 0.0
    """Time to first token: mean over sequences of the prefill pass."""
    tpot_ms: float = 0.0
    """Time per output token: mean over output tokens; rejected drafts are not output."""
    tpot_p90_ms: float = 0.0
    tpot_terms_ms: dict[str, float] = Field(default_factory=dict)
    """Parts of `tpot_ms` by name; they add up to it."""
    stall_parts_ms: dict[str, float] = Field(default_factory=dict)
    """Parts of the term `stall` by what the link was busy with (`simulator.stalls`); they add up to it. Empty where
    nobody asked."""
    dense_parts_ms: dict[str, float] = Field(default_factory=dict)
    """Parts of the term `dense`, such as attention and router; they add up to it. Empty where they are not known."""
    link_busy_ms: float = 0.0
    """Time of the copies over the link per decode token, hidden or not; 0 where it is not known."""
    tokens_per_s: float = 0.0
    lookups: int = 0
    hits: int = 0
    late_prefetches: int = 0
    """Look-ups whose copy was under way, so that only a rest of it was waited for."""
    hit_rate: float = 0.0
    """hits / lookups, prefill included."""
    decode_hit_rate: float = 0.0
    """hits / lookups over decode passes alone."""
    loads: int = 0
    demand_loads: int = 0
    prefetch_loads: int = 0
    prefetch_used: int = 0
    """Prefetched experts that their layer then asked for."""
    cpu_runs: int = 0
    """Experts run on the CPU, once per layer and pass; they are look-ups like all others."""
    admission_loads: int = 0
    """Loads of experts that had run on the CPU."""
    evictions: int = 0
    bytes_loaded: int = 0
    bytes_per_token: float = 0.0
    """Bytes over the link per decode token."""


class RunInfo(BaseModel):
    """What was run, on what, with which inputs."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _old_band(cls, values: Any) -> Any:
        return from_old_fields(values)

    schema_version: int = RUN_SCHEMA_VERSION
    kind: Literal["simulated", "measured"]
    label: str
    emulated: bool
    """True when the device or its link is emulated: shown wherever the figures are."""
    model: str
    hardware: str
    hardware_digest: str = ""
    trace_digest: str = ""
    config: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    warmup_passes: int = 0
    """Decode passes at the start that are in the timeline and in no figure."""
    preloaded_experts: int = 0
    """Experts that were on the device before the first pass; their loads are in no figure."""
    metrics: Metrics
    error_band: ErrorBand | None = None
    """Around a predicted TPOT; None where nothing was validated."""
    bounds: dict[str, float] = Field(default_factory=dict)
    """Lower bounds on TPOT in ms by name, and the best possible hit rate."""
    notes: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One simulated or measured run.

    Attributes:
        info: provenance and metrics.
        token_ns: duration of each decode pass, int64 [decode passes].
        spans: the timeline, possibly empty.
        texts: generated texts of a measured run.
        passes: the forward passes in order; empty in records of an older program.
    """

    info: RunInfo
    token_ns: npt.NDArray[np.int64]
    spans: tuple[Span, ...] = ()
    texts: tuple[str, ...] = ()
    passes: tuple[RunPass, ...] = ()

    @property
    def metrics(self) -> Metrics:
        """The figures of the run."""
        return self.info.metrics

    @property
    def regret_ratio(self) -> float | None:
        """TPOT over the best bound, at least 1; None where there is no bound."""
        bound_ms = self.info.bounds.get("max_ms", 0.0)
        return self.metrics.tpot_ms / bound_ms if bound_ms > 0 else None

    def save(self, folder: Path, name: str) -> Path:
        """Write `<name>.run.json` and `<name>.spans.parquet` into `folder`; give the path of the first."""
        folder = Path(folder)
        summary = folder / f"{name}{RUN_SUFFIX}"
        with atomic_path(folder / f"{name}{SPANS_SUFFIX}") as temporary:
            pq.write_table(spans_table(self.spans), temporary, compression="zstd")
        record = {"info": self.info.model_dump(), "token_ns": self.token_ns.tolist(), "texts": list(self.texts)}
        record["passes"] = [list(item) for item in self.passes]
        write_text_atomic(summary, json.dumps(record, indent=1) + "\n")
        return summary

    @staticmethod
    def load(path: Path, spans: bool = True) -> Run:
        """Read a run by its `.run.json`.

        Args:
            path: the summary.
            spans: also read its timeline, which may be long.

        Raises:
            TraceError: the file is missing, damaged or of another schema version.
        """
        path = Path(path)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            version = record["info"]["schema_version"]
            if version != RUN_SCHEMA_VERSION:
                raise TraceError(f"{path} has run schema version {version}, this program reads {RUN_SCHEMA_VERSION}")
            info = RunInfo.model_validate(record["info"])
            token_ns = np.asarray(record["token_ns"], dtype=np.int64)
            texts = tuple(record["texts"])
            passes = tuple(RunPass(*map(int, item)) for item in record.get("passes", ()))
        except OSError as error:
            raise TraceError(f"cannot read run {path}: {error.strerror}; give a {RUN_SUFFIX} file") from error
        except TraceError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"{path} is not a run record ({str(error).splitlines()[0]}); run it again") from error
        return Run(info, token_ns, _read_spans(path) if spans else (), texts, passes)


_LATER_FIELDS = ("submit_ns", "used_pass")
"""Columns that timelines of an older program lack."""


def spans_table(spans: tuple[Span, ...]) -> pa.Table:
    """Spans as an Arrow table, one column per field of `Span`."""
    columns = list(zip(*spans, strict=True)) if spans else [()] * len(Span._fields)
    kinds = {name: pa.int64() for name in ("start_ns", "end_ns", "num_bytes", "submit_ns")}
    kinds |= {name: pa.int32() for name in ("pass_id", "layer", "expert", "used_pass")}
    arrays = [
        pa.array(column, type=kinds.get(name, pa.string())) for name, column in zip(Span._fields, columns, strict=True)
    ]
    return pa.table(arrays, names=list(Span._fields))


def _read_spans(summary: Path) -> tuple[Span, ...]:
    path = summary.with_name(summary.name.removesuffix(RUN_SUFFIX) + SPANS_SUFFIX)
    if not path.is_file():
        return ()
    try:
        table = pq.read_table(path)
        names = [name for name in Span._fields if name in table.column_names or name not in _LATER_FIELDS]
        columns = [table.column(name).to_pylist() for name in names]
        return tuple(Span(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True))
    except (pa.ArrowInvalid, KeyError, OSError) as error:
        raise TraceError(f"{path} cannot be read ({str(error).splitlines()[0]}); run it again") from error
