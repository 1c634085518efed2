"""What the engine itself costs: `python tests/benchmarks/engine_cost.py [MODEL]`.

Prints, from one run on this machine: decode of the untouched model against the offloaded one with every expert
resident, and bookkeeping per MoE layer. Three copies of the model generate in turns, a few tokens each, so that
whatever else the machine does hits all alike: two are untouched, and how far they differ is how far to trust the rest.
Processor time of the generating thread is told beside the time on the clock.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import NamedTuple

import torch

from runtime.calibrate import resident_config
from runtime.models import DEMO_MODEL, LoadedModel, Sampling, load_model
from runtime.offloading import offload

TOKENS = 8
ROUNDS = 60
PROMPT = "The house stood at the end of the road, and"


class Times(NamedTuple):
    """Milliseconds per token of one generation: of the thread's processor time, and on the clock."""

    thread_ms: float
    clock_ms: float


def generation(loaded: LoadedModel) -> Times:
    """Time of one greedy continuation."""
    ids = loaded.encode(PROMPT, TOKENS)
    thread_s, clock_s = time.thread_time(), time.perf_counter()
    loaded.generate(ids, TOKENS, Sampling(ignore_eos=True), 0)
    return Times(1e3 * (time.thread_time() - thread_s) / TOKENS, 1e3 * (time.perf_counter() - clock_s) / TOKENS)


def main() -> None:
    """Print what the engine adds to a model that needs none of it."""
    torch.set_num_threads(1)
    name = sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL
    models = {label: load_model(name) for label in ("untouched", "resident", "untouched, again")}
    engine = offload(models["resident"].model, resident_config(models["resident"]))
    found: dict[str, list[Times]] = {label: [] for label in models}
    for loaded in models.values():
        generation(loaded)
    engine.passes.clear()
    for _ in range(ROUNDS):
        for label, loaded in models.items():
            found[label].append(generation(loaded))
    usual = {label: Times(*(median(values) for values in zip(*times, strict=True))) for label, times in found.items()}
    base = usual["untouched"]
    for label, times in usual.items():
        print(
            f"{label:17} {times.thread_ms:7.2f} ms/token of processor, {times.clock_ms:7.2f} on the clock; "
            f"against untouched {times.thread_ms / base.thread_ms:.3f} and {times.clock_ms / base.clock_ms:.3f}"
        )
    layers = [times for record in engine.passes if not record.is_prefill for times in record.layers]
    decide_us = median(times.landed_ns - times.entered_ns for times in layers) / 1e3
    print(f"bookkeeping per MoE layer, all resident: {decide_us:.1f} us")


if __name__ == "__main__":
    main()
