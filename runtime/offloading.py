"""`offload` and `unload`: change a transformers model in place so that its experts run from a few slots, and back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from runtime.default_vectors import VECTORS_FILE, LayerDefaults, load_default_vectors
from runtime.engine import Engine
from runtime.estimator import ESTIMATOR_FILE, make_predictor
from runtime.expert_costs import measure_expert_times
from runtime.expert_files import ExpertFiles, expert_files
from runtime.host_experts import check_threads, host_implementation
from runtime.kernels import Kernel, stock_kernel
from runtime.link import EmulatedLink, ThreadedLink
from runtime.pass_hooks import watch_passes
from runtime.prefill import ChunkedPrefill
from runtime.refusals import refuse_copy, refuse_state, without_backward
from runtime.slots import ExpertBanks, make_pools
from runtime.store import ExpertStore
from simulator.expert_times import times_for
from simulator.policies.balancer import ExpertTimes
from simulator.policies.capacity import plan_capacity
from simulator.policies.config import OffloadConfig
from simulator.policies.core import OffloadCore
from trace_capture.errors import ConfigError, ModelError
from trace_capture.hardware import HardwareProfile
from trace_capture.hooks import CausalModel, MoeSite, Predictor, discover, expert_parameters, is_experts, model_shape
from trace_capture.model_shape import ModelShape

IMPLEMENTATION = "moe_studio_offload"
STREAMED_IMPLEMENTATION = "moe_studio_streamed"
_PROBE_IMPLEMENTATION = "moe_studio_probe"
_DECODE_SWITCH = "_optimize_model_for_decode"
"""The method by which transformers' `generate` changes the experts implementation for the length of decode."""


@dataclass
class _Offloaded:
    """What must be undone, as far as it was done."""

    store: ExpertStore
    implementation: str | None
    sites: list[MoeSite]
    link: ThreadedLink | None = None
    engine: Engine | None = None
    others: list[nn.Module] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)


_ENGINE_OF_EXPERTS: WeakKeyDictionary[nn.Module, tuple[Engine, int]] = WeakKeyDictionary()
_KERNEL_OF_OTHERS: WeakKeyDictionary[nn.Module, Kernel] = WeakKeyDictionary()
"""Experts that no text passes through, such as those of a vision tower, stay where they are and run as before."""
_OFFLOADED: WeakKeyDictionary[nn.Module, _Offloaded] = WeakKeyDictionary()


def offload(
    model: CausalModel,
    config: OffloadConfig,
    *,
    default_vectors: Tensor | LayerDefaults | Path | None = None,
    estimator: Path | None = None,
    hardware: HardwareProfile | None = None,
    name: str | None = None,
    log: list[tuple[Any, ...]] | None = None,
) -> Engine:
    """Take a model's experts off the device and run them from slots; `generate` and everything else keeps working.

    Output is exact: the same kernels see the same numbers as in the untouched model.

    Args:
        model: a transformers causal language model with fused experts, on its device.
        config: budget, cache policy, prefetch and device.
        default_vectors: [L, E, H], alone or with what comes beside them, or a file of them, for prefetch by the
            quasi-hidden state; by default the file beside the model's weights.
        estimator: file of a trained estimator, for prefetch by `estimator` or `hybrid`; by default the one beside
            the model's weights.
        hardware: profile of this machine, for policies that weigh what an expert costs on device and CPU; without one
            that is measured here.
        name: what reports call the model; by default the last part of its path.
        log: if given, every call to the offload core and every plan is appended to it.

    Returns:
        the engine, whose `core` has the counters; `unload(model)` undoes everything.

    Raises:
        ModelError: the architecture cannot be offloaded, the model already is, or default vectors are missing.
        ConfigError: the budget is too small for the model, the device does not exist, or a policy needs what a live
            run cannot have.
    """
    if model in _OFFLOADED:
        raise ModelError("this model is already offloaded; call unload(model) first")
    check_threads(config.cpu)
    files = expert_files(model)
    sites = find_sites(model)
    shape = model_shape(model, sites, name or model_name(model))
    capacity = plan_capacity(config.cache, shape, config.cpu.whole_layers(shape.num_moe_layers))
    device = next(model.parameters()).device
    on_cuda = _on_cuda(config, device)
    implementation = model.config._experts_implementation
    times = _expert_times(model, config, shape, sites, files, hardware)
    core = OffloadCore.from_config(config, shape, log, times=times)
    predictor = _make_predictor(model, core, sites, default_vectors, estimator)
    state = _Offloaded(ExpertStore(sites, pinned=on_cuda, files=files), implementation, sites)
    try:
        if state.store.note:
            warnings.warn(state.store.note, RuntimeWarning, stacklevel=2)
        pools = make_pools(state.store.banks, capacity, shape.expert_bytes, device)
        state.link = link = _make_link(config, device, on_cuda)
        kernels = implementation if files is None else files.implementation
        engine = Engine(sites, shape, config, state.store, pools, capacity, link, core, kernels, predictor, times)
        state.engine = engine
        _take_over(model, state, engine, kernels)
        _follow_decode_switch(model, engine, kernels, device)
        state.handles += [*watch_passes(model, engine), *refuse_state(sites)]
        if predictor is not None:
            state.handles += predictor.attach()
        if config.prefill.micro_batch is not None:
            state.handles.append(ChunkedPrefill(model, engine, config.prefill.micro_batch))
        engine.preload()
    except BaseException:
        _undo(model, state)
        raise
    _OFFLOADED[model] = state
    return engine


