"""What the live engine notes of every pass."""

from __future__ import annotations

from typing import NamedTuple

from simulator.policies.cache import Key


class LayerTimes(NamedTuple):
    """Moments within one layer, of `time.perf_counter_ns`: entered; loads decided and submitted; next layer
    predicted; its loads submitted; everything needed landed; the device's experts run; the CPU's joined as well."""

    entered_ns: int
    decided_ns: int
    predicted_ns: int
    submitted_ns: int
    landed_ns: int
    device_done_ns: int
    done_ns: int
    num_loads: int
    evicted: tuple[Key, ...]
    """Experts that made room for this layer's loads and prefetches."""
    dropped: tuple[Key, ...]
    """Experts that the cache policy let go when the layer had run."""
    first_uses: tuple[int, ...]
    """Experts that were loaded ahead and are used for the first time since."""
    cpu_ns: tuple[int, int] | None
    """When the CPU's part of the layer began and ended; None if it had none. `device_done_ns` is `done_ns` then."""


class PassRecord:
    """When a pass began, what it was, and the times of its layers."""

    __slots__ = ("accepted_drafts", "began_ns", "drafting_ns", "is_prefill", "layers", "planned_ns", "tokens")

    def __init__(self, began_ns: int, is_prefill: bool, tokens: int, drafting_ns: int = 0, planned_ns: int = 0) -> None:
        self.began_ns = began_ns
        self.planned_ns = planned_ns  # planning what is loaded while drafts are made, with which the pass began
        self.drafting_ns = drafting_ns  # making them, after that
        self.is_prefill = is_prefill
        self.tokens = tokens
        self.accepted_drafts = 0  # of a verify pass, set once it is known
        self.layers: list[LayerTimes] = []
