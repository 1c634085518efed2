"""Options that describe a strategy, shared by the verbs that take one. What they list is what is registered."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.prefetch import PREFETCH_POLICIES

Strategy = Annotated[str, typer.Option("--strategy", help=f"Cache policy: {', '.join(CACHE_POLICIES)}.")]
Scope = Annotated[str, typer.Option("--scope", help="layer: slots of each layer's own; global: one pool for all.")]
Prefetch = Annotated[str, typer.Option("--prefetch", help=f"What is loaded ahead: {', '.join(PREFETCH_POLICIES)}.")]
Mode = Annotated[str, typer.Option("--mode", help="What a layer does with a prediction: hint, verify or commit.")]
Recall = Annotated[
    float, typer.Option("--recall", min=0, max=1, help="Share of the true experts that --prefetch oracle names.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="For what is drawn: --strategy random, --prefetch oracle.")]
BudgetMib = Annotated[float | None, typer.Option("--budget-mib", help="Device memory for experts, in MiB.")]
BudgetRatio = Annotated[float | None, typer.Option("--budget-ratio", help="Instead: share of all experts' bytes.")]
Preload = Annotated[
    bool | None,
    typer.Option("--preload/--no-preload", help="Start with popular experts on the device; static and resident do."),
]
Prefill = Annotated[
    str, typer.Option("--prefill", help="on-demand, or stream: copy all experts of the next layer meanwhile.")
]
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", min=1, help="Tokens of a prompt per pass.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Decode passes at the start that no figure counts.")]


def strategy_table(
    strategy: str,
    scope: str,
    prefetch: str,
    mode: str,
    recall: float,
    seed: int,
    budget_mib: float | None,
    budget_ratio: float | None,
    preload: bool | None,
    prefill: str,
    micro_batch: int | None,
) -> dict[str, Any]:
    """The options as the nested dictionary that `parse_config` takes. Without a budget half of the experts get a
    place, and all with the strategy that needs that."""
    cache: dict[str, Any] = {"policy": strategy, "scope": scope, "preload": preload, "seed": seed}
    if budget_mib is not None:
        cache["budget_bytes"] = int(budget_mib * (1 << 20))
    if budget_ratio is not None:
        cache["budget_ratio"] = budget_ratio
    if budget_mib is None and budget_ratio is None:
        cache["budget_ratio"] = 1.0 if strategy == "resident" else 0.5
    return {
        "cache": cache,
        "prefetch": {"source": prefetch, "mode": mode, "recall": recall, "seed": seed},
        "prefill": {"strategy": prefill, "micro_batch": micro_batch},
    }
