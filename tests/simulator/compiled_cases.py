"""Replays of every registered strategy in fixed random settings, and digests of all that they do.

`python -m tests.simulator.compiled_cases` prints the digests as JSON, with the files that the modules came from.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

from simulator import simulate
from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.config import OffloadConfig, parse_config
from simulator.policies.placement import PLACEMENT_POLICIES
from simulator.policies.prefetch import PREFETCH_POLICIES, make_prefetch_policy
from simulator.policies.utility import BOUNDARY_RULES, UTILITY_SIGNALS
from tests.simulator.builders import make_hardware, make_host, make_shape, mixed_trace
from trace_capture.hardware import HardwareProfile
from trace_capture.model_shape import ModelShape
from trace_capture.rewindow import rewindow
from trace_capture.trace import Trace

GENERAL, UTILITY = 32, 12
"""Cases; those of utility replay verify passes with drafts."""
GAMMA = 4


def configurations() -> Iterator[tuple[Trace, HardwareProfile, OffloadConfig, int]]:
    """Trace, machine, configuration and warm-up passes of each case; names go round, all else is drawn."""
    for number in range(GENERAL + UTILITY):
        draw = random.Random(number)
        shape = make_shape(
            draw.randint(2, 4), draw.randint(6, 12), draw.randint(1, 3), kv_bytes_per_token=draw.randint(0, 99)
        )
        if draw.random() < 0.5:
            sizes = tuple(draw.randint(300, 3000) for _ in range(shape.num_moe_layers))
            shape = shape.model_copy(update={"expert_bytes": sizes})
        trace = mixed_trace(shape, number, sequences=2, decode=12, right=draw.random())
        if number >= GENERAL:
            trace = rewindow(trace, GAMMA, 0.7, seed=number, draft_bytes=draw.choice([0, 20_000]))
        trace.predicted["estimator"] = trace.predicted["hybrid"] = trace.predicted["quasi-hidden"]
        costs = {name: draw.randint(0, 400) for name in ("latency_ns", "issue_ns", "wakeup_ns", "launch_ns")}
        host = make_host(contended_ratio=draw.uniform(0.3, 1))
        link, memory = 10 ** draw.uniform(8, 10), 10 ** draw.uniform(9, 11)
        machine = make_hardware(link, host=host, memory_bytes_per_s=memory, **costs)
        yield trace, machine, parse_config(config_table(draw, number, shape)), draw.choice([0, 3])


def config_table(draw: random.Random, number: int, shape: ModelShape) -> dict[str, Any]:
    """A configuration in which something happens."""
    policies, sources, placements = (sorted(one) for one in (CACHE_POLICIES, PREFETCH_POLICIES, PLACEMENT_POLICIES))
    weighs = number >= GENERAL
    policy = "utility" if weighs else policies[number % len(policies)]
    source = sources[number % len(sources)]
    modes = ["hint", "verify", "commit"] if make_prefetch_policy(source).prediction else ["hint"]
    placement = placements[number // 2 % len(placements)]
    cpu_layers = draw.choice([0, 0, 1])
    table: dict[str, Any] = {
        "cache": cache_table(draw, policy, shape, cpu_layers),
        "prefetch": {
            "source": source,
            "mode": modes[number // len(sources) % len(modes)],
            "max_experts": draw.choice([None, 1, 3]),
            "recall": draw.random(),
        },
        "prefill": {"strategy": draw.choice(["on-demand", "stream"]), "micro_batch": draw.choice([None, 1, 4])},
        "cpu": {
            "policy": placement if policy == "utility" or placement != "balanced" else "none",
            "layers": cpu_layers,
            "max_tokens": draw.randint(1, 3),
            "admissions": draw.randint(0, 2),
            "hot_misses": draw.choice(["cpu", "load", "balance"]),
        },
        "device": {"serial": draw.random() < 0.2},
    }
    if weighs:
        table["utility"] = {
            "gamma": GAMMA,
            "signal": draw.choice(sorted(UTILITY_SIGNALS)),
            "boundaries": draw.choice(sorted(BOUNDARY_RULES)),
            "loads": ("none", "drafting", "always")[number % 3],
            "scope": draw.choice(["pass", "layer"]),
            "window": draw.choice(["drafting", "round"]),
        }
    return table


def cache_table(draw: random.Random, policy: str, shape: ModelShape, cpu_layers: int) -> dict[str, Any]:
    """The table `[cache]`, with a size between the least that works and all."""
    table = {"policy": policy, "seed": draw.randint(0, 3), "preload": draw.choice([None, True, False])}
    scope = draw.choice(["layer", "global", "slots"])
    sizes = shape.expert_bytes[cpu_layers:]
    if policy == "resident":
        return table | {"budget_bytes": shape.total_expert_bytes}
    if scope == "slots":
        slots = [draw.randint(shape.top_k, shape.num_experts) for _ in sizes]
        return table | {"slots_per_layer": [0] * cpu_layers + slots}
    least = shape.top_k * (sum(sizes) if scope == "layer" else max(sizes))
    return table | {"scope": scope, "budget_bytes": draw.randint(least, shape.num_experts * sum(sizes))}


def digests() -> list[dict[str, str]]:
    """Per case, what it is and a digest of each thing that a replay of it gives."""
    found = []
    for trace, machine, config, warmup in configurations():
        log: list[Any] = []
        run = simulate(trace, machine, config, record_spans=True, log=log, warmup_passes=warmup)
        parts = {
            "calls and plans": log,
            "spans": run.spans,
            "times": run.token_ns.tolist(),
            "passes": run.passes,
            "metrics": run.info.metrics,
            "summary": run.info,
        }
        found.append(
            {"case": repr(config.model_dump(exclude_defaults=True))}
            | {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}
        )
    return found


def binaries() -> list[str]:
    """Modules of the simulator in this process that came from binaries."""
    loaded = [(name, module.__file__) for name, module in sys.modules.items() if name.startswith("simulator.")]
    return sorted(name for name, file in loaded if file and file.endswith(EXTENSION_SUFFIXES[0]))


if __name__ == "__main__":
    json.dump({"digests": digests(), "binaries": binaries()}, sys.stdout)
