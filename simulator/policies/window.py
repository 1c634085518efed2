"""How much time loads have that are planned when drafting begins: the mean of what was measured so far."""

from __future__ import annotations

from simulator.policies.utility_config import UtilityConfig


class DraftingWindow:
    """A running mean, kept by the driver, which alone knows a clock; what it gives goes into the core's log.

    Args:
        config: which time counts, or how long it is.
        first_ns: before anything was measured.
    """

    def __init__(self, config: UtilityConfig, first_ns: int = 0) -> None:
        self._fixed_ns = config.window_ns
        self._counts_pass = config.window == "round"
        self._first_ns = first_ns
        self._total_ns = 0
        self._rounds = 0

    @property
    def expected_ns(self) -> int:
        """Of the round that begins."""
        if self._fixed_ns is not None:
            return self._fixed_ns
        return self._total_ns // self._rounds if self._rounds else self._first_ns

    def ended(self, drafting_ns: int, round_ns: int) -> None:
        """A round is over that drafted for `drafting_ns` and took `round_ns` with its pass. Where nothing was drafted
        loads can hide behind the pass alone."""
        self._total_ns += round_ns if self._counts_pass or not drafting_ns else drafting_ns
        self._rounds += 1
