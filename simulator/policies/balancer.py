"""Which experts are hot enough for the device: the threshold on utility that balances device and CPU.

Stated by MoE-SpAc (arXiv 2603.09983): at every verify pass an integer threshold tau is chosen; experts whose state
reaches it run on the device, the others on the CPU, so that both take equally long; what must be loaded fits free
device memory, and is loaded within the time of drafting. Ours, because the equations are not public: the tables below,
and the larger threshold among equals, which loads less. The paper minimises the difference of the two times; the
default here is the larger of them, which is what a pass waits for (the two agree where balance can be reached).

All coefficients are constants once tau is given, so a scan over its few values is exact. `simulator.balance_program`
states the same as an integer program.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trace_capture.errors import ConfigError

Ints = npt.NDArray[np.int64]
Objective = Literal["longest", "difference"]


class ExpertTimes(NamedTuple):
    """What the experts of each layer cost on either side.

    Attributes:
        device_ns: one expert on the device by the tokens it serves, 0 for none, int64 [L, G + 2].
        cpu_ns: likewise on the CPU.
        device_base_ns: on top for a layer of which any expert runs on the device, int64 [L].
        cpu_base_ns: likewise for the CPU.
        copy_ns: loading one expert, int64 [L].
        expert_bytes: int64 [L].
    """

    device_ns: Ints
    cpu_ns: Ints
    device_base_ns: Ints
    cpu_base_ns: Ints
    copy_ns: Ints
    expert_bytes: Ints


class ThresholdTable(NamedTuple):
    """What each threshold would come to; column j stands for tau = j + 1, the last one for nothing on the device.

    Attributes:
        device_ns, cpu_ns: time of either side, int64 [L, top + 1].
        load_ns: time of the loads it asks for.
        grow_bytes: device memory that it takes beyond what evicting everything colder gives back; may be negative.
    """

    device_ns: Ints
    cpu_ns: Ints
    load_ns: Ints
    grow_bytes: Ints

    def cost_ns(self, objective: Objective) -> Ints:
        """What is minimised, int64 [L, top + 1]: `longest` of both sides, or their `difference` as the paper says."""
        if objective == "longest":
            return np.asarray(np.maximum(self.device_ns, self.cpu_ns))
        return np.asarray(np.abs(self.device_ns - self.cpu_ns))


def threshold_table(
    states: Ints, frequencies: Ints, resident: npt.NDArray[np.bool_], times: ExpertTimes, top: int
) -> ThresholdTable:
    """Tables of one or several layers.

    Args:
        states: utilities 0..top [L, E].
        frequencies: tokens that each expert is expected to serve in the next pass, 0..G+1 [L, E].
        resident: whether it is on the device and may stay or leave [L, E].
        times: of the same layers.
        top: the highest state.
    """
    layers = len(states)
    places = (states + np.arange(layers)[:, None] * (top + 1)).ravel()

    def of_hot(values: npt.NDArray[np.generic]) -> Ints:
        """Sum of `values` [L, E] over the experts at or above each threshold 0..top+1, int64 [L, top + 2]."""
        by_state = np.bincount(places, weights=values.ravel(), minlength=layers * (top + 1))
        sums = np.zeros((layers, top + 2), dtype=np.int64)
        sums[:, -2::-1] = np.cumsum(by_state.reshape(layers, top + 1)[:, ::-1], axis=1)
        return sums

    used = of_hot(frequencies > 0)
    cpu = of_hot(np.take_along_axis(times.cpu_ns, frequencies, axis=1))
    device = of_hot(np.take_along_axis(times.device_ns, frequencies, axis=1))
    new, stay = of_hot(~resident)[:, 1:], of_hot(resident)
    leave = (stay[:, :1] - stay)[:, 1:]
    on_cpu = (used[:, :1] - used)[:, 1:]
    return ThresholdTable(
        device_ns=device[:, 1:] + times.device_base_ns[:, None] * (used[:, 1:] > 0),
        cpu_ns=(cpu[:, :1] - cpu)[:, 1:] + times.cpu_base_ns[:, None] * (on_cpu > 0),
        load_ns=new * times.copy_ns[:, None],
        grow_bytes=(new - leave) * times.expert_bytes[:, None],
    )


def global_threshold(table: ThresholdTable, free_bytes: int, window_ns: int, objective: Objective = "longest") -> int:
    """One tau for all layers of the table, 1..top+1: the least sum of the layers' costs, which run one after another.

    Args:
        table: of `threshold_table`.
        free_bytes: device memory that is free now.
        window_ns: loads must end within the time of drafting.
        objective: see `ThresholdTable.cost_ns`.

    Raises:
        ConfigError: free_bytes or window_ns is negative; with both at least 0 nothing on the device always fits.
    """
    _check(free_bytes, window_ns)
    fits = (table.grow_bytes.sum(axis=0) <= free_bytes) & (table.load_ns.sum(axis=0) <= window_ns)
    return int(_largest_best(table.cost_ns(objective).sum(axis=0, keepdims=True), fits[None])[0])


def layer_thresholds(
    table: ThresholdTable, free_bytes: Ints, window_ns: Ints, objective: Objective = "longest"
) -> Ints:
    """A tau for each layer by itself, int64 [L], within memory [L] and a share of the window [L] of its own.

    Raises:
        ConfigError: a limit is negative.
    """
    _check(int(free_bytes.min()), int(window_ns.min()))
    fits = (table.grow_bytes <= free_bytes[:, None]) & (table.load_ns <= window_ns[:, None])
    return _largest_best(table.cost_ns(objective), fits)


def _largest_best(cost_ns: Ints, fits: npt.NDArray[np.bool_]) -> Ints:
    """The largest of the cheapest thresholds of each row."""
    allowed = np.where(fits, cost_ns, np.iinfo(np.int64).max)
    return np.asarray(allowed.shape[1] - np.argmin(allowed[:, ::-1], axis=1), dtype=np.int64)


def _check(free_bytes: int, window_ns: int) -> None:
    if free_bytes < 0 or window_ns < 0:
        raise ConfigError(
            f"the balancer got {free_bytes:,} free bytes and a window of {window_ns:,} ns; neither can be negative"
        )
