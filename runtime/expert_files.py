"""Experts that stay in their safetensors files: served one at a time, converted as transformers would at loading.

Checkpoints hold experts fused (one tensor per layer) or one by one, under other names than the model's. What key
becomes which parameter, and by which operations, is asked of transformers' own loading machinery, which is then run
on the tensors of a single expert; so every number is the one that a whole load gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import core_model_loading as loading

from runtime.slots import ExpertBank
from runtime.tensor_files import TensorFile
from trace_capture.errors import ModelError

Place = tuple[TensorFile, str]
"""A tensor: its file and its key there."""


class FileBank:
    """One parameter of one layer's experts, in files; looks like the tensor [E, ...] where the engine looks.

    Args:
        name: full name of the parameter.
        like: its shape and dtype in the model, on the meta device.
        places: tensors it is made of, by the converter's source pattern, in order of experts.
        converter: how transformers makes the parameter of them; None when the file holds the parameter itself.

    Raises:
        ModelError: tensors are missing, or cannot be converted expert by expert.
    """

    def __init__(
        self, name: str, like: Tensor, places: Mapping[str, Sequence[Place]], converter: loading.WeightConverter | None
    ) -> None:
        self.shape = like.shape
        self.dtype = like.dtype
        self._name = name
        self._places = places
        self._converter = converter
        operations = converter.operations if converter is not None else []
        self._one_by_one = any(isinstance(operation, loading.MergeModulelist) for operation in operations)
        if not all(_within_one_expert(operation) for operation in operations):
            chain = ", ".join(type(operation).__name__ for operation in operations)
            raise ModelError(f"{name} is stored so that experts cannot be read singly ({chain}); load the model whole")
        wanted = self.shape[0] if self._one_by_one else 1
        patterns = converter.source_patterns if converter is not None else list(places)
        for pattern in patterns:
            if len(places.get(pattern, ())) != wanted:
                found = len(places.get(pattern, ()))
                raise ModelError(
                    f"{name} needs {wanted} tensors '{pattern}' and the checkpoint has {found}; it is incomplete: "
                    "download it again"
                )
        made = self._convert({pattern: self._parts(pattern, 0, True) for pattern in patterns})
        if made.shape != self.shape[1:]:
            raise ModelError(
                f"experts of {name} have shape {tuple(made.shape)} in the checkpoint and {tuple(self.shape[1:])} in "
                "the model; config.json and the weights do not belong together"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.shape.numel() * self.dtype.itemsize

    def __getitem__(self, expert: int) -> Tensor:
        """One expert's slice [...]: a view of the mapped file, or a fresh tensor where it had to be converted."""
        return self._convert({pattern: self._parts(pattern, expert, False) for pattern in self._places})

    def packed(self, pinned: bool) -> Tensor:
        """All experts in one contiguous tensor [E, ...] in host memory, copied one after the other."""
        tensor = torch.empty(self.shape, dtype=self.dtype, pin_memory=pinned)
        for expert in range(self.shape[0]):
            tensor[expert].copy_(self[expert])
        for file in {file for places in self._places.values() for file, _ in places}:
            file.release()
        return tensor

    def _parts(self, pattern: str, expert: int, only_meta: bool) -> list[Tensor]:
        places = self._places[pattern]
        file, key = places[expert] if self._one_by_one else places[0]
        row = None if self._one_by_one else expert
        if only_meta:
            part = file.meta(key) if row is None else file.meta(key)[row]
        else:
            part = file.read(key, row)
        part = part.to(self.dtype)
        return [part if self._one_by_one else part.unsqueeze(0)]

    def _convert(self, tensors: dict[str, list[Tensor]]) -> Tensor:
        made: dict[str, Any] = dict(tensors)
        if self._converter is not None:
            for operation in self._converter.operations:
                made = operation.convert(
                    made,
                    source_patterns=self._converter.source_patterns,
                    target_patterns=self._converter.target_patterns,
                    full_layer_name=self._name,
                    model=_OneExpert(self.shape),
                    config=None,
                    missing_keys=None,
                )
        result = next(iter(made.values()))
        tensor: Tensor = result[0] if isinstance(result, list) else result
        return tensor[0]