def _expert_times(
    model: CausalModel,
    config: OffloadConfig,
    shape: ModelShape,
    sites: list[MoeSite],
    files: ExpertFiles | None,
    hardware: HardwareProfile | None,
) -> ExpertTimes | None:
    """What experts cost, where the configuration weighs that: by a profile, else measured on the middle layer."""
    if not config.needs_expert_times:
        return None
    if hardware is not None:
        return times_for(config, hardware, shape)
    site, stock = sites[len(sites) // 2], model.config._experts_implementation
    bank: ExpertBanks = expert_parameters(site.experts) if files is None else files.layer(site.path, False)
    on_device = stock if files is None else files.implementation
    device = next(model.parameters()).device
    return measure_expert_times(config, shape, site, bank, (on_device, host_implementation(on_device)), device)


def _take_over(model: CausalModel, state: _Offloaded, engine: Engine, kernels: str | None) -> None:
    """Lead calls of the sites' experts to the engine, and those of the model's other experts to their own kernels."""
    for site in state.sites:
        _ENGINE_OF_EXPERTS[site.experts] = (engine, site.index)
    for module in model.modules():
        if is_experts(module) and module not in _ENGINE_OF_EXPERTS:
            _KERNEL_OF_OTHERS[module] = stock_kernel(module, kernels)[0]
            state.others.append(module)
    model.set_experts_implementation(IMPLEMENTATION)


def decode_implementation(implementation: str | None, device_type: str) -> str | None:
    """The experts implementation that `generate` decodes with, where a model is set to `implementation`: transformers
    takes batched for grouped products on every device but the CPU, after prefill."""
    return "batched_mm" if implementation == "grouped_mm" and device_type != "cpu" else implementation


def _follow_decode_switch(model: CausalModel, engine: Engine, kernels: str | None, device: torch.device) -> None:
    """Let the engine change kernels when the untouched model would: that looks for the name of its implementation,
    which is ours while the model is offloaded."""
    in_decode, switch = decode_implementation(kernels, device.type), getattr(model, _DECODE_SWITCH, None)
    if in_decode == kernels or switch is None:
        return

    @contextmanager
    def switched() -> Iterator[None]:
        with switch():
            engine.use_kernels(in_decode)
            try:
                yield
            finally:
                engine.use_kernels(kernels)

    model.__dict__[_DECODE_SWITCH] = switched


def unload(model: CausalModel) -> None:
    """Undo `offload`: the model is what it was, bit for bit.

    The experts of a model of `runtime.checkpoint.load_streamed` stay in their files, and it cannot run until it is
    offloaded again; load it whole with `load_model` to have it in memory.

    Raises:
        ModelError: the model is not offloaded.
    """
    state = _OFFLOADED.pop(model, None)
    if state is None:
        raise ModelError("this model is not offloaded, so there is nothing to unload")
    _undo(model, state)


def _undo(model: CausalModel, state: _Offloaded) -> None:
    """Make the model what it was, however far `offload` came."""
    for handle in state.handles:
        handle.remove()
    model.__dict__.pop(_DECODE_SWITCH, None)
    if state.engine is not None:
        state.engine.close()
    elif state.link is not None:
        state.link.close()
    state.store.restore()
    for site in state.sites:
        _ENGINE_OF_EXPERTS.pop(site.experts, None)
    for module in state.others:
        _KERNEL_OF_OTHERS.pop(module, None)
    model.set_experts_implementation(state.implementation)


@contextmanager
def offloaded(model: CausalModel, config: OffloadConfig, **options: Any) -> Iterator[Engine]:
    """`offload` for the length of a `with` block."""
    engine = offload(model, config, **options)
    try:
        yield engine
    finally:
        unload(model)


def model_name(model: CausalModel) -> str:
    """The last part of the path or hub id that a model was loaded from, else its class."""
    path = str(getattr(model, "name_or_path", "") or "")
    return Path(path).name or type(model).__name__


def _dispatch(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    place = _ENGINE_OF_EXPERTS.get(module)
    if place is None:
        kernel = _KERNEL_OF_OTHERS.get(module)
        return refuse_copy() if kernel is None else kernel(module, hidden, top_k_index, top_k_weights)
    engine, layer = place
    return without_backward(engine.run_layer(layer, hidden, top_k_index, top_k_weights))


def _refuse_to_run(*_: Any) -> Tensor:
    raise ModelError(
        "the experts of this model are in its files, so it runs only while it is offloaded: call offload(model, "
        "config) first, or load it whole with load_model"
    )


def _no_experts(_: nn.Module, hidden: Tensor, *__: Any) -> Tensor:
    return torch.zeros_like(hidden)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _dispatch)
ALL_EXPERTS_FUNCTIONS.register(STREAMED_IMPLEMENTATION, _refuse_to_run)
ALL_EXPERTS_FUNCTIONS.register(_PROBE_IMPLEMENTATION, _no_experts)


def find_sites(model: CausalModel) -> list[MoeSite]:
    """`discover`, also for a model whose experts are in its files.

    Raises:
        ModelError: as `discover`.
    """
    if expert_files(model) is None:
        return discover(model)
    # discovery follows tensors, not numbers, so experts that give zeros will do
    implementation = model.config._experts_implementation
    model.set_experts_implementation(_PROBE_IMPLEMENTATION)
    try:
        return discover(model)
    finally:
        model.set_experts_implementation(implementation)


def _on_cuda(config: OffloadConfig, device: torch.device) -> bool:
    if config.device.backend == "cuda" and device.type != "cuda":
        raise ConfigError(
            f"device.backend = 'cuda' but the model is on '{device.type}'; move the model to CUDA before offload, "
            "or set device.backend = 'emulated'"
        )
    return device.type == "cuda" and config.device.backend != "emulated"


def _make_link(config: OffloadConfig, device: torch.device, on_cuda: bool) -> ThreadedLink:
    if on_cuda:
        from runtime.cuda import CudaLink

        return CudaLink(device)
    return EmulatedLink(config.device.h2d_bytes_per_s, config.device.latency_ns)


def _make_predictor(
    model: CausalModel,
    core: OffloadCore,
    sites: list[MoeSite],
    source: Tensor | LayerDefaults | Path | None,
    estimator: Path | None,
) -> Predictor | None:
    if core.prefetch.prediction is None:
        return None
    folder = Path(str(getattr(model, "name_or_path", "")))
    if source is None or isinstance(source, Path):
        source = load_default_vectors(source or folder / VECTORS_FILE)
    return make_predictor(core.prefetch.prediction, sites, source, estimator or folder / ESTIMATOR_FILE)
