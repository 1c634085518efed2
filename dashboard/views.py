"""Runs and traces as numbers and sentences. Pure: no files, no Dash, no plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dashboard.data import NamedRun
from dashboard.texts import EMULATED, format_ms, format_percent, format_times
from simulator.critical_path import what_limits
from trace_capture.band import ErrorBand
from trace_capture.run import Run
from trace_capture.trace import NO_EXPERT, Phase, Trace

BASELINE = "on-demand"
"""Label of the strategy that speed-ups are counted from."""
NO_RUNS = (
    "No runs in this folder. 'moe-studio demo' fills one; 'moe-studio simulate' adds a predicted run and "
    "'moe-studio run' a measured one."
)
NO_TRACE = "No trace.parquet in this folder. 'moe-studio capture' records one; 'moe-studio demo' makes a whole folder."
NO_TUNED = "No tuned.toml in this folder. 'moe-studio tune' writes one."
PHASES = ("all", "prefill", "decode")


@dataclass(frozen=True)
class ComparisonRow:
    """One strategy: what was predicted beside what was measured. None where there is no such run or number.

    `error_ratio` is predicted over measured less one, as everywhere in the project. The band is a share of the
    predicted TPOT, so being inside it is judged by that.
    """

    label: str
    predicted_tpot_ms: float | None = None
    measured_tpot_ms: float | None = None
    band: ErrorBand | None = None
    error_ratio: float | None = None
    predicted_hit_rate: float | None = None
    measured_hit_rate: float | None = None
    predicted_bytes_per_token: float | None = None
    measured_bytes_per_token: float | None = None
    predicted_speedup: float | None = None
    measured_speedup: float | None = None
    bound_ms: float | None = None
    emulated: bool = False
    warning: str = ""

    @property
    def tpot_ms(self) -> float | None:
        """Measured where there is a measurement, else predicted."""
        return self.predicted_tpot_ms if self.measured_tpot_ms is None else self.measured_tpot_ms

    @property
    def is_inside_band(self) -> bool | None:
        """Whether the measured TPOT lies in the band around the predicted one; None where that is unknown."""
        before, after = self.predicted_tpot_ms, self.measured_tpot_ms
        if before is None or after is None or self.band is None:
            return None
        return self.band.contains(before, after)


@dataclass(frozen=True)
class Comparison:
    """All strategies, fastest first, with sentences about them, or the reason why there are none."""

    rows: tuple[ComparisonRow, ...] = ()
    sentences: tuple[str, ...] = ()
    empty: str = ""

    @property
    def emulated(self) -> bool:
        """Whether any row comes from an emulated link."""
        return any(row.emulated for row in self.rows)


@dataclass(frozen=True)
class TermsView:
    """Parts of TPOT per run: `parts_ms[term][i]` belongs to `labels[i]`; a rest that no term explains is named."""

    labels: tuple[str, ...] = ()
    parts_ms: dict[str, tuple[float, ...]] | None = None
    emulated: bool = False
    sentence: str = ""
    empty: str = ""


@dataclass(frozen=True)
class LoadView:
    """Share of tokens that were routed to each expert, [L, E]; rows of a layer add up to top-k."""

    shares: npt.NDArray[np.float64] | None = None
    layer_ids: tuple[int, ...] = ()
    uniform_share: float = 0.0
    num_tokens: int = 0
    sentence: str = ""
    empty: str = ""


def compare(runs: Sequence[NamedRun]) -> Comparison:
    """Pair simulated and measured runs of the same label."""
    rows = [_row(label, predicted, measured) for label, predicted, measured in pair_runs(runs)]
    if not rows:
        return Comparison(empty=NO_RUNS)
    baseline = next((row for row in rows if row.label == BASELINE), None)
    rows = [_with_speedup(row, baseline) for row in rows]
    rows.sort(key=lambda row: (row.tpot_ms is None, row.tpot_ms or 0.0, row.label))
    return Comparison(tuple(rows), tuple(_sentences(rows)))


def pair_runs(runs: Sequence[NamedRun]) -> list[tuple[str, NamedRun | None, NamedRun | None]]:
    """(label, simulated, measured) per strategy. A label that occurs several times gets its file names added."""
    groups: dict[str, dict[str, list[NamedRun]]] = {}
    for item in runs:
        group = groups.setdefault(item.run.info.label, {"simulated": [], "measured": []})
        group[item.run.info.kind].append(item)
    pairs: list[tuple[str, NamedRun | None, NamedRun | None]] = []
    for label, group in groups.items():
        simulated, measured = group["simulated"], group["measured"]
        for index in range(max(len(simulated), len(measured))):
            predicted = simulated[index] if index < len(simulated) else None
            actual = measured[index] if index < len(measured) else None
            names = " / ".join(item.name for item in (predicted, actual) if item is not None)
            pairs.append((label if index == 0 else f"{label} ({names})", predicted, actual))
    return pairs


def tpot_terms(runs: Sequence[NamedRun]) -> TermsView:
    """The parts of TPOT of every run that names them, in the order of the comparison."""
    order = {row.label: place for place, row in enumerate(compare(runs).rows)}
    bars: list[tuple[int, str, Run]] = []
    for label, predicted, measured in pair_runs(runs):
        for item in (predicted, measured):
            if item is not None and item.run.metrics.tpot_terms_ms:
                kind = "predicted" if item.run.info.kind == "simulated" else "measured"
                bars.append((order[label], f"{label}, {kind}", item.run))
    if not bars:
        return TermsView(empty=NO_RUNS if not runs else "No run here says what its time per token is made of.")
    bars.sort(key=lambda bar: bar[0])
    parts = [_parts_of(run) for _, _, run in bars]
    names = list(dict.fromkeys(name for part in parts for name in part))
    return TermsView(
        labels=tuple(label for _, label, _ in bars),
        parts_ms={name: tuple(part.get(name, 0.0) for part in parts) for name in names},
        emulated=any(run.info.emulated for _, _, run in bars),
        sentence=f"{bars[0][1]}. {what_limits(bars[0][2])}",
    )


def expert_load(trace: Trace | None, phase: str = "all") -> LoadView:
    """How often each expert of each layer was chosen, as a share of the tokens that the layer routed."""
    if trace is None:
        return LoadView(empty=NO_TRACE)
    rows = _rows_of_phase(trace, phase)
    if not len(rows):
        return LoadView(empty=f"The trace has no {'' if phase == 'all' else phase + ' '}tokens; choose another phase.")
    layers, experts = trace.shape.num_moe_layers, trace.shape.num_experts
    counts = np.zeros((layers, experts), dtype=np.int64)
    routed = np.zeros(layers, dtype=np.int64)
    for layer in range(layers):
        ids = trace.experts[rows, layer].ravel()
        ids = ids[ids != NO_EXPERT]
        counts[layer] = np.bincount(ids, minlength=experts)
        routed[layer] = len(ids) // trace.shape.top_k
    shares = counts / np.maximum(1, routed)[:, None]  # [L, E]
    uniform = trace.shape.top_k / experts
    return LoadView(shares, trace.shape.moe_layer_ids, uniform, len(rows), _load_sentence(shares, trace, uniform))


def run_title(item: NamedRun) -> str:
    """A run as it is called in lists and headings."""
    kind = "predicted" if item.run.info.kind == "simulated" else "measured"
    return f"{item.run.info.label}, {kind}" + (f" ({EMULATED})" if item.run.info.emulated else "")


def _row(label: str, predicted: NamedRun | None, measured: NamedRun | None) -> ComparisonRow:
    simulated = predicted.run if predicted is not None else None
    actual = measured.run if measured is not None else None
    before, after = _tpot(simulated), _tpot(actual)
    return ComparisonRow(
        label=label,
        predicted_tpot_ms=before,
        measured_tpot_ms=after,
        band=simulated.info.error_band if simulated is not None else None,
        error_ratio=before / after - 1 if after and before is not None else None,
        predicted_hit_rate=_hit_rate(simulated),
        measured_hit_rate=_hit_rate(actual),
        predicted_bytes_per_token=_bytes_per_token(simulated),
        measured_bytes_per_token=_bytes_per_token(actual),
        bound_ms=_known(simulated.info.bounds.get("max_ms")) if simulated is not None else None,
        emulated=any(run.info.emulated for run in (simulated, actual) if run is not None),
        warning=_mismatch(simulated, actual),
    )


def _mismatch(simulated: Run | None, actual: Run | None) -> str:
    """Why a predicted and a measured run of one label should not be compared; empty where nothing speaks against."""
    if simulated is None or actual is None:
        return ""
    for name, what in (("model", "models"), ("trace_digest", "traces"), ("hardware_digest", "hardware profiles")):
        before, after = getattr(simulated.info, name), getattr(actual.info, name)
        if before and after and before != after:
            return f"predicted and measured runs are of different {what}"
    return ""


def _with_speedup(row: ComparisonRow, baseline: ComparisonRow | None) -> ComparisonRow:
    if baseline is None:
        return row
    speedups: dict[str, float | None] = {}
    for kind in ("predicted", "measured"):
        slow, fast = getattr(baseline, f"{kind}_tpot_ms"), getattr(row, f"{kind}_tpot_ms")
        speedups[kind] = slow / fast if slow and fast else None
    return replace(row, predicted_speedup=speedups["predicted"], measured_speedup=speedups["measured"])


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _tpot(run: Run | None) -> float | None:
    if run is None or not run.metrics.decode_tokens:
        return None
    return _known(run.metrics.tpot_ms)


def _hit_rate(run: Run | None) -> float | None:
    return _known(run.metrics.decode_hit_rate) if run is not None and run.metrics.decode_tokens else None


def _bytes_per_token(run: Run | None) -> float | None:
    return _known(run.metrics.bytes_per_token) if run is not None and run.metrics.decode_tokens else None


def _parts_of(run: Run) -> dict[str, float]:
    """The terms of a run; what they leave open of TPOT, if more than half a percent, is called unexplained."""
    parts = {name: value for name, value in run.metrics.tpot_terms_ms.items() if math.isfinite(value)}
    rest = run.metrics.tpot_ms - sum(parts.values())
    if math.isfinite(rest) and rest > 0.005 * run.metrics.tpot_ms:
        parts["unexplained"] = rest
    return parts


def _rows_of_phase(trace: Trace, phase: str) -> npt.NDArray[np.intp]:
    if phase == "prefill":
        return np.flatnonzero(trace.phase == Phase.PREFILL)
    if phase == "decode":
        return np.flatnonzero(trace.phase != Phase.PREFILL)
    return np.arange(trace.num_tokens)


def _load_sentence(shares: npt.NDArray[np.float64], trace: Trace, uniform: float) -> str:
    layer, expert = np.unravel_index(int(np.argmax(shares)), shares.shape)
    quarter = max(1, shares.shape[1] // 4)
    top = float(np.sort(shares, axis=1)[:, -quarter:].sum() / max(1e-12, shares.sum()))
    return (
        f"The busiest expert is {expert} of layer {trace.shape.moe_layer_ids[layer]}: "
        f"{format_percent(float(shares[layer, expert]))} of tokens, where an even load would be "
        f"{format_percent(uniform)}. The busiest quarter of each layer's experts takes {format_percent(top, digits=0)} "
        f"of its load."
    )


def _sentences(rows: Sequence[ComparisonRow]) -> list[str]:
    found = []
    best = rows[0]
    if best.tpot_ms is not None:
        kind = "measured" if best.measured_tpot_ms is not None else "predicted, not measured"
        speedup = best.measured_speedup if best.measured_tpot_ms is not None else best.predicted_speedup
        faster = f", {format_times(speedup)} the speed of {BASELINE}" if speedup and best.label != BASELINE else ""
        found.append(f"Fastest: {best.label} with {format_ms(best.tpot_ms)} per output token ({kind}){faster}.")
    errors = [abs(row.error_ratio) for row in rows if row.error_ratio is not None]
    if errors:
        judged = [row.is_inside_band for row in rows if row.is_inside_band is not None]
        band = f"; {sum(judged)} of {len(judged)} lie inside the band" if judged else "; no band was validated"
        found.append(
            f"Predicted differs from measured by {format_percent(sum(errors) / len(errors))} on average, "
            f"{format_percent(max(errors))} at most{band}."
        )
    else:
        found.append("No strategy has both a predicted and a measured run, so predictions are not checked here.")
    return found + [f"{row.label}: {row.warning}." for row in rows if row.warning]
