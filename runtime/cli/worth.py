"""What `inspect --worth` says: hit curves, and whether each technique would help on a machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from runtime.cli.app import progress_bar, say

if TYPE_CHECKING:
    from trace_capture.trace import Trace


def worth(trace: Trace, settings: dict[str, str], shown: bool) -> dict[str, Any]:
    """Facts for a person and for programs.

    Args:
        trace: the routing.
        settings: of the machine, as `whatif --set` takes them.
        shown: whether to show progress.
    """
    import numpy as np

    from simulator.scenario import Scenario
    from simulator.worth import hit_curve, is_it_worth_it
    from trace_capture.statistics import reuse_distances

    scenario = Scenario().set_values(settings)
    with progress_bar(shown) as step:
        verdicts = is_it_worth_it(trace, scenario, step("simulate"))
    distances = np.concatenate(reuse_distances(trace))
    again = distances[distances < trace.shape.num_experts]
    quantiles = [int(value) for value in np.percentile(again, (50, 90))] if len(again) else []
    return {
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "hit_curve": hit_curve(trace),
        "reuse_distance": {
            "median": quantiles[0] if quantiles else None,
            "p90": quantiles[1] if quantiles else None,
            "first_uses_ratio": float(1 - len(again) / max(1, len(distances))),
        },
        "settings": scenario.model_dump(mode="json", exclude_defaults=True),
    }


def say_worth(facts: dict[str, Any]) -> None:
    """The same for a person."""
    reuse = facts["reuse_distance"]
    if reuse["median"] is not None:
        say(f"  reuse distance: median {reuse['median']} other experts of the layer in between, 90th {reuse['p90']}")
    lru = facts["hit_curve"]["lru"]
    for slots, belady in facts["hit_curve"]["belady"]:
        say(f"  {slots} slots per layer: LRU {100 * lru[slots]:.1f} % hits, perfect eviction {100 * belady:.1f} %")
    for verdict in facts["verdicts"]:
        say(f"  {verdict['sentence']}")
