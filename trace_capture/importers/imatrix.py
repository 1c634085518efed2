"""How often each expert was used, from llama.cpp's importance matrix (`llama-imatrix`, GGUF).

Every tensor of experts has `<name>.counts`, float32 [E], the activations per expert; `blk.N.ffn_gate_exps.weight` is
taken, or what the layer has instead. The older `.dat` files hold sums divided by these counts, and not the counts.
Reading GGUF needs the package `gguf`, llama.cpp's own reader.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from trace_capture.errors import StudioError, TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.importers.count_tables import counted
from trace_capture.importers.formats import FileHead, ImportOptions

_COUNTS = re.compile(r"blk\.(\d+)\.(ffn_(?:gate|up|gate_up|down)_exps)\.weight\.counts")
_ORDER = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")


def is_imatrix(head: FileHead) -> bool:
    """Whether a file is GGUF, or an importance matrix of the older format."""
    return head.start.startswith(b"GGUF") or _is_legacy(head)


def _is_legacy(head: FileHead) -> bool:
    """The older format begins with the number of entries, then the length and the name of a tensor."""
    if len(head.start) < 16:
        return False
    entries, length = struct.unpack("<ii", head.start[:8])
    return 0 < entries < 100_000 and 4 < length < 256 and head.start[8 : 8 + length].startswith((b"blk.", b"output"))


def read_imatrix(path: Path, options: ImportOptions) -> ExpertCounts:
    """Read the activations per expert.

    Raises:
        TraceError: of the older format, which lost them; not an importance matrix; cut; without experts; or not of
            this model.
        StudioError: the package `gguf` is not installed.
    """
    if _is_legacy(FileHead.of(path)):
        raise TraceError(
            f"{path} is an importance matrix in the older .dat format, which does not hold activations per expert; "
            "make it again with 'llama-imatrix --output-format gguf'"
        )
    shape = options.require_shape(path)
    by_layer: dict[int, dict[str, Any]] = {}
    for name, values in _tensors(path).items():
        match = _COUNTS.fullmatch(name)
        if match:
            by_layer.setdefault(int(match[1]), {})[match[2]] = values
    if not by_layer:
        raise TraceError(f"{path} holds no activations per expert; it is not an importance matrix of a model with them")
    table = np.zeros((shape.num_layers, shape.num_experts))
    for layer, found in by_layer.items():
        values = next(found[name] for name in _ORDER if name in found)
        if layer >= shape.num_layers or len(values) != shape.num_experts:
            raise TraceError(
                f"{path} counts {len(values)} experts in layer {layer}; {shape.name} has {shape.num_layers} layers x "
                f"{shape.num_experts} experts; give the model it was made with by --model"
            )
        table[layer] = values
    return counted(table, shape, "imatrix", path)


def _tensors(path: Path) -> dict[str, Any]:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise StudioError(f"reading {path} needs llama.cpp's package 'gguf': pip install 'moe-studio[gguf]'") from error
    try:
        reader = GGUFReader(path)
        kind = reader.fields["general.type"].contents() if "general.type" in reader.fields else None
        tensors = {tensor.name: np.array(tensor.data).reshape(-1) for tensor in reader.tensors}
    except (ValueError, KeyError, IndexError, OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read as GGUF ({error}); it was cut, or is not GGUF") from error
    if kind != "imatrix":
        raise TraceError(f"{path} is GGUF of type '{kind}', wanted 'imatrix', as llama-imatrix writes it")
    return tensors
