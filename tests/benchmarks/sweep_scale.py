"""How fast sweeps are: 10,000 what-if scenarios of a 500-token, 48-layer trace are planned and some of them simulated.

Run with `python tests/benchmarks/sweep_scale.py`, or `--full` for all 10,000. The scenarios are 5 links x 10 sizes of
device memory x 5 cache policies x 4 prefetch sources x 10 reserves of memory, of routing drawn for Qwen3-30B-A3B. Some
come to the same: memory beyond that of all experts changes nothing, and 20 GB less 2 is 18.5 less 0.5. Each of the
3,300 that differ is simulated once.

Results go into a store by digest: the benchmark stops half way, as a killed sweep would, and goes on; then it asks for
all once more, which simulates nothing. With one process the rate is also given by CPU time, which other programs on the
machine disturb less.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import joblib

from simulator.result_store import ResultStore
from simulator.scenario import Scenario
from simulator.sweep import grid, sweep
from simulator.sweep_plan import SweepPlan
from trace_capture.known_shapes import known_shape
from trace_capture.synthetic import synthetic_trace

DECODE_TOKENS = 500
SWEPT = {
    "link": ["pcie3x8", "pcie3x16", "pcie4x8", "pcie4x16", "pcie5x16"],
    "vram_gb": ["12", "13", "14", "16", "18", "20", "22", "24", "28", "32"],
    "strategy": ["none", "lru", "lfu", "lfu-ageing", "s3-fifo"],
    "prefetch": ["none", "previous-token", "quasi-hidden", "popularity"],
    "reserve_gb": ["0.5", "0.75", "1.0", "1.25", "1.5", "1.75", "2.0", "2.25", "2.5", "3.0"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=48, help="scenarios to simulate, evenly drawn from all")
    parser.add_argument("--full", action="store_true", help="simulate all 10,000")
    parser.add_argument("--jobs", type=int, default=1, help="processes; -1 for one per core")
    parser.add_argument("--bounds", action="store_true", help="also work out bounds, as whatif does")
    parser.add_argument("--store", type=Path, help="file of results, so that a stopped run goes on")
    options = parser.parse_args()

    shape = known_shape("qwen3-30b-a3b")
    trace = synthetic_trace(shape, 1, 32, DECODE_TOKENS, reuse_ratio=0.5, skew=0.6, predictor_recall=0.85, seed=0)
    began = time.perf_counter()
    planned = grid(Scenario(hardware="rtx4090-pcie4x16", weights="q4_k_m"), SWEPT)
    plan = SweepPlan(trace, options.bounds)
    different = len({plan.key(scenario) for _, scenario in planned})
    work = f"{DECODE_TOKENS} tokens x {shape.num_moe_layers} layers, top-{shape.top_k} of {shape.num_experts}"
    took = f"{time.perf_counter() - began:.1f} s"
    print(f"planned {len(planned):,} scenarios of {work}, {different:,} of them different, in {took}")
    chosen = planned if options.full else random.Random(0).sample(planned, options.count)
    cores = joblib.effective_n_jobs(options.jobs)
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(options.store or Path(folder) / "results.sqlite")
        half = len(chosen) // 2
        for name, part in (("first half", chosen[:half]), ("all, going on", chosen), ("all, once more", chosen)):
            known, began, cpu = len(store), time.perf_counter(), time.process_time()
            points = sweep(trace, part, store=store, jobs=options.jobs, bounds=options.bounds)
            seconds, cpu, new = time.perf_counter() - began, time.process_time() - cpu, len(store) - known
            rate = f", {new / seconds / cores:.2f} simulations per second per core ({cores})" if new else ""
            rate += f", {new / cpu:.2f} per second of CPU time" if new and cores == 1 else ""
            failed = sum(point.error is not None for point in points)
            print(f"{name}: {len(part):,} answered ({failed} impossible), {new:,} simulated, {seconds:.1f} s{rate}")


if __name__ == "__main__":
    main()
