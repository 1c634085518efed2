"""What speculative decoding costs beside the layers: making drafts, judging them, and planning loads meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple

from torch import Tensor

from runtime.measure import generate_offloaded
from runtime.models import LoadedModel, Sampling
from runtime.offloading import offloaded
from runtime.records import PassRecord
from runtime.speculative import Drafting
from runtime.steadiness import Probes, around_passes, probed, steady_only
from simulator.pass_summary import PassTimes
from simulator.policies.config import parse_config
from trace_capture.errors import ModelError
from trace_capture.hardware import DraftCosts, MeasuredCosts

_RESIDENT = {"cache": {"budget_ratio": 1.0}, "device": {"h2d_bytes_per_s": 1e12, "latency_ns": 0}}
_TOKENS = 40
_PROMPT = 16
_SAID = 3


class SpeculativeCosts(NamedTuple):
    """Costs of drafting, and of loads by utility: fields of `MeasuredCosts`."""

    draft: DraftCosts
    plan_ns: float
    decide_utility_ns: float


def measure_draft_costs(loaded: LoadedModel, ids: Tensor, drafting: Drafting, costs: MeasuredCosts) -> SpeculativeCosts:
    """Decode speculatively with one draft per pass and with `drafting.gamma`, then with loads by utility.

    Args:
        loaded: an untouched model.
        ids: [1, T] to continue.
        drafting: how tokens are drafted.
        costs: what was measured before.
    """
    reference_ns = costs.probe_ns
    counts = sorted({1, drafting.gamma})
    tables = [_measure(loaded, ids, replace(drafting, gamma=count), reference_ns) for count in counts]
    draft = DraftCosts(
        kind=drafting.kind,
        drafts=tuple(counts),
        drafting_ns=tuple(drafting_ns for drafting_ns, _ in tables),
        overhead_ns=tuple(overhead_ns for _, overhead_ns in tables),
    )
    plan_ns, layer_ns = _planning(loaded, ids, drafting, reference_ns)
    return SpeculativeCosts(draft, plan_ns, max(0.0, layer_ns - costs.decide_ns - costs.cpu_start_ns))


_Pass = tuple[PassRecord, PassTimes]


def _run(loaded: LoadedModel, ids: Tensor, raw: Mapping[str, Any], drafting: Drafting) -> list[tuple[_Pass, Probes]]:
    """Verify passes with all drafts of generations from two prompts, after one that warms up.

    Prompt look-up finds n-grams in what is there already, and transformers lets it find none while sampling: it
    continues, greedily, prompts that are said several times.
    """
    looks_up = drafting.model is None
    sampling = Sampling(temperature=0.0 if looks_up else 0.8, ignore_eos=True)
    found: list[tuple[_Pass, Probes]] = []
    length = min(_PROMPT, ids.shape[1] // 2)
    first, second = ids[:, :length], ids[:, length : 2 * length]
    prompts: Sequence[Tensor] = [one.repeat(1, _SAID if looks_up else 1) for one in (first, first, second)]
    with offloaded(loaded.model, parse_config(dict(raw))) as engine, probed(loaded.model) as seen:
        engine.link.times_parts = True
        for number, prompt in enumerate(prompts):
            before = len(engine.passes)
            times = generate_offloaded(engine, loaded, prompt, _TOKENS, sampling, seen, drafting)
            passes = list(zip(engine.passes[before:], times, strict=True))
            around = list(zip(passes, around_passes(seen[before:]), strict=True))
            found += around[2:-1] if number else []
    found = [item for item in found if item[0][0].tokens == drafting.gamma + 1]
    if not found:
        raise ModelError(
            f"calibration continued {len(prompts)} prompts, and {drafting.kind} never drafted {drafting.gamma} tokens "
            "for them; give other prompts, a smaller --gamma, or a draft model"
        )
    return found


def _measure(loaded: LoadedModel, ids: Tensor, drafting: Drafting, reference_ns: float) -> tuple[float, float]:
    """Means of drafting and of what is left beside layers."""
    steady = steady_only(_run(loaded, ids, _RESIDENT, drafting), reference_ns)
    drafting_ns = fmean(times.terms_ns["drafting"] for _, times in steady.items)
    return drafting_ns / steady.slowdown, fmean(
        times.terms_ns["overhead"] for _, times in steady.items
    ) / steady.slowdown


def _planning(loaded: LoadedModel, ids: Tensor, drafting: Drafting, reference_ns: float) -> tuple[float, float]:
    """Planning without loads, and a layer's bookkeeping."""
    raw = {
        "cache": {"policy": "utility", "budget_ratio": 0.5},
        "utility": {"loads": "drafting", "gamma": drafting.gamma, "window_ns": 0},
        "cpu": {"policy": "balanced"},
    }
    steady = steady_only(_run(loaded, ids, raw, drafting), reference_ns)
    layers = [layer for (record, _) in steady.items for layer in record.layers if layer.cpu_ns is not None]
    plan_ns = median(record.planned_ns for record, _ in steady.items)
    return plan_ns / steady.slowdown, median(t.decided_ns - t.entered_ns for t in layers) / steady.slowdown
