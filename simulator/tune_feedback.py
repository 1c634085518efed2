"""A profile with the figures of a run in place of its own: what tuning again after a run goes by.

Taken over, each as a ratio of the measured figure to the one that the profile predicts for the same configuration on
the tuning trace:

link: the rate, from the copies of the run's timeline (bytes over time beyond the profile's latency per copy).
compute: on an emulated device, whose clock tells the parts apart, the terms dense, experts, overhead, decide and
predict each by a ratio of its own. On a real device the host's clock does not tell them apart, so they get one ratio
for all of them together. In a profile that was not calibrated with the model one ratio rescales the device's rates and
its launch time.

Not taken over: stalls, which follow from the link and the routing; experts on the CPU, of which a run shows only the
waiting; drafting; the wake-up table. The band of the old profile is dropped: nobody validated the new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simulator.policies.config import OffloadConfig
from simulator.replay import simulate
from trace_capture.errors import TraceError
from trace_capture.hardware import DeviceProfile, HardwareProfile, LinkProfile, MeasuredCosts, Quantity
from trace_capture.run import Run
from trace_capture.trace import Phase, Trace

_FEWEST_COPIES = 8
_FIELDS = {
    "dense": ("dense_ns",),
    "experts": ("experts_ns",),
    "overhead": ("pass_overhead_ns",),
    "decide": ("decide_ns", "decide_first_load_ns", "decide_per_load_ns"),
    "predict": ("predict_ns", "predict_by_source_ns"),
}
"""Terms of a run and the fields of `MeasuredCosts` behind them."""


@dataclass(frozen=True)
class Rescaled:
    """A profile after a run.

    Attributes:
        hardware: with the measured figures.
        notes: what was taken over and what was not, a sentence each.
    """

    hardware: HardwareProfile
    notes: tuple[str, ...]


def profile_from_run(hardware: HardwareProfile, run: Run, trace: Trace) -> Rescaled:
    """Rescale a profile by what a run measured.

    Args:
        hardware: the profile that the run's configuration was tuned on.
        run: measured, of the trace's model, with its timeline.
        trace: the tuning trace, on which the profile's prediction for the run's configuration is made.

    Raises:
        TraceError: the run is not measured, of another model, on another kind of device, or decoded nothing.
        ConfigError: the run's configuration does not fit the trace.
    """
    _check(hardware, run, trace)
    link, notes = _link(hardware.link, run)
    has_drafts = [bool(run.metrics.drafted_tokens), bool((trace.phase == Phase.VERIFY).any())]
    changed: dict[str, Any] = {"link": link}
    if has_drafts[0] != has_drafts[1]:
        notes.append("compute is the profile's own: the run and the trace do not both verify drafts")
    else:
        config = OffloadConfig.model_validate(run.info.config)
        predicted = simulate(trace, hardware, config, bounds=False).metrics.tpot_terms_ms
        ratios = _ratios(predicted, run)
        measured = hardware.measured
        if measured is not None and measured.model == trace.shape.name:
            changed["measured"] = _rescaled(measured, ratios)
        else:
            changed["device"] = _slower(hardware.device, ratios)
        notes.append("compute is rescaled by the run: " + ", ".join(f"{k} x {v:.2f}" for k, v in ratios.items()))
    if run.metrics.cpu_runs:
        notes.append(
            "experts on the CPU keep the profile's times: the run shows what waiting for them took, not theirs"
        )
    if hardware.error_band is not None:
        notes.append("the profile's error band was dropped: nobody has validated the rescaled profile")
    description = f"{hardware.description} Rescaled by a run of {run.info.label}.".strip()
    changed |= {"name": f"{hardware.name} (from a run)", "description": description, "error_band": None}
    return Rescaled(hardware.model_copy(update=changed), tuple(notes))


def _check(hardware: HardwareProfile, run: Run, trace: Trace) -> None:
    info = run.info
    if info.kind != "measured":
        raise TraceError(f"--from-run: the run is {info.kind}; give one that 'moe-studio run --out' wrote")
    if info.model != trace.shape.name:
        raise TraceError(f"--from-run: the run is of {info.model} and the trace of {trace.shape.name}; match them")
    if info.emulated != hardware.emulated:
        kinds = {True: "an emulated link", False: "a real one"}
        raise TraceError(
            f"--from-run: the run had {kinds[info.emulated]} and {hardware.name} has {kinds[hardware.emulated]}; give "
            "the profile of the machine that ran"
        )
    if not run.metrics.decode_tokens or not run.metrics.tpot_terms_ms:
        raise TraceError("--from-run: the run decoded no token, so there is nothing to learn; run it again, longer")


def _link(link: LinkProfile, run: Run) -> tuple[LinkProfile, list[str]]:
    """The link at the rate of the run's copies."""
    copies = [span for span in run.spans if span.kind == "load" and span.end_ns > span.start_ns]
    busy_ns = sum(span.end_ns - span.start_ns for span in copies) - len(copies) * link.latency_ns.value
    if len(copies) < _FEWEST_COPIES or busy_ns <= 0:
        return link, [f"the link is the profile's own: the run's timeline has {len(copies)} copies, too few to tell"]
    rate = sum(span.num_bytes for span in copies) / busy_ns * 1e9
    name = "pageable_bytes_per_s" if link.host_memory == "pageable" else "h2d_bytes_per_s"
    old = getattr(link, name) or link.h2d_bytes_per_s
    quantity = Quantity(value=rate, kind="measured", source=f"{len(copies)} copies of a run of {run.info.label}")
    note = f"link {rate / 1e9:.3f} GB/s from {len(copies)} copies of the run, instead of {old.value / 1e9:.3f}"
    return link.model_copy(update={name: quantity}), [note]


def _ratios(predicted: dict[str, float], run: Run) -> dict[str, float]:
    """Measured over predicted for each term that can be told; one for all where the clock does not tell them apart."""
    measured = run.metrics.tpot_terms_ms
    known = [name for name in _FIELDS if predicted.get(name, 0) > 0 and measured.get(name, 0) > 0]
    if run.info.emulated:
        return {name: measured[name] / predicted[name] for name in known}
    whole = sum(measured[name] for name in known) / max(1e-12, sum(predicted[name] for name in known))
    return dict.fromkeys(known, whole)


def _rescaled(costs: MeasuredCosts, ratios: dict[str, float]) -> MeasuredCosts:
    changed: dict[str, Any] = {}
    for term, ratio in ratios.items():
        for name in _FIELDS[term]:
            value = getattr(costs, name)
            if isinstance(value, dict):
                changed[name] = {key: ratio * each for key, each in value.items()}
            else:
                changed[name] = tuple(ratio * each for each in value) if isinstance(value, tuple) else ratio * value
    return costs.model_copy(update=changed)


def _slower(device: DeviceProfile, ratios: dict[str, float]) -> DeviceProfile:
    """A data sheet's rates, all by the ratio of dense layers and experts."""
    known = [ratios[name] for name in ("dense", "experts") if name in ratios]
    if not known:
        return device
    ratio = sum(known) / len(known)

    def times(quantity: Quantity, factor: float) -> Quantity:
        return Quantity(value=quantity.value * factor, kind="measured", source=f"{quantity.source}, rescaled by a run")

    return device.model_copy(
        update={
            "memory_bytes_per_s": times(device.memory_bytes_per_s, 1 / ratio),
            "flops_per_s": times(device.flops_per_s, 1 / ratio),
            "launch_ns": times(device.launch_ns, ratio),
        }
    )
