"""The scenario `spac`, whole and without each of its parts: `python tests/benchmarks/spac_scenario.py [--live]`.

Simulated from what ships under `traces/scenarios/spac`. With `--live` on this machine's emulated device, too: it is
calibrated (or `--hardware FILE` of an earlier calibration taken), the prompts are captured with and without drafts, and
every row is predicted and run on the same tokens. Takes some ten minutes; wants two idle cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from simulator.ablation import ABLATIONS, NO_DRAFTS, ablated, ablated_trace
from simulator.config_file import load_config
from simulator.policies.config import DeviceConfig, OffloadConfig, parse_config
from simulator.replay import simulate
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Metrics
from trace_capture.samples import sample_folder
from trace_capture.trace import Trace

FOLDER = sample_folder() / "scenarios" / "spac"
FULL, ON_DEMAND, BASELINE = "full", "on demand", "drafts, LRU"
ON_DEMAND_AIM, BASELINE_AIM = 4.0, 1.42


class Strategy(NamedTuple):
    """A row: a configuration, and whether passes verify drafts."""

    name: str
    config: OffloadConfig
    drafts: bool


def strategies(full: OffloadConfig) -> list[Strategy]:
    """On-demand loading, plain caches with and without drafts and CPU, each ablation, and all parts together."""

    def plain(name: str, policy: str, cpu: str, drafts: bool) -> Strategy:
        cache = full.cache.model_dump(exclude_none=True) | {"policy": policy}
        raw = {"label": name, "cache": cache, "cpu": {"policy": cpu}, "device": full.device.model_dump()}
        return Strategy(name, parse_config(raw), drafts)

    rows = [
        plain(ON_DEMAND, "none", "none", False),
        plain("LRU, misses on CPU", "lru", "misses", False),
        plain(BASELINE, "lru", "none", True),
        plain("drafts, LRU, misses on CPU", "lru", "misses", True),
    ]
    rows += [Strategy(f"no {name}", ablated(full, [name]), name != NO_DRAFTS) for name in ABLATIONS]
    return [*rows, Strategy(FULL, full, True)]


def simulated(trace: Trace, hardware: HardwareProfile, full: OffloadConfig) -> dict[str, Metrics]:
    """The metrics of every row in the simulator, by its name."""
    alone = ablated_trace(trace, [NO_DRAFTS])
    return {
        row.name: simulate(trace if row.drafts else alone, hardware, row.config, bounds=False).metrics
        for row in strategies(full)
    }


def shipped() -> tuple[Trace, HardwareProfile, OffloadConfig]:
    """Trace, machine and configuration of the scenario."""
    hardware = HardwareProfile.load(FOLDER / "hardware.toml")
    return Trace.load(FOLDER / "trace.parquet"), hardware, load_config(FOLDER / "spac.toml")


def say_simulated(found: dict[str, Metrics]) -> None:
    """The table of the simulator."""
    full_ms = found[FULL].tpot_ms
    print("simulated                      ms/token  of full   hits  loads/token  on CPU/token")
    for name, metrics in found.items():
        each = metrics.loads / metrics.decode_tokens, metrics.cpu_runs / metrics.decode_tokens
        times = f"{metrics.tpot_ms:8.2f} {metrics.tpot_ms / full_ms:7.2f}x"
        print(f"{name:30s} {times} {100 * metrics.decode_hit_rate:5.1f}% {each[0]:12.1f} {each[1]:13.1f}")
    say_aims({name: metrics.tpot_ms for name, metrics in found.items()})


def say_aims(ms: dict[str, float]) -> None:
    """The two aims, and whether any ablation is as fast as the whole."""
    for name, aim in ((ON_DEMAND, ON_DEMAND_AIM), (BASELINE, BASELINE_AIM)):
        ratio = ms[name] / ms[FULL]
        print(f"full against {name}: {ratio:.2f}x, aim {aim}x, {'met' if ratio >= aim else 'NOT met'}")
    better = [name for name, value in ms.items() if value <= ms[FULL] and name != FULL]
    print(f"not slower than full: {', '.join(better) or 'none'}\n", flush=True)


def live(profile: Path | None, max_new_tokens: int, repeats: int) -> None:
    """Predict and run every row on this machine, and print both."""
    import torch

    from runtime.calibrate import calibrate
    from runtime.capture import capture
    from runtime.models import Sampling, load_model, read_prompts
    from runtime.pairing import Comparison, Workload, predict_and_measure
    from runtime.speculative import load_drafting

    torch.set_num_threads(1)
    loaded = load_model("demo")
    prompts = read_prompts(FOLDER / "prompts.txt", ())
    full = load_config(FOLDER / "spac.toml")
    drafting = load_drafting("prompt-lookup", full.utility.gamma, loaded)
    text = " ".join(read_prompts(sample_folder() / "demo_prompts.txt", ()))
    hardware = HardwareProfile.load(profile) if profile else None
    hardware = hardware or calibrate(loaded, text, drafting=drafting, copy_to_cpu_ratio=2.2)
    full = full.model_copy(update={"device": DeviceConfig.for_machine(hardware)})
    sampling = Sampling(ignore_eos=True)
    found: dict[str, Comparison] = {}
    with tempfile.TemporaryDirectory() as folder:
        for drafts in (False, True):
            how = drafting if drafts else None
            out = Path(folder) / f"{drafts}.parquet"
            trace = capture(loaded, prompts, out, max_new_tokens, sampling=sampling, drafting=how)
            workload = Workload(trace, prompts, max_new_tokens, sampling, drafting=how)
            rows = [row for row in strategies(full) if row.drafts == drafts]
            candidates = [(row.config, hardware) for row in rows]
            compared = predict_and_measure(loaded, workload, candidates, repeats=repeats, step=announce)
            found |= {row.name: one for row, one in zip(rows, compared, strict=True)}
    print("live on the emulated device    ms/token  of full  predicted   error  at the machine's speed")
    full_ms = found[FULL].run_tpot_ms
    for name in (row.name for row in strategies(full)):
        one = found[name]
        errors = f"{100 * one.run_error_ratio:+6.1f}% {100 * one.error_ratio:+6.1f}%"
        times = f"{one.run_tpot_ms:8.2f} {one.run_tpot_ms / full_ms:7.2f}x"
        print(f"{name:30s} {times} {one.predicted.metrics.tpot_ms:10.2f} {errors} (slowed {one.slowdown.mean():.2f}x)")
    band = found[FULL].predicted.info.error_band
    print(f"measured is expected at {band.text()} of predictions" if band else "these predictions have no band")
    say_aims({name: one.run_tpot_ms for name, one in found.items()})


def announce(title: str) -> Callable[[int, int], None]:
    """Say which run begins."""
    print(f"  {title}", file=sys.stderr, flush=True)
    return lambda done, total: None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", action="store_true", help="also on the live engine")
    parser.add_argument("--hardware", type=Path, help="with --live: a profile of this machine, instead of calibrating")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args(arguments)
    say_simulated(simulated(*shipped()))
    if options.live:
        live(options.hardware, options.max_new_tokens, options.repeats)


if __name__ == "__main__":
    main()
