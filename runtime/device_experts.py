"""The device's part of a layer: experts run from slots."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from runtime.kernels import Kernel, Routed, SlotExperts, WaveSum, gathered, on_device, stock_kernel
from runtime.slots import SlotPool
from trace_capture.hooks import MoeSite


class DeviceExperts:
    """Runs experts of a layer that all have landed.

    Args:
        sites: Mixture-of-Experts layers of the model.
        pools: the pool of each of them; layers may share one.
        implementation: the experts implementation that the untouched model uses.
    """

    def __init__(self, sites: Sequence[MoeSite], pools: Sequence[SlotPool], implementation: str | None) -> None:
        self._sites = sites
        self._pools = pools
        self._kernels: list[tuple[Kernel, bool]] = []
        self.use(implementation)
        is_shared = len({id(pool) for pool in pools}) < len(sites)
        self._views = [
            None if is_shared else SlotExperts(site.experts, pool.tensors)
            for site, pool in zip(sites, pools, strict=True)
        ]

    def use(self, implementation: str | None) -> None:
        """Run the kernels of this experts implementation from now on."""
        self._kernels = [stock_kernel(site.experts, implementation) for site in self._sites]

    def run_whole(self, layer: int, experts: Sequence[int], routed: Routed, index: Tensor) -> Tensor:
        """A layer in one kernel call, with the rounding of the untouched model: [T, H]; `index` is `rows` as the
        router gave it."""
        kernel, in_expert_order = self._kernels[layer]
        slots = self._slot_index(layer, experts)
        view = self._views[layer]
        if view is None or in_expert_order:
            view, slots = self._gathered(layer, slots)
        renamed = [[slots[expert] for expert in row] for row in routed.rows]
        slot_index = on_device(renamed, index.device, index.dtype)
        return kernel(view, routed.hidden, slot_index, routed.weights)

    def parts_of(self, layer: int, routed: Routed) -> WaveSum:
        """What takes the parts of a layer that is not run in one call."""
        return WaveSum(routed, self._kernels[layer][1])

    def add(self, parts: WaveSum, layer: int, experts: Sequence[int]) -> None:
        """Run some experts of a layer."""
        slots = self._slot_index(layer, experts)
        view = self._views[layer]
        if view is None:
            view, slots = self._gathered(layer, slots)
        parts.add(self._kernels[layer][0], view, slots)

    def _slot_index(self, layer: int, experts: Sequence[int]) -> dict[int, int]:
        """Slot of each expert, checked against the load that filled it."""
        pool = self._pools[layer]
        return {expert: pool.checked_slot((layer, expert)) for expert in experts}

    def _gathered(self, layer: int, slots: dict[int, int]) -> tuple[SlotExperts, dict[int, int]]:
        """Just the wanted experts, in order of their number, with their new places."""
        ordered = sorted(slots)
        tensors = self._pools[layer].tensors
        view = gathered(self._sites[layer].experts, tensors, [slots[expert] for expert in ordered])
        return view, {expert: place for place, expert in enumerate(ordered)}
