"""Counting what the offload core decides, apart for prompts, warm-up and generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulator.policies.eviction import Key
from simulator.policies.plans import ADMISSION, Counters


class Tally:
    """Counters of a run, of which one is current.

    Attributes:
        prefill, warmup, decode: the counters.
        warmup_passes: so many decode passes at the start are counted in `warmup`.
        first_uses: experts of the latest look-up that were prefetched and had not been asked for since.
    """

    def __init__(self) -> None:
        self.prefill = Counters()
        self.warmup = Counters()
        self.decode = Counters()
        self.warmup_passes = 0
        self._decode_passes = 0
        self._is_drafting = False
        self._now = self.decode
        self.first_uses: Sequence[int] = ()
        self._unused: set[Key] = set()
        """Prefetched keys that nobody has asked for yet."""
        self._counted_in: dict[Key, Counters] = {}
        """Where the load of each key on the device was counted, since it may be withdrawn in a later pass."""

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
        self._unused.clear()
        self._counted_in.clear()

    def looked_up(self, layer: int, experts: Sequence[int], landed: Mapping[int, bool]) -> None:
        """A layer asks for `experts`; `landed` says which have a place, and whether their copy is there."""
        counters = self._now
        present = [expert for expert in experts if expert in landed]
        late = sum(not landed[expert] for expert in present)
        counters.lookups += len(experts)
        counters.late += late
        counters.hits += len(present) - late
        self.first_uses = ()
        if self._unused:
            used = self._unused.intersection([(layer, expert) for expert in present])
            counters.prefetch_used += len(used)
            self._unused -= used
            self.first_uses = [expert for _, expert in used]

    def ran_on_cpu(self, experts: int) -> None:
        """So many experts of a layer run on the CPU."""
        self._now.cpu_runs += experts

    def loaded(self, key: Key, num_bytes: int, reason: str) -> None:
        """A load was planned. What is there before the first pass is in no counter."""
        if reason == "preload":
            return
        counters = self._counted_in[key] = self._now
        counters.bytes_loaded += num_bytes
        if reason == "demand":
            counters.demand_loads += 1
        elif reason == ADMISSION:
            counters.admission_loads += 1
        else:
            counters.prefetch_loads += 1
            self._unused.add(key)

    def cancelled(self, key: Key, num_bytes: int, reason: str) -> None:
        """A load was withdrawn before it began."""
        counters = self._counted_in[key]
        counters.bytes_loaded -= num_bytes
        if reason == ADMISSION:
            counters.admission_loads -= 1
        else:
            counters.prefetch_loads -= 1

    def left(self, key: Key) -> None:
        """A key gave its place up."""
        self._counted_in.pop(key, None)
        if self._unused:
            self._unused.discard(key)

    def evicted(self, keys: int) -> None:
        """So many keys had to leave, or were dropped by their policy."""
        self._now.evictions += keys
