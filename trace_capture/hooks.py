"""Looking into a live transformers model: where its experts, routers and norms are, and what they are routed to.

The only file of this package that imports torch. It changes nothing in a model: sites are found by one dry forward
that follows tensors by their storage, not by names, and routing is read by forward hooks on the router modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trace_capture.errors import ModelError
from trace_capture.model_shape import ModelShape
from trace_capture.recording import PassRecording, RowSink
from trace_capture.supported import architecture_name, check_supported

CausalModel = Any
"""A transformers causal language model; torch types the attributes of a module as tensors, so it stays untyped."""
_LAYER_NUMBER = re.compile(r"\.(\d+)(?:\.|$)")


class LiveArgument:
    """A router's argument that changes with every pass: what another module was given or gave.

    Args:
        module: where to look, such as the embedding for token ids, or the router of the layer before.
        position: which of its inputs or outputs.
        is_output: whether it is an output.
    """

    def __init__(self, module: nn.Module, position: int, is_output: bool) -> None:
        self._module = module
        self._position = position
        self._is_output = is_output
        self.value: Any = None
        """As of the module's last call while watched."""

    def watch(self) -> RemovableHandle:
        """Keep `value` up to date; the caller removes the handle."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = _Call.of(module, args, kwargs, output)
            self.value = (call.outputs if self._is_output else call.inputs)[self._position]

        return self._module.register_forward_hook(hook, with_kwargs=True)


@dataclass(frozen=True, eq=False)
class MoeSite:
    """One Mixture-of-Experts layer of a live model.

    Attributes:
        index: MoE layer index, 0 for the first.
        decoder_layer: number of the decoder layer it belongs to.
        path: module path of the experts.
        experts, router: the modules.
        norm: the module whose output the router reads, or None when it reads the residual itself.
        router_extra: further positional arguments of the router, such as a correction bias; those that change with
            every pass stand there as `LiveArgument`.
        router_rank: rank of the router's input tensor.
        top_k: experts per token.
    """

    index: int
    decoder_layer: int
    path: str
    experts: nn.Module
    router: nn.Module
    norm: nn.Module | None
    router_extra: tuple[Any, ...]
    router_rank: int
    top_k: int

    def watch(self) -> list[RemovableHandle]:
        """Keep the router's live arguments up to date, for `route` during passes; the caller removes the handles."""
        return [argument.watch() for argument in self.router_extra if isinstance(argument, LiveArgument)]

    def route(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights that this site's own norm and router give for a residual stream.

        Args:
            residual: the stream in front of the norm, any leading shape, last axis H.

        Returns:
            ids [T, K] and weights [T, K], by the architecture's own rule (softmax, sigmoid, groups, biases).
        """
        return self.choose(self.normed(residual))

    def normed(self, residual: Tensor) -> Tensor:
        """A residual stream behind this site's norm: what its router reads, of the same shape."""
        return residual if self.norm is None else self.norm.forward(residual)

    def choose(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights [T, K] that this site's router gives for its input, of any leading shape, last axis H."""
        flat = normed.reshape(-1, normed.shape[-1])
        shaped = flat if self.router_rank == 2 else flat.unsqueeze(0)
        extra = [argument.value if isinstance(argument, LiveArgument) else argument for argument in self.router_extra]
        _, weights, ids = self.router.forward(shaped, *extra)[:3]
        return ids.reshape(flat.shape[0], -1), weights.reshape(flat.shape[0], -1)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds fused experts that go through the transformers experts interface."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "_apply_gate")


def expert_parameters(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a fused experts module that have one slice per expert, by name."""
    count = int(experts.num_experts)  # type: ignore[arg-type]
    own = experts.named_parameters(recurse=False)
    return {name: parameter for name, parameter in own if parameter.dim() >= 2 and parameter.shape[0] == count}


def discover(model: nn.Module) -> list[MoeSite]:
    """Find every Mixture-of-Experts layer of a model, in order of execution.

    Raises:
        ModelError: the model has no fused experts, is no decoder, runs its experts several times per pass, or a
            site's router cannot be found.
    """
    name = architecture_name(model)
    experts = {module: path for path, module in model.named_modules() if is_experts(module)}
    check_supported(model, has_fused_experts=bool(experts))
    calls: list[_Call] = []
    handles = [
        module.register_forward_hook(lambda *call: calls.append(_Call.of(*call)), with_kwargs=True)
        for module in model.modules()
    ]
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([[1, 2]], device=device), use_cache=False)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"a trial forward pass of {name} failed ({error}); the model cannot be captured") from error
    finally:
        for handle in handles:
            handle.remove()
    places = [place for place, call in enumerate(calls) if call.module in experts]
    if len({calls[place].module for place in places}) < len(places):
        raise ModelError(f"{name} is not supported yet: it runs the experts of a layer several times per forward pass")
    constants = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [_site(calls, place, experts, constants, index) for index, place in enumerate(places)]


@dataclass(eq=False)
class _Call:
    """One module call of the dry forward; keeps its tensors alive so that storage addresses stay unique."""

    module: nn.Module
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @staticmethod
    def of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> _Call:
        """From what a forward hook gets."""
        outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
        return _Call(module, (*args, *kwargs.values()), outputs)


def _address(value: Any) -> int | None:
    return value.data_ptr() if isinstance(value, Tensor) else None


def _site(
    calls: Sequence[_Call], place: int, experts: dict[nn.Module, str], constants: set[int | None], index: int
) -> MoeSite:
    call = calls[place]
    path = experts[call.module]
    ids_address = _address(call.inputs[1])
    before = calls[:place]
    router = next((c for c in reversed(before) if ids_address in [_address(out) for out in c.outputs]), None)
    if router is None:
        raise ModelError(f"no router module was found for {path}; this architecture cannot be captured")
    address = _address(router.inputs[0])
    leaves = (c for c in reversed(before) if not any(c.module.children()) and not isinstance(c.module, nn.Identity))
    norm = next((c.module for c in leaves if address in [_address(out) for out in c.outputs]), None)
    numbers = _LAYER_NUMBER.findall(path)
    return MoeSite(
        index=index,
        decoder_layer=int(numbers[0]) if numbers else 0,
        path=path,
        experts=call.module,
        router=router.module,
        norm=norm,
        router_extra=tuple(_argument(value, before, constants) for value in router.inputs[1:]),
        router_rank=router.inputs[0].dim(),
        top_k=call.inputs[1].shape[-1],
    )


def _argument(value: Any, before: Sequence[_Call], constants: set[int | None]) -> Any:
    """An argument of a router as it is, or where to find it anew in each pass: at the module that saw it first."""
    address = _address(value)
    if address is None or address in constants:
        return value
    for call in before:
        for is_output, tensors in ((False, call.inputs), (True, call.outputs)):
            addresses = [_address(tensor) for tensor in tensors]
            if address in addresses:
                return LiveArgument(call.module, addresses.index(address), is_output)
    return value


def model_shape(model: CausalModel, sites: Sequence[MoeSite], name: str) -> ModelShape:
    """Counts and bytes of a live model whose experts have not been offloaded.

    Args:
        model: a transformers causal language model.
        sites: of `discover`.
        name: what reports call the model.
    """
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    first = sites[0]
    expert_bytes = tuple(
        sum(p.numel() * p.element_size() for p in expert_parameters(site.experts).values()) // _num_experts(site)
        for site in sites
    )
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layer_ids = tuple(site.decoder_layer for site in sites)
    of_site = _layer_config(config, first.decoder_layer)
    some = next(iter(expert_parameters(first.experts).values()))
    return ModelShape(
        name=name,
        architecture=str(config.model_type),
        num_layers=int(config.num_hidden_layers),
        moe_layer_ids=layer_ids,
        num_experts=_num_experts(first),
        top_k=first.top_k,
        num_shared_experts=int(getattr(of_site, "n_shared_experts", 0) or 0),
        hidden_size=int(config.hidden_size),
        moe_intermediate_size=getattr(of_site, "moe_intermediate_size", None)
        or getattr(of_site, "intermediate_size", None),
        vocab_size=int(config.vocab_size),
        weight_dtype=str(some.dtype).removeprefix("torch."),
        expert_bytes=expert_bytes,
        dense_bytes=_dense_bytes(model, sites, expert_bytes),
        head_bytes=sum(p.numel() * p.element_size() for p in head.parameters()) if head is not None else 0,
        kv_bytes_per_token=some.element_size() * sum(_kv_width(config, n) for n in range(config.num_hidden_layers)),
        kv_counts="latent" if _keeps_latent(config) else "heads",
    )


def _layer_config(config: Any, layer: int) -> Any:
    """What a decoder layer is built from: some architectures differ from layer to layer."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def _keeps_latent(config: Any) -> bool:
    """Whether attention is latent, whose cache engines and current transformers keep compressed."""
    return getattr(config, "kv_lora_rank", None) is not None


def _kv_width(config: Any, layer: int) -> int:
    """Numbers that a decoder layer keeps per token for attention."""
    own = _layer_config(config, layer)
    if _keeps_latent(config):
        return int(own.kv_lora_rank + own.qk_rope_head_dim)
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // max(1, own.num_attention_heads)
    return 2 * (getattr(own, "num_key_value_heads", 0) or 0) * int(head_dim)


def _num_experts(site: MoeSite) -> int:
    return int(site.experts.num_experts)  # type: ignore[arg-type]


def _dense_bytes(model: nn.Module, sites: Sequence[MoeSite], expert_bytes: Sequence[int]) -> tuple[int, ...]:
    """Bytes beside routed experts of each MoE layer's decoder layer and the dense decoder layers before it."""
    prefix = sites[0].path.split(f".{sites[0].decoder_layer}.")[0]
    per_layer: dict[int, int] = {}
    for path, parameter in model.named_parameters():
        if path.startswith(prefix + "."):
            number = int(path[len(prefix) + 1 :].split(".")[0])
            per_layer[number] = per_layer.get(number, 0) + parameter.numel() * parameter.element_size()
    result, previous = [], -1
    for site, one_expert in zip(sites, expert_bytes, strict=True):
        span = range(previous + 1, site.decoder_layer + 1)
        result.append(sum(per_layer.get(number, 0) for number in span) - one_expert * _num_experts(site))
        previous = site.decoder_layer
    return tuple(max(0, size) for size in result)


class Predictor(Protocol):
    """Foresees the experts of the next MoE layer; see `runtime.predictors`."""

    name: str

    def attach(self) -> list[RemovableHandle]:
        """Install what it needs to see on the model; the caller removes the handles."""

    def predict(self, layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights [T, K] for MoE layer `layer` + 1, given the routing [T, K] of `layer`."""


class ExpertObserver(Protocol):
    """Sees what a site's experts were given; see `runtime.default_vectors`."""

    def add(self, site: MoeSite, hidden: Tensor, ids: Tensor) -> None:
        """Hidden states [T, H] that were routed to `ids` [T, K]."""


class RoutingRecorder:
    """Hooks that turn the forward passes of an untouched model into trace rows.

    Args:
        model: a transformers causal language model, batch size 1.
        sites: of `discover`.
        sink: called at the end of each forward pass with its rows, keyed like `TraceWriter.append`.
        predictor: records its ids beside the true ones, if given.
        observer: sees the inputs of all experts, if given.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[MoeSite],
        sink: RowSink,
        predictor: Predictor | None = None,
        observer: ExpertObserver | None = None,
    ) -> None:
        self._model = model
        self._sites = sites
        self._sink = sink
        self._predictor = predictor
        self._observer = observer
        self._handles: list[RemovableHandle] = []
        self.passes = PassRecording(len(sites), sink)
        """Listens to the drafting of speculative decoding, where there is any."""
        self._tokens = np.zeros(0, dtype=np.int32)
        self._experts: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._predicted: dict[int, Tensor] = {}

    def __enter__(self) -> RoutingRecorder:
        self._handles.append(self._model.register_forward_pre_hook(self._begin_pass, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(self._end_pass))
        if self._predictor is not None:  # before the routers' hooks, which ask it
            self._handles.extend(self._predictor.attach())
        for site in self._sites:
            self._handles.append(site.router.register_forward_hook(self._router_hook(site)))
            if self._observer is not None:
                self._handles.append(site.experts.register_forward_hook(self._experts_hook(site)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_sequence(self, sequence: int) -> None:
        """The next forward pass is the prefill of prompt number `sequence`."""
        self.passes.begin_sequence(sequence)

    def _begin_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if ids.shape[0] != 1:
            raise ModelError(f"capture needs batch size 1, got {ids.shape[0]}; capture prompts one after the other")
        self._tokens = ids[0].to("cpu", torch.int32).numpy()
        self._experts, self._weights, self._predicted = {}, {}, {}

    def _router_hook(self, site: MoeSite) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            weights = output[1].reshape(-1, output[1].shape[-1])
            ids = output[2].reshape(-1, output[2].shape[-1])
            self._experts[site.index], self._weights[site.index] = ids, weights
            if self._predictor is not None and site.index + 1 < len(self._sites):
                self._predicted[site.index + 1] = self._predictor.predict(site.index, ids, weights)[0]

        return hook

    def _experts_hook(self, site: MoeSite) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_: nn.Module, args: tuple[Any, ...], __: Any) -> None:
            if self._observer is not None:
                self._observer.add(site, args[0], args[1])

        return hook

    def _end_pass(self, *_: object) -> None:
        name = self._predictor.name if self._predictor is not None else ""
        predicted = {name: _to_numpy(self._predicted)} if name else {}
        self.passes.end_pass(self._tokens, _to_numpy(self._experts), _to_numpy(self._weights), predicted)


def _to_numpy(by_layer: dict[int, Tensor]) -> dict[int, Any]:
    return {layer: values.detach().to("cpu", torch.float32).numpy() for layer, values in by_layer.items()}
