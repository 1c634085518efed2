"""How much copying hides behind compute: `python tests/benchmarks/overlap.py [MODEL]`.

For several link speeds, in one run and in turns: on-demand loading without a cache against speculative execution
without a cache (arXiv 2603.19289), both moving the same bytes per token. The link's speed is set by what the model took
with all experts resident, measured anew in every round. The bound on the saving is Eq. 1 of the paper,
the sum over layers of min(copy, compute), with compute as measured in the on-demand run (bookkeeping and idle time
included) and the first layer left out, which has nothing to hide behind.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from statistics import fmean, median

import torch

from runtime.calibrate import resident_config
from runtime.engine import Engine
from runtime.models import DEMO_MODEL, LoadedModel, Sampling, load_model
from runtime.offloading import offloaded
from simulator.policies.config import OffloadConfig, parse_config

RATIOS = (141 / 13, 141 / 23, 3.0, 1.0)
TOKENS = 17
ROUNDS = 10
PROMPT = "The house stood at the end of the road, and"


def decode_ms(loaded: LoadedModel, config: OffloadConfig) -> tuple[float, Engine]:
    """Median time of a decode pass, which a neighbour's burst does not move, and the engine with its records."""
    ids = loaded.encode(PROMPT, TOKENS)
    with offloaded(loaded.model, config) as engine:
        loaded.generate(ids, TOKENS, Sampling(ignore_eos=True), 0)
        began = [record.began_ns for record in engine.passes]
    return median(after - before for before, after in pairwise(began[1:])) / 1e6, engine


def config(bytes_per_s: float, source: str, mode: str = "hint") -> OffloadConfig:
    """No cache: the experts of a layer are gone when it has run."""
    cache = {"policy": "none", "budget_ratio": 0.5}
    prefetch = {"source": source, "mode": mode}
    return parse_config(
        {"cache": cache, "prefetch": prefetch, "device": {"h2d_bytes_per_s": bytes_per_s, "latency_ns": 0}}
    )


def bound_ms(engine: Engine, copy_ms: float) -> float:
    """Eq. 1 per token: what a layer computes between one router and the next can hide one layer's copies."""
    tokens = []
    for record in engine.passes[1:-1]:
        compute_ms = [(after.submitted_ns - before.landed_ns) / 1e6 for before, after in pairwise(record.layers)]
        tokens.append(sum(min(copy_ms, each) for each in compute_ms))
    return median(tokens)


def main() -> None:
    """Print a row per link speed."""
    torch.set_num_threads(1)
    loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL)
    decode_ms(loaded, resident_config(loaded))
    print(
        f"times in ms per token, medians of {TOKENS - 2} tokens, mean of {ROUNDS} rounds; compute: all experts resident"
    )
    print("copy/compute  compute  on-demand  committed  saving   bound  saving/bound  speed-up  verified (lossless)")
    for ratio in RATIOS:
        rounds = []
        for _ in range(ROUNDS):
            # in every round, since the link's speed is set by it and a shared machine's changes
            compute, engine = decode_ms(loaded, resident_config(loaded))
            rate = engine.shape.bytes_per_token / (ratio * compute / 1e3)
            demand, record = decode_ms(loaded, config(rate, "none"))
            commit, _ = decode_ms(loaded, config(rate, "quasi-hidden", "commit"))
            verify, _ = decode_ms(loaded, config(rate, "quasi-hidden", "verify"))
            copy_ms = ratio * compute / engine.shape.num_moe_layers
            rounds.append((compute, demand, commit, bound_ms(record, copy_ms), verify))
        compute, demand, commit, bound, verify = (fmean(column) for column in zip(*rounds, strict=True))
        saving = demand - commit
        times = f"{ratio:12.1f} {compute:8.2f} {demand:10.2f} {commit:10.2f} {saving:7.2f} {bound:7.2f}"
        print(f"{times} {saving / bound:13.2f} {demand / commit:9.2f} {verify:10.2f}")


if __name__ == "__main__":
    main()
