"""`demo`: the whole loop on the model that ships with the project, on this machine.

calibrate -> capture -> replay -> tune -> run -> compare, each step writing a file a person can open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.calibrate import calibrate
from runtime.capture import capture
from runtime.models import DEMO_MODEL, LoadedModel, Sampling, load_model, read_prompts
from runtime.pairing import Comparison, Workload, predict_and_measure
from runtime.self_check import with_error_band
from simulator.config_file import save_config
from simulator.policies.config import DeviceConfig, OffloadConfig, parse_config
from simulator.timeline import write_perfetto
from simulator.tune import TuneResult, split_trace, tune
from trace_capture.files import make_folder
from trace_capture.hardware import HardwareProfile
from trace_capture.samples import sample_folder
from trace_capture.trace import Trace

Step = Callable[[str], Callable[[int, int], None]]
"""Announces a step; gives what reports its progress as (done, in all)."""

COPY_TO_COMPUTE_RATIO = 141 / 13
"""Copy time over compute time per token, loading on demand: as published for Qwen3-30B-A3B on an RTX A6000
(arXiv 2603.19289, about 141 ms of copies beside 13 ms of compute)."""
ON_DEMAND = "on-demand"


@dataclass(frozen=True)
class DemoOptions:
    """Size of the demonstration.

    Attributes:
        budget_ratio: share of the experts that has a slot.
        num_prompts: prompts to capture; the last third is held out and run live.
        max_new_tokens: per prompt.
        seed: of sampling.
        repeats: generations per token count in the calibration.
        check_prompts: prompts that the error band is found on.
        check_tokens: new tokens of each of them.
    """

    budget_ratio: float = 0.4
    num_prompts: int = 18
    max_new_tokens: int = 48
    seed: int = 0
    repeats: int = 3
    check_prompts: int = 3
    check_tokens: int = 24

    @staticmethod
    def quick() -> DemoOptions:
        """A much shorter demonstration, whose figures and error band are rougher."""
        return DemoOptions(num_prompts=3, max_new_tokens=10, repeats=1, check_prompts=1, check_tokens=8)


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration found, and the folder with all its files."""

    folder: Path
    hardware: HardwareProfile
    tuned: TuneResult
    comparisons: tuple[Comparison, ...]


def demo(out: Path, options: DemoOptions, step: Step) -> DemoResult:
    """Run the loop and write every intermediate result into `out`.

    Raises:
        StudioError: the folder cannot be written to, or the demo model is not there.
    """
    make_folder(out)
    loaded = load_model(DEMO_MODEL)
    prompts = read_prompts(sample_folder() / "demo_prompts.txt", ())[: options.num_prompts]
    sampling = Sampling(temperature=0.8, seed=options.seed, ignore_eos=True)
    hardware = calibrate(
        loaded,
        " ".join(prompts),
        copy_to_compute_ratio=COPY_TO_COMPUTE_RATIO,
        repeats=options.repeats,
        progress=step("calibrate this machine"),
    )
    hardware = with_error_band(
        loaded,
        hardware,
        prompts[: options.check_prompts],
        max_new_tokens=options.check_tokens,
        progress=step("check predictions"),
    )
    hardware.save(out / "hardware.toml")
    trace = capture(
        loaded,
        prompts,
        out / "trace.parquet",
        options.max_new_tokens,
        sampling=sampling,
        predict="quasi-hidden",
        progress=step("capture routing"),
    )
    device = DeviceConfig.for_machine(hardware)
    budget_bytes = int(options.budget_ratio * trace.shape.total_expert_bytes)
    tuned = tune(trace, hardware, budget_bytes=budget_bytes, device=device, progress=step("tune by replay"))
    save_config(tuned.config, out / "tuned.toml")
    comparisons = _run_strategies(loaded, prompts, trace, hardware, tuned, options, sampling, step)
    _write_runs(out, comparisons)
    return DemoResult(out, hardware, tuned, comparisons)


def strategies(tuned: OffloadConfig, budget_ratio: float) -> list[OffloadConfig]:
    """What the demonstration compares, at one budget: from no cache to the tuned configuration."""
    device = tuned.device.model_dump()

    def plain(label: str, policy: str, source: str = "none") -> OffloadConfig:
        cache = {"policy": policy, "budget_ratio": budget_ratio}
        return parse_config({"label": label, "cache": cache, "prefetch": {"source": source}, "device": device})

    return [
        plain(ON_DEMAND, "none"),
        plain(f"{ON_DEMAND} + prefetch", "none", "quasi-hidden"),
        plain("LRU cache", "lru"),
        plain("LRU cache + prefetch", "lru", "quasi-hidden"),
        tuned.model_copy(update={"label": "tuned"}),
    ]


def _run_strategies(
    loaded: LoadedModel,
    prompts: Sequence[str],
    trace: Trace,
    hardware: HardwareProfile,
    tuned: TuneResult,
    options: DemoOptions,
    sampling: Sampling,
    step: Step,
) -> tuple[Comparison, ...]:
    """Predict and measure every strategy on the held-out prompts, with the tokens that the capture made."""
    held_out = split_trace(trace)[1]
    first = held_out.sequences()[0]
    workload = Workload(held_out, prompts[first:], options.max_new_tokens, sampling, first_sequence=first)
    candidates = [(config, hardware) for config in strategies(tuned.config, options.budget_ratio)]
    return tuple(predict_and_measure(loaded, workload, candidates, record_spans=True, step=step))


def _write_runs(out: Path, comparisons: Sequence[Comparison]) -> None:
    for comparison, name in zip(comparisons, _file_names(comparisons), strict=True):
        comparison.predicted.save(out, f"{name}.predicted")
        comparison.measured[0].save(out, f"{name}.measured")
    last = comparisons[-1]
    write_perfetto([last.predicted, last.measured[0]], out / "timeline.perfetto.json")


def _file_names(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for number, comparison in enumerate(comparisons):
        words = "".join(c if c.isalnum() else " " for c in comparison.predicted.info.label).split()
        yield f"{number}-{'-'.join(words).lower()}"
