"""Loading large checkpoints: everything but the experts as usual, the experts left in their files until offloaded.

`load_streamed` gives a model that `offload`, `offloaded` and `unload` take like any other; no more than one expert at
a time is copied, beside the slots and what `host_bytes` allows. Between offloads such a model cannot run: `unload`
leaves its experts in the files, and `save_pretrained` is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import build_glob_alternation
from transformers.models.auto.auto_factory import _get_model_class

from runtime.engine import Engine
from runtime.expert_files import ExpertFiles, FileBank, attach_expert_files, map_experts
from runtime.models import LoadedModel, host_memory_bytes, load_tokenizer, model_source, quiet_transformers
from runtime.offloading import STREAMED_IMPLEMENTATION, offload
from runtime.tensor_files import TensorFile
from simulator.policies.config import OffloadConfig
from trace_capture.errors import ModelError
from trace_capture.hooks import CausalModel, expert_parameters, is_experts

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_streamed(path: str, device: str = "cpu", *, host_bytes: int = 0) -> LoadedModel:
    """Load a model and its tokenizer, with the experts left in their files.

    Args:
        path: a folder or hub id with safetensors weights, or `demo`.
        device: where everything but the experts goes.
        host_bytes: host memory to keep experts in, whole layers at a time; 0 keeps all mapped.

    Raises:
        ModelError: see `stream_model`.
    """
    source = model_source(path)
    return LoadedModel(stream_model(source, device, host_bytes=host_bytes), load_tokenizer(source), source)


def load_offloaded(
    path: str, config: OffloadConfig, device: str = "cpu", *, host_bytes: int = 0, **options: Any
) -> tuple[LoadedModel, Engine]:
    """`load_streamed` and `offload` in one.

    Args:
        path, device, host_bytes: of `load_streamed`.
        config, options: of `offload`.

    Raises:
        ModelError, ConfigError: as those two.
    """
    loaded = load_streamed(path, device, host_bytes=host_bytes)
    return loaded, offload(loaded.model, config, **options)


def stream_model(source: str, device: str = "cpu", *, host_bytes: int = 0) -> CausalModel:
    """Load a model without its tokenizer; see `load_streamed`.

    Raises:
        ModelError: weights are missing, damaged, quantised or not safetensors, or the architecture is not supported.
    """
    _check_folder(Path(source))
    try:
        with quiet_transformers():
            model, stripped = _load_stripped(source)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load a model from {source}: {str(error).strip().splitlines()[0]}") from error
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"cannot load a model from {source}: {str(error).strip().splitlines()[0]}") from error
    model = model.eval().to(device)
    stripped.finish(model, host_bytes)
    return model


def checkpoint_bytes(path: str) -> int:
    """Bytes of the weights in a local model folder; 0 for a hub id. Tells whether a model should be streamed."""
    return sum(file.stat().st_size for file in Path(model_source(path)).glob("*.safetensors"))


def should_stream(path: str, wanted: bool | None) -> bool:
    """Whether to leave a model's experts in their files: as wanted, or where the weights are more than half of RAM."""
    if wanted is not None:
        return wanted
    return checkpoint_bytes(path) > host_memory_bytes() / 2


def _check_folder(folder: Path) -> None:
    """Open every shard of a local folder, so that a missing or damaged one is named."""
    index = folder / _INDEX
    names: Sequence[str] = [_SINGLE] if (folder / _SINGLE).is_file() else []
    if not names and index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is damaged ({error}); copy or download this file again") from error
    if not names and folder.is_dir():
        raise ModelError(f"{folder} has no {_SINGLE} or {_INDEX}; experts can be streamed only from safetensors files")
    for name in names:
        TensorFile(folder / name)


