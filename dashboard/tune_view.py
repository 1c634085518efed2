"""A tuning as numbers and sentences for its page. Pure: no Dash, no plotly."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dashboard.texts import format_bytes, format_ms, format_times, plural
from dashboard.views import Comparison, ComparisonRow
from simulator.policies.capacity import even_slots, plan_capacity
from simulator.policies.config import OffloadConfig
from simulator.tune import TuneResult
from trace_capture.band import ErrorBand
from trace_capture.model_shape import ModelShape
from trace_capture.run import Run

NATIVE, ON_CPU = "as routed", "on the CPU"
"""Modes of layers that nothing is predicted for, and of those that take no slots."""
MODES = (NATIVE, "hint", "verify", "commit", ON_CPU)

_PACE_STEPS = 16

TuneRecord = Mapping[str, Any]
"""What `tune_record` gives: plain JSON, so that the browser can keep it."""


def tune_record(result: TuneResult, shape: ModelShape, *, emulated: bool) -> dict[str, Any]:
    """All that the page shows of a tuning, as plain JSON."""
    return {
        "config": result.config.model_dump(mode="json", exclude_none=True),
        "title": result.config.title,
        "objective": result.objective,
        "trials": result.trials,
        "emulated": emulated,
        "candidates": [
            {
                "place": place,
                "label": one.config.title,
                "tpot_ms": one.train_tpot_ms,
                "ttft_ms": one.figures.ttft_ms,
                "hit_percent": 100 * one.train_hit_rate,
                "device_mib": one.figures.device_bytes / 2**20,
                "kl_nats": one.kl_nats,
            }
            for place, one in enumerate(result.candidates, start=1)
        ],
        "front": [asdict(point) for point in result.front],
        "chosen": _held_out(result.chosen),
        "baseline": _held_out(result.baseline),
        "regret_ms": result.regret_ms,
        "layers": layer_map(result.config, shape),
        "tau": tau_rows(result.config),
        "notes": list(result.notes),
    }


def layer_map(config: OffloadConfig, shape: ModelShape) -> dict[str, Any]:
    """Per MoE layer: decoder layer, slots (None where all layers share one pool), slots of an even split, mode [L].

    Raises:
        ConfigError: the configuration does not fit the model.
    """
    count = shape.num_moe_layers
    on_cpu = config.cpu.whole_layers(count)
    capacity = plan_capacity(config.cache, shape, on_cpu)
    slots = None
    if config.cache.scope == "layer":
        sizes = zip(capacity.partition_bytes, shape.expert_bytes, strict=True)
        slots = [0 if layer in on_cpu else part // each for layer, (part, each) in enumerate(sizes)]
    predicted = config.prefetch.modes(count) if config.prefetch.source != "none" else ("",) * count
    modes = [NATIVE if layer == 0 or not mode else mode for layer, mode in enumerate(predicted)]
    return {
        "ids": list(shape.moe_layer_ids),
        "experts": shape.num_experts,
        "slots": slots,
        "even": list(even_slots(capacity.total_bytes, shape, on_cpu)) if slots is not None else None,
        "pool_bytes": capacity.total_bytes,
        "modes": [ON_CPU if layer in on_cpu else mode for layer, mode in enumerate(modes)],
    }


def tau_rows(config: OffloadConfig) -> list[list[str]]:
    """What is decided by the utility of experts, as (what, how); nothing where utilities are not kept."""
    utility = config.utility
    if not config.needs_utility:
        return []
    rows = [["signal", utility.signal], ["boundaries of states", utility.boundaries]]
    rows += [["drafts per pass (gamma)", str(utility.gamma)], ["loads by utility", utility.loads]]
    if config.needs_expert_times:
        scope = "one for each layer" if utility.scope == "layer" else "one for all layers"
        chosen = f"chosen by the balancer before each pass, {scope}"
        rows.append(["threshold tau", chosen if utility.tau is None else str(utility.tau)])
        rows.append(
            ["balanced for", f"the {utility.objective} side" if utility.tau is None else "nothing, tau is fixed"]
        )
        rows.append(["time in which loads must hide", utility.window])
    return rows


def held_out_comparison(record: TuneRecord) -> Comparison:
    """The chosen configuration beside plain LRU on held-out tokens, for the figure of comparisons."""
    rows = [
        ComparisonRow(
            label=label,
            predicted_tpot_ms=part["tpot_ms"],
            band=None if part["band"] is None else ErrorBand(**part["band"]),
            bound_ms=part["bound_ms"],
            emulated=record["emulated"],
        )
        for label, part in (("chosen", record["chosen"]), ("plain LRU, even split", record["baseline"]))
    ]
    return Comparison(tuple(rows))


def held_out_sentence(record: TuneRecord) -> str:
    """The chosen configuration against plain LRU and the bound."""
    chosen, plain = record["chosen"], record["baseline"]
    band = "no band: no measurements stand behind this machine and strategy yet"
    if chosen["band"] is not None:
        ends = [format_ms(chosen["tpot_ms"] * chosen["band"][key]) for key in ("low_ratio", "high_ratio")]
        band = f"expected between {ends[0]} and {ends[1]}"
    return (
        f"On held-out tokens {format_ms(chosen['tpot_ms'])} per output token ({band}) against "
        f"{format_ms(plain['tpot_ms'])} of plain LRU: {format_times(plain['tpot_ms'] / chosen['tpot_ms'])}. Regret: "
        f"{format_ms(record['regret_ms'])} above what no policy can beat."
    )


def front_sentence(record: TuneRecord) -> str:
    """What the figure of the front shows."""
    if any(point["is_chosen"] for point in record["front"]):
        return "On the training part. The ring marks the configuration that was chosen."
    return f"On the training part. {record['title']} was chosen on held-out tokens and is not among these."


def budget_sentence(shape: ModelShape, percent: float) -> str:
    """What a budget comes to, and the least there must be."""
    total = shape.total_expert_bytes
    need = shape.top_k * sum(shape.expert_bytes)
    least = f"each layer's top-{shape.top_k} needs {100 * need / total:.1f} %"
    return f"{format_bytes(budget_bytes(shape, percent))} of {format_bytes(total)} of experts; {least}."


def budget_bytes(shape: ModelShape, percent: float) -> int:
    """A share of all experts' bytes."""
    return int(percent / 100 * shape.total_expert_bytes)


class Pace:
    """How far a search is and how long it will take at the pace of its latest steps: those that a study knew are
    nothing to go by."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)

    def text(self, done: int, total: int, now_s: float) -> str:
        """A sentence for so many steps done of all at that time."""
        self._seen.append((done, now_s))
        steps = f"{done:,} of {plural(total, 'simulation')}"
        (before, before_s), *later = self._seen
        if not later or done >= total:
            return steps
        left_s = (now_s - before_s) / max(1, done - before) * (total - done)
        left = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
        return f"{steps}, about {left} left"


def _held_out(run: Run) -> dict[str, Any]:
    band = run.info.error_band
    return {
        "label": run.info.label,
        "tpot_ms": run.metrics.tpot_ms,
        "hit_rate": run.metrics.decode_hit_rate,
        "bound_ms": run.info.bounds.get("max_ms"),
        "band": None if band is None else band.model_dump(),
    }