class _OneExpert:
    """Stands for the model where an operation asks for a parameter's shape: that of a bank with a single expert."""

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape

    def get_parameter(self, _: str) -> Tensor:
        return torch.empty(1, *self._shape[1:], device="meta")


def _within_one_expert(operation: loading.ConversionOps) -> bool:
    """Whether an operation on the first expert alone gives the first row of the operation on all."""
    if isinstance(operation, loading.MergeModulelist):
        return bool(operation.dim == 0)
    if type(operation).__name__ in ("Concatenate", "Interleave"):
        return bool(operation.dim != 0)
    if isinstance(operation, loading.Transpose):
        return 0 not in (operation.dim0, operation.dim1)
    return False


@dataclass(eq=False)
class ExpertFiles:
    """The experts of one streamed model.

    Attributes:
        banks: per module path of experts, per parameter name.
        implementation: experts implementation of the model if it were loaded whole.
        host_bytes: host memory in which layers, first ones first, are kept packed; the rest stays mapped.
    """

    banks: dict[str, dict[str, FileBank]]
    implementation: str | None
    host_bytes: int = 0
    _packed: dict[tuple[str, bool], dict[str, Tensor]] = field(default_factory=dict)

    def layer(self, path: str, pinned: bool) -> Mapping[str, ExpertBank]:
        """The banks of one layer: packed where the budget reaches, which reads it the first time, else mapped."""
        bank = self.banks[path]
        if path not in self._within_budget():
            return bank
        if (path, pinned) not in self._packed:
            self._packed[path, pinned] = {name: parameter.packed(pinned) for name, parameter in bank.items()}
        return self._packed[path, pinned]

    def _within_budget(self) -> set[str]:
        left, chosen = self.host_bytes, set()
        for path, bank in self.banks.items():
            size = sum(parameter.num_bytes for parameter in bank.values())
            if size <= left:
                left -= size
                chosen.add(path)
        return chosen


_FILES_OF_MODEL: WeakKeyDictionary[nn.Module, ExpertFiles] = WeakKeyDictionary()


def expert_files(model: nn.Module) -> ExpertFiles | None:
    """Where the experts of a model are that was loaded by `runtime.checkpoint`; None for any other model."""
    return _FILES_OF_MODEL.get(model)


def attach_expert_files(model: nn.Module, files: ExpertFiles) -> None:
    """Remember that a model's experts are in files."""
    _FILES_OF_MODEL[model] = files


def map_experts(
    tensor_files: Sequence[TensorFile], experts: Mapping[str, Tensor], names: Mapping[str, Any], prefix: str, rules: Any
) -> dict[str, FileBank]:
    """Find the tensors of every expert parameter.

    Args:
        tensor_files: the checkpoint.
        experts: expert parameters by full name, on the meta device, in their final dtype.
        names: all parameters of the model by full name, experts included.
        prefix: the model's `base_model_prefix`.
        rules: transformers' renamings and converters for this model.

    Raises:
        ModelError: see `FileBank`.
    """
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    places: dict[str, dict[str, list[Place]]] = {name: {} for name in experts}
    used: dict[str, loading.WeightConverter | None] = {}
    everything = [(key, file) for file in tensor_files for key in file.keys()]
    for key, file in sorted(everything, key=lambda item: loading.dot_natural_key(item[0])):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = loading.rename_source_key(key, [], [], prefix, names)
        if name in places:
            places[name].setdefault(pattern or key, []).append((file, key))
            used[name] = converter_of[pattern] if pattern is not None else None
    for name in experts:
        if not places[name]:
            raise ModelError(f"the checkpoint has no tensor for {name}; it is incomplete: download it again")
    return {name: FileBank(name, like, places[name], used[name]) for name, like in experts.items()}
