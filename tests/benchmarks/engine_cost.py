"""What the engine itself costs: `python tests/benchmarks/engine_cost.py [MODEL]`.

Prints, from one run on this machine: decode of the untouched model against the offloaded one with every expert
resident (side by side, in turns), bookkeeping per MoE layer, and simulated tokens per second of a 48-layer trace.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import torch

from runtime.calibrate import resident_config
from runtime.models import DEMO_MODEL, LoadedModel, Sampling, load_model
from runtime.offloading import offload, unload
from simulator import OffloadConfig, simulate
from trace_capture.hardware import HardwareProfile
from trace_capture.known_shapes import known_shape
from trace_capture.synthetic import synthetic_trace

TOKENS = 64
ROUNDS = 7
PROMPT = "The house stood at the end of the road, and"


def generation_seconds(loaded: LoadedModel) -> float:
    """Time of one greedy continuation."""
    ids = loaded.encode(PROMPT, TOKENS)
    start = time.perf_counter()
    loaded.generate(ids, TOKENS, Sampling(ignore_eos=True), 0)
    return time.perf_counter() - start


def resident_ratio(loaded: LoadedModel) -> tuple[float, float, float]:
    """Median seconds untouched and fully resident, in turns, and bookkeeping per layer in microseconds."""
    untouched, resident, decide = [], [], []
    generation_seconds(loaded)
    for _ in range(ROUNDS):
        untouched.append(generation_seconds(loaded))
        engine = offload(loaded.model, resident_config(loaded))
        generation_seconds(loaded)
        engine.passes.clear()
        resident.append(generation_seconds(loaded))
        layers = [t for record in engine.passes[1:] for t in record.layers]
        decide += [t.landed_ns - t.entered_ns for t in layers]
        unload(loaded.model)
    return median(untouched), median(resident), median(decide) / 1e3


def simulated_tokens_per_s() -> float:
    """Replay speed on a synthetic trace of Qwen3-30B-A3B's shape: LRU, half of the experts, no bounds."""
    trace = synthetic_trace(
        known_shape("qwen3-30b-a3b"), 1, 32, 500, reuse_ratio=0.45, skew=0.8, predictor_recall=0.86, seed=0
    )
    hardware = HardwareProfile.load(Path("rtx4090-pcie4x16"))
    config = OffloadConfig.for_fraction(0.5)
    simulate(trace, hardware, config, bounds=False)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        simulate(trace, hardware, config, bounds=False)
        seconds.append(time.perf_counter() - start)
    return 500 / min(seconds)


def main() -> None:
    """Print the three figures."""
    torch.set_num_threads(1)
    loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL)
    untouched, resident, decide_us = resident_ratio(loaded)
    print(f"untouched {1e3 * untouched / TOKENS:.2f} ms/token, resident {1e3 * resident / TOKENS:.2f} ms/token")
    print(f"ratio resident / untouched: {resident / untouched:.3f}")
    print(f"bookkeeping per MoE layer, all resident: {decide_us:.1f} us")
    print(f"simulated tokens per second, 48 layers x 128 experts: {simulated_tokens_per_s():.0f}")


if __name__ == "__main__":
    main()
