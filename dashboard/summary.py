"""The cards on top of a page: model, hardware, fastest strategy, prediction error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dashboard.data import NamedRun, Snapshot
from dashboard.texts import (
    EMULATED,
    format_bytes,
    format_ms,
    format_percent,
    format_times,
    plural,
    short_digest,
)
from dashboard.views import BASELINE, Comparison, compare
from trace_capture.hardware import HardwareProfile


@dataclass(frozen=True)
class Card:
    """A summary: a title, one value, a line of detail, and perhaps a label that must not be overlooked."""

    title: str
    value: str
    detail: str = ""
    badge: str = ""


def summary_cards(snapshot: Snapshot) -> tuple[Card, ...]:
    """Model, hardware, fastest strategy and prediction error, as far as the folder knows them."""
    comparison = compare(snapshot.runs)
    return (
        _model_card(snapshot),
        _hardware_card(snapshot.hardware, snapshot.runs),
        _best_card(comparison),
        _error_card(comparison),
    )


def _model_card(snapshot: Snapshot) -> Card:
    if snapshot.trace is None:
        names = sorted({item.run.info.model for item in snapshot.runs})
        return Card("Model", ", ".join(names) or "unknown", "no trace here, so its routing is not known")
    trace, shape = snapshot.trace, snapshot.trace.shape
    detail = (
        f"{shape.num_moe_layers} layers × {shape.num_experts} experts, top-{shape.top_k}; "
        f"{plural(trace.num_tokens, 'token')} in {plural(len(trace.passes), 'pass')}; "
        f"trace {short_digest(trace.digest)}"
    )
    return Card("Model", shape.name, detail, "" if trace.info.complete else "capture did not end")


def _hardware_card(profile: HardwareProfile | None, runs: Sequence[NamedRun]) -> Card:
    if profile is None:
        names = sorted({item.run.info.hardware for item in runs})
        emulated = any(item.run.info.emulated for item in runs)
        return Card("Hardware", ", ".join(names) or "unknown", "no hardware.toml here", EMULATED if emulated else "")
    link = profile.link
    detail = f"{link.name}: {format_bytes(link.h2d_bytes_per_s.value)}/s ({link.h2d_bytes_per_s.kind})"
    return Card("Hardware", profile.name, detail, EMULATED if profile.emulated else "")


def _best_card(comparison: Comparison) -> Card:
    if not comparison.rows or comparison.rows[0].tpot_ms is None:
        return Card("Fastest strategy", "unknown", "no run with decode tokens here")
    row = comparison.rows[0]
    is_measured = row.measured_tpot_ms is not None
    speedup = row.measured_speedup if is_measured else row.predicted_speedup
    detail = f"{row.label}, {'measured' if is_measured else 'predicted'}"
    if speedup and row.label != BASELINE:
        detail += f"; {format_times(speedup)} the speed of {BASELINE}"
    return Card("Fastest strategy", f"{format_ms(row.tpot_ms)} / token", detail, EMULATED if row.emulated else "")


def _error_card(comparison: Comparison) -> Card:
    errors = [abs(row.error_ratio) for row in comparison.rows if row.error_ratio is not None]
    if not errors:
        return Card("Prediction error", "not known", "needs a predicted and a measured run of one label")
    bands = [row.band for row in comparison.rows if row.band is not None and row.error_ratio is not None]
    widest = max(bands, key=lambda band: band.half_width_ratio, default=None)
    band = f"band {widest.text()}" if widest else "no validated band"
    emulated = any(row.emulated for row in comparison.rows if row.error_ratio is not None)
    return Card(
        "Prediction error",
        f"{format_percent(sum(errors) / len(errors))} mean",
        f"{format_percent(max(errors))} at most over {plural(len(errors), 'strategy').replace('ys', 'ies')}; {band}",
        EMULATED if emulated else "",
    )
