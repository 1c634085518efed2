"""FreeToken's measured bandwidths: `~/.cache/freetoken/benchbw/<gpu-uuid>.json`, version 6, of `ft bench bw`.

`ceilings` has what cores read in a stream and large copies; `layer_kinds` has, per kind of MoE layer (format, sizes,
top-k, threads), the rates of experts on the CPU and of gathering experts over PCIe, each alone and both together.
All in GB/s, 10^9 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_capture.errors import ProfileError
from trace_capture.importers.calibration import Calibration

VERSION = 6


def is_freetoken_bandwidth(text: str) -> bool:
    """Whether a text is such a file, of whatever version."""
    return '"layer_kinds"' in text or '"pcie_linear_h2d_gbs"' in text


def read_freetoken_bandwidth(text: str, path: Path, layer_kind: str | None = None) -> Calibration:
    """The rates of one kind of layer.

    Args:
        text: content of the file.
        path: the file, for messages and provenance.
        layer_kind: key of the kind; may be left out where there is one.

    Raises:
        ProfileError: of another version, several kinds and none named, or a rate is no positive number.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ProfileError(f"{path} is not JSON ({error}); run 'ft bench bw' again") from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != VERSION:
        raise ProfileError(f"{path} has version {version}, this program reads {VERSION}; run 'ft bench bw' again")
    ceilings, kinds = raw.get("ceilings"), raw.get("layer_kinds")
    if not isinstance(ceilings, dict) or not isinstance(kinds, dict):
        raise ProfileError(f"{path} lacks 'ceilings' or 'layer_kinds'; run 'ft bench bw' again")
    key, row = _row(kinds, layer_kind, path)
    alone = _rate(row, "cpu_moe_gbs", path)
    cpu_pair, copy_pair = _rate(row, "cpu_moe_overlap_gbs", path), _rate(row, "pcie_gather_overlap_gbs", path)
    gather = _rate(row, "pcie_gather_gbs", path)
    notes = [f"experts on the CPU were measured for {key}; other formats and sizes differ"] if row else []
    if gather is not None:
        notes.append(
            f"FreeToken gathers scattered experts at {gather / 1e9:.1f} GB/s, which the link's rate does not show"
        )
    if row and (cpu_pair is None or copy_pair is None):
        notes.append("cores and copies were not measured together: host.contended_ratio is the part's")
    if row.get("note"):
        notes.append(f"FreeToken notes: {row['note']}")
    gpu, cpu = raw.get("gpu") or {}, raw.get("cpu") or {}
    return Calibration(
        source=f"FreeToken 'ft bench bw' ({path.name}, {raw.get('timestamp', 'no date')})",
        gpu=gpu.get("name"),
        h2d=_rate(ceilings, "pcie_linear_h2d_gbs", path),
        ram_read=_rate(ceilings, "cpu_stream_read_gbs", path),
        cpu_experts=alone,
        cpu_beside_copies=cpu_pair,
        copies_beside_cpu=copy_pair,
        cores=cpu.get("physical_cores"),
        threads=row.get("cpu_threads"),
        notes=tuple(notes),
    )


def _row(kinds: Mapping[str, Any], wanted: str | None, path: Path) -> tuple[str, Mapping[str, Any]]:
    if wanted is not None and wanted not in kinds:
        raise ProfileError(f"{path} has no layer kind '{wanted}'; choose one of: {', '.join(kinds) or 'none'}")
    if wanted is None and len(kinds) > 1:
        raise ProfileError(f"{path} has several layer kinds; give --layer-kind, one of: {', '.join(kinds)}")
    if not kinds:
        return "", {}
    key = wanted or next(iter(kinds))
    row = kinds[key]
    if not isinstance(row, Mapping):
        raise ProfileError(f"{path}: layer kind '{key}' is no table; run 'ft bench bw' again")
    return key, row


def _rate(table: Mapping[str, Any], name: str, path: Path) -> float | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ProfileError(f"{path}: {name} is {value!r}, wanted a positive number of GB/s; run 'ft bench bw' again")
    return float(value) * 1e9
