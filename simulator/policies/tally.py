"""Counting what the offload core decides, apart for prompts, warm-up and generation."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.policies.plans import ADMISSION, Counters, Load


class Tally:
    """Counters of a run, of which one is current.

    Attributes:
        prefill, warmup, decode: the counters.
        warmup_passes: so many decode passes at the start are counted in `warmup`.
        first_uses: experts of the latest look-up that were prefetched and had not been asked for since.

    Args:
        num_layers, num_experts: L and E.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.prefill = Counters()
        self.warmup = Counters()
        self.decode = Counters()
        self.warmup_passes = 0
        self._decode_passes = 0
        self._is_drafting = False
        self._now = self.decode
        self.first_uses: Sequence[int] = ()
        self._unused = [bytearray(num_experts) for _ in range(num_layers)]
        """Per layer and expert, 1: it was prefetched and nobody has asked for it yet; it may have left again."""
        self._counted_in = [[self.decode] * num_experts for _ in range(num_layers)]
        """Per layer and expert, where its latest load ahead was counted, since it may be withdrawn in a later pass."""

    def begin_drafting(self) -> None:
        """What is planned from now on belongs to the decode pass that comes."""
        self.begin_pass(False)
        self._is_drafting = True

    def begin_pass(self, is_prefill: bool) -> None:
        """A forward pass starts."""
        is_counted, self._is_drafting = self._is_drafting, False
        if is_prefill:
            self._now = self.prefill
        elif not is_counted:
            self._now = self.decode if self._decode_passes >= self.warmup_passes else self.warmup
            self._decode_passes += 1

    def restarted(self) -> None:
        """The device was emptied; the counts go on."""
        self._unused = [bytearray(len(unused)) for unused in self._unused]

    def looked_up(self, layer: int, experts: Sequence[int], absent: Sequence[int], late: int) -> None:
        """A layer asks for `experts`. Those in `absent` have no place; so many have one and are on their way to it."""
        counters, asked = self._now, len(experts)
        counters.lookups += asked
        counters.hits += asked - len(absent) - late
        counters.late += late
        unused = self._unused[layer]
        used: list[int] = []
        for expert in experts:
            if unused[expert] and expert not in absent:
                unused[expert] = 0
                used.append(expert)
        counters.prefetch_used += len(used)
        self.first_uses = used

    def ran_on_cpu(self, experts: int) -> None:
        """So many experts of a layer run on the CPU."""
        self._now.cpu_runs += experts

    def loaded(self, layer: int, experts: Sequence[int], expert_bytes: int, reason: str, evicted: int) -> None:
        """Loads of experts of one layer were planned, for which so many keys have to leave. What is there before the
        first pass is in no counter."""
        counters, count = self._now, len(experts)
        unused, counted_in = self._unused[layer], self._counted_in[layer]
        if reason == "demand":
            counters.demand_loads += count
            for expert in experts:
                unused[expert] = 0
        elif reason == "preload":
            return
        elif reason == ADMISSION:
            counters.admission_loads += count
            for expert in experts:
                counted_in[expert] = counters
                unused[expert] = 0
        else:
            counters.prefetch_loads += count
            for expert in experts:
                counted_in[expert] = counters
                unused[expert] = 1
        counters.bytes_loaded += count * expert_bytes
        counters.evictions += evicted

    def cancelled(self, load: Load) -> None:
        """A load was withdrawn before it began."""
        layer, expert = load.key
        counters = self._counted_in[layer][expert]
        counters.bytes_loaded -= load.num_bytes
        if load.reason == ADMISSION:
            counters.admission_loads -= 1
        else:
            counters.prefetch_loads -= 1
        self._unused[layer][expert] = 0

    def evicted(self, keys: int) -> None:
        """So many keys had to leave, or were dropped by their policy."""
        self._now.evictions += keys
