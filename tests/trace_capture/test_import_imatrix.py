"""llama.cpp's importance matrix: activations per expert from GGUF, written here by llama.cpp's own package."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from trace_capture.errors import StudioError, TraceError
from trace_capture.expert_counts import ExpertCounts
from trace_capture.importers import ImportOptions, detect_format, import_file

TABLE = np.arange(1, 25).reshape(3, 8)


def write(path: Path, tensor: str = "ffn_gate_exps", kind: str = "imatrix", first: int = 0) -> Path:
    writer = GGUFWriter(path, arch="llama")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["calibration.txt"])
    writer.add_uint32("imatrix.chunk_count", 5)
    for layer, counts in enumerate(TABLE, start=first):
        name = f"blk.{layer}.{tensor}.weight"
        writer.add_tensor(f"{name}.in_sum2", np.ones((8, 4), dtype=np.float32))
        writer.add_tensor(f"{name}.counts", counts.reshape(8, 1).astype(np.float32))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.counts", np.full((1, 1), 99, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def counts(path: Path, shape: Any) -> ExpertCounts:
    assert detect_format(path) == "imatrix"
    found = import_file(path, options=ImportOptions(shape))
    assert isinstance(found, ExpertCounts)
    return found


@pytest.mark.parametrize("tensor", ["ffn_gate_exps", "ffn_gate_up_exps", "ffn_down_exps"])
def test_counts_of_each_layer(make: Any, tmp_path: Path, tensor: str) -> None:
    found = counts(write(tmp_path / "imatrix.gguf", tensor), make.shape())
    assert (found.counts == TABLE).all() and found.source == "import:imatrix"
    assert "no order of tokens" in found.options["notes"][0]


def test_layers_are_decoder_layers(make: Any, tmp_path: Path) -> None:
    shape = make.shape(num_layers=4, moe_layer_ids=(1, 2, 3), expert_bytes=(9,) * 3, dense_bytes=(9,) * 3)
    assert (counts(write(tmp_path / "imatrix.gguf", first=1), shape).counts == TABLE).all()
    with pytest.raises(TraceError, match="counts experts in dense layers of tiny"):
        counts(write(tmp_path / "imatrix.gguf", first=0), shape)


def test_other_files_are_refused(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(TraceError, match="is GGUF of type 'model', wanted 'imatrix'"):
        counts(write(path, kind="model"), make.shape())
    with pytest.raises(TraceError, match="holds no activations per expert"):
        counts(write(path, tensor="ffn_gate"), make.shape())
    with pytest.raises(TraceError, match=r"counts 8 experts in layer 0; tiny has 3 layers x 16 experts"):
        counts(write(path), make.shape(num_experts=16))
    path.write_bytes(write(path).read_bytes()[:200])
    with pytest.raises(TraceError, match="cannot be read as GGUF"):
        counts(path, make.shape())


def test_the_older_format_says_how_to_get_counts(make: Any, tmp_path: Path) -> None:
    path, name = tmp_path / "imatrix.dat", b"blk.0.ffn_gate_exps.weight"
    path.write_bytes(struct.pack("<ii", 3, len(name)) + name + struct.pack("<ii", 5, 32) + bytes(128))
    with pytest.raises(TraceError, match="older .dat format, .*llama-imatrix --output-format gguf"):
        counts(path, make.shape())


def test_without_the_package_the_message_says_how_to_get_it(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "imatrix.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(StudioError, match=r"pip install 'moe-studio\[gguf\]'"):
        counts(path, make.shape())
