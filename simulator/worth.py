"""Is it worth it? Whether a cache, prefetch, CPU experts or speculative decoding would help a model on a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulator.bounds import belady_hit_rates
from simulator.policies.config import parse_config
from simulator.scenario import Scenario, machine_of
from simulator.sweep import answer
from trace_capture.errors import ConfigError
from trace_capture.statistics import GENERATING, lru_hit_curve, num_lookups
from trace_capture.trace import Trace

Progress = Callable[[int, int], None]
WORTH_RATIO = 1.05
"""Speed-up from which on something is said to help; less is within what predictions are off."""
DRAFTS, ACCEPTANCE = 4, 0.7
_STEPS = 5


@dataclass(frozen=True)
class Verdict:
    """What one technique gives.

    Attributes:
        technique: cache, prefetch, CPU experts or speculative decoding.
        helps: whether it is faster by at least `WORTH_RATIO`.
        before_ms, after_ms: time per output token without and with it; None where it cannot be tried.
        sentence: the same in words.
        settings: of the scenario with it.
    """

    technique: str
    helps: bool
    before_ms: float | None
    after_ms: float | None
    sentence: str
    settings: dict[str, str] = field(default_factory=dict)


def is_it_worth_it(trace: Trace, scenario: Scenario, progress: Progress | None = None) -> list[Verdict]:
    """Simulate loading on demand, then a cache, and on top of the cache each other technique apart.

    Args:
        trace: the routing.
        scenario: the machine; its strategy settings are replaced.
        progress: called with (simulations done, in all).

    Returns:
        one verdict per technique, in the order in which they are best tried.

    Raises:
        ConfigError: the experts' top-k does not fit the device.
    """
    tick = _Tick(progress)
    plain = _asked(trace, scenario.set_values({"strategy": "none", "prefetch": "none", "cpu_experts": "none"}), tick)
    cache_settings = {"strategy": "lru", "prefetch": "none", "cpu_experts": "none"}
    cached_scenario = scenario.set_values(cache_settings)
    cached = _asked(trace, cached_scenario, tick)
    if "error" in cached:
        raise ConfigError(f"{cached['error']}")
    now = cached["tpot_ms"]
    verdicts = [_cache_verdict(plain, cached, cache_settings)]
    prefetch = {"prefetch": _best_source(trace)}
    verdicts.append(_verdict("prefetch", now, _asked(trace, cached_scenario.set_values(prefetch), tick), prefetch))
    cpu = {"cpu_experts": "misses"}
    if machine_of(scenario).host is None and machine_of(scenario).measured is None:
        why = "The machine has no host part, so nothing is known of its CPU; name one, such as host=ddr5-6000-2ch."
        verdicts.append(Verdict("CPU experts", False, now, None, why))
        tick()
    else:
        verdicts.append(_verdict("CPU experts", now, _asked(trace, cached_scenario.set_values(cpu), tick), cpu))
    drafts = {"gamma": str(DRAFTS), "acceptance": str(ACCEPTANCE)}
    drafted = _asked(trace, cached_scenario.set_values(drafts), tick)
    what = f"speculative decoding ({DRAFTS} drafts of prompt look-up or a free draft model, {ACCEPTANCE:.0%} kept)"
    verdicts.append(_verdict("speculative decoding", now, drafted, drafts, what))
    return verdicts


def hit_curve(trace: Trace, belady_shares: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75)) -> dict[str, Any]:
    """LRU hit rate in decode at every cache size, from one pass over the trace, and perfect eviction's at a few.

    Returns:
        `slots` per layer [E + 1], `lru` hit rates [E + 1], and `belady`: pairs of slots and hit rate.
    """
    shape = trace.shape
    hits = lru_hit_curve(trace, GENERATING).sum(axis=0)
    lookups = max(1, int(num_lookups(trace, GENERATING).sum()))
    belady = []
    for share in belady_shares:
        slots = max(shape.top_k, round(share * shape.num_experts))
        config = parse_config({"cache": {"slots_per_layer": [slots] * shape.num_moe_layers}})
        belady.append((slots, belady_hit_rates(trace, config)[1]))
    return {
        "slots": list(range(shape.num_experts + 1)),
        "lru": [round(float(value) / lookups, 4) for value in hits],
        "belady": belady,
    }


def _asked(trace: Trace, scenario: Scenario, tick: Callable[[], None]) -> dict[str, Any]:
    result = answer(trace, scenario)
    tick()
    return result


def _cache_verdict(plain: dict[str, Any], cached: dict[str, Any], settings: dict[str, str]) -> Verdict:
    now, hits = cached["tpot_ms"], cached["decode_hit_rate"]
    best = cached["bound_ms"]
    head = f"perfect eviction and prefetch would take at least {best:.2f} ms" if best else "its bound is not known"
    if "error" in plain:
        return Verdict("cache", True, None, now, f"A cache takes {now:.2f} ms per token; {head}.", settings)
    before = plain["tpot_ms"]
    helps = before >= WORTH_RATIO * now
    word = "helps" if helps else "does not help"
    sentence = f"A cache {word}: {now:.2f} ms per token with LRU ({hits:.0%} hits) instead of {before:.2f} on demand"
    return Verdict("cache", helps, before, now, f"{sentence}; {head}.", settings)


def _verdict(
    technique: str, before: float, found: dict[str, Any], settings: dict[str, str], what: str | None = None
) -> Verdict:
    name = what or {"prefetch": f"prefetch ({settings.get('prefetch')})", "CPU experts": "misses on the CPU"}[technique]
    name = name[0].upper() + name[1:]
    if "error" in found:
        return Verdict(technique, False, before, None, f"{name} cannot be tried: {found['error']}", settings)
    after = found["tpot_ms"]
    ratio = before / after
    if ratio >= WORTH_RATIO:
        text = f"{name} helps: {after:.2f} ms per token instead of {before:.2f} with the cache alone ({ratio:.2f}x)."
    elif ratio > 1 / WORTH_RATIO:
        text = f"{name} changes little: {after:.2f} ms per token instead of {before:.2f} with the cache alone."
    else:
        text = f"{name} hurts: {after:.2f} ms per token instead of {before:.2f} with the cache alone ({ratio:.2f}x)."
    return Verdict(technique, ratio >= WORTH_RATIO, before, after, text, settings)


def _best_source(trace: Trace) -> str:
    """A captured prediction where there is one, else the guess that needs no model."""
    captured = [name for name in ("hybrid", "estimator", "quasi-hidden") if name in trace.predicted]
    return captured[0] if captured else "previous-token"


class _Tick:
    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, _STEPS)
