"""What a folder holds, one row per file: runs, traces, hardware profiles, configurations, validation records."""

from __future__ import annotations

from dataclasses import dataclass

from dashboard.data import NamedRun, Snapshot
from dashboard.texts import EMULATED, format_bytes, format_percent, plural
from trace_capture.run import RUN_SUFFIX


@dataclass(frozen=True)
class InventoryRow:
    """One file: its kind and name, what it is about, and of a run the time per output token and hit rate in decode."""

    kind: str
    name: str
    about: str
    tpot_ms: float | None = None
    hit_rate: float | None = None


def inventory(snapshot: Snapshot) -> tuple[InventoryRow, ...]:
    """The files that could be read, runs first."""
    rows = [_run_row(item) for item in snapshot.runs]
    for item in snapshot.traces:
        shape, trace = item.trace.shape, item.trace
        predictors = ", ".join(sorted(trace.predicted))
        about = (
            f"{shape.name}: {plural(trace.num_tokens, 'token')} in {plural(len(trace.passes), 'pass')}, "
            f"{shape.num_moe_layers} layers × {shape.num_experts} experts, top-{shape.top_k}"
            + (f"; predicted by {predictors}" if predictors else "")
            + ("" if trace.info.complete else "; capture did not end")
        )
        rows.append(InventoryRow("trace", item.name, about))
    for entry in snapshot.profiles:
        link = entry.profile.link
        emulated = f"; {EMULATED}" if entry.profile.emulated else ""
        about = f"{entry.profile.name}: {link.name}, {format_bytes(link.h2d_bytes_per_s.value)}/s{emulated}"
        rows.append(InventoryRow("hardware profile", entry.name, about))
    for config in snapshot.configs:
        rows.append(InventoryRow("configuration", config.name, config.config.label or config.config.cache.policy))
    for found in snapshot.records:
        record = found.record
        band = next(band for band in record.bands if band.family == "any")
        about = (
            f"{record.source}: {plural(len(record.pairs), 'pair')}, "
            f"median error {format_percent(band.median_abs_error)}{'; ' + EMULATED if record.emulated else ''}"
        )
        rows.append(InventoryRow("validation record", found.name, about))
    return tuple(rows)


def _run_row(item: NamedRun) -> InventoryRow:
    info, metrics = item.run.info, item.run.metrics
    kind = "predicted run" if info.kind == "simulated" else "measured run"
    about = f"{info.label}: {info.model} on {info.hardware}" + (f"; {EMULATED}" if info.emulated else "")
    has_decode = metrics.decode_tokens > 0
    tpot_ms, hit_rate = (metrics.tpot_ms, metrics.decode_hit_rate) if has_decode else (None, None)
    return InventoryRow(kind, f"{item.name}{RUN_SUFFIX}", about, tpot_ms, hit_rate)