def _load_stripped(source: str) -> tuple[CausalModel, _Stripped]:
    """`from_pretrained` of a subclass whose experts' parameters are gone before weights are read."""
    config = AutoConfig.from_pretrained(source)
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ModelError(f"{source} is a '{config.model_type}', which transformers does not know as a language model")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{source} is quantised; experts can be streamed only from unquantised checkpoints")
    base = _get_model_class(config, mapping)
    if config.sub_configs.get("text_config") is not None and base.config_class == config.sub_configs["text_config"]:
        config = config.get_text_config()
    stripped = _Stripped()

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        stripped.strip(self)

    def load_weights(model: Any, state: Any, files: Any, settings: Any, *args: Any, **kwargs: Any) -> Any:
        stripped.map_files(model, files, settings)
        return base._load_pretrained_model(model, state, files, settings, *args, **kwargs)

    body = {"__init__": initialise, "_load_pretrained_model": staticmethod(load_weights), "__module__": base.__module__}
    subclass: Any = type(base.__name__, (base,), body)
    model, report = subclass.from_pretrained(source, config=config, dtype="auto", output_loading_info=True)
    model.__class__ = base
    if report["missing_keys"]:
        raise ModelError(f"the checkpoint {source} has no tensor for {min(report['missing_keys'])}; download it again")
    return model, stripped


class _Stripped:
    """What was taken out of a model before loading, and where it is in the files."""

    def __init__(self) -> None:
        self._experts: dict[str, dict[str, Tensor]] = {}
        self._names: dict[str, Tensor] = {}
        self._banks: dict[str, FileBank] = {}

    def strip(self, model: Any) -> None:
        """Remove the experts' parameters of a model on the meta device."""
        self._names = dict(model.state_dict())
        for path, module in model.named_modules():
            if is_experts(module):
                self._experts[path] = {name: p.detach() for name, p in expert_parameters(module).items()}
                for name in self._experts[path]:
                    del module._parameters[name]
                module._is_hf_initialized = True
        if not self._experts:
            raise ModelError(f"{type(model).__name__} has no fused experts, so there is nothing to stream")

    def map_files(self, model: Any, files: Sequence[str] | None, settings: Any) -> None:
        """Find the experts in the files that transformers is about to load from."""
        if not files or not all(str(file).endswith(".safetensors") for file in files):
            raise ModelError(
                f"{model.name_or_path} has no safetensors weights; experts can be streamed only from those"
            )
        likes = {
            f"{path}.{name}": _meta(like, _dtype(f"{path}.{name}", like, settings.dtype_plan))
            for path, parameters in self._experts.items()
            for name, like in parameters.items()
        }
        opened = [TensorFile(Path(file)) for file in files]
        rules = settings.weight_mapping or []
        self._banks = map_experts(opened, likes, self._names, model.base_model_prefix, rules)

    def finish(self, model: Any, host_bytes: int) -> None:
        """Give the experts back as shapes without numbers, and say what the model is."""
        banks: dict[str, dict[str, FileBank]] = {}
        for path, parameters in self._experts.items():
            module = model.get_submodule(path)
            banks[path] = {name: self._banks[f"{path}.{name}"] for name in parameters}
            for name, bank in banks[path].items():
                module._parameters[name] = nn.Parameter(
                    torch.empty(bank.shape, dtype=bank.dtype, device="meta"), requires_grad=False
                )
        attach_expert_files(model, ExpertFiles(banks, model.config._experts_implementation, host_bytes))
        model.set_experts_implementation(STREAMED_IMPLEMENTATION)
        model.save_pretrained = _refuse_to_save


def _meta(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(like.shape, dtype=dtype, device="meta")


def _dtype(name: str, like: Tensor, plan: dict[str, torch.dtype] | None) -> torch.dtype:
    """The dtype that transformers would load a parameter in."""
    if plan:
        pattern, policy_of_group, _ = build_glob_alternation(list(plan))
        match = pattern.search(name)
        if match is not None and match.lastgroup is not None:
            return plan[policy_of_group[match.lastgroup]]
    return like.dtype


def _refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    raise ModelError(
        "the experts of this model are in the files that it was loaded from, so it cannot be saved; copy that folder, "
        "or load the model whole"
    )
