"""The machine of a published row as a hardware profile, and what had to be assumed about it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import tomlkit
from pydantic import BaseModel

from simulator.validation.published_engines import EngineTraits
from simulator.validation.published_rows import PublishedRow
from trace_capture.hardware import DeviceProfile, HardwareProfile, HostProfile, Kind, LinkProfile, Quantity
from trace_capture.machine_parts import load_part
from trace_capture.samples import sample_folder

SUSTAINED_RATIO = 0.82
"""Share of a theoretical memory rate that a stream reaches, where no figure of the processor is known."""
CODEBOOK_RATIO = 0.35
"""Types with a codebook (IQ1, IQ2_XXS, IQ3_XXS and their kin) cost a core that much more per weight: DeepSeek-V3 on a
Ryzen 7800X3D runs at 4.43 tok/s in IQ3_XXS, at 6.53 in the larger Q3_K_XL (llama.cpp issue 13435)."""
RAM_SHARE = 0.8
"""Share of a streamed memory rate that kernels over quantised weights reach: two file types of one model on a Ryzen 9
9950X differ by 461 MB per token and 8.4 ms, 55 of 77 GB/s (sentinel-team.org), small experts included."""
CORE_BYTES_PER_S = 10e9
"""What one core reads in a stream. 32 cores of an EPYC 9355 get 184 to 280 GB/s out of weights of 2.4 to 6.6 bits
(ik_llama.cpp discussions 258, 357), well below what its memory gives to all."""
CORE_WEIGHTS_PER_S = 20e9
"""Weights that one core takes through dequantisation: 19 at 2.4 bits per weight in the same runs, where it binds."""
COPIES_PER_EXPERT = 3
"""Matrices of an expert cross one by one."""
_LIKE_HOST, _LIKE_CARD, _LIKE_LINK = "ddr5-6000-2ch", "a6000", "pcie4x16"
"""Parts whose derived numbers (dispatch, launch, latency) stand in for machines that have no part of their own."""
LINK_RATIO = 0.83
"""Share of the lanes' raw rate that pinned copies reach: 26.5 of 31.5 GB/s on 4.0 x16 (club-3090 issue 1124)."""
_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.56}
_PAGEABLE_BYTES_PER_S = 6e9


Part = TypeVar("Part", DeviceProfile, HostProfile, LinkProfile)


@dataclass(frozen=True)
class Machine:
    """A row's hardware."""

    profile: HardwareProfile
    device_memory_bytes: float
    """Of all cards together."""
    devices: int
    sockets: int
    assumed: tuple[str, ...] = field(default=())
    """What the row does not say: host, link."""


def find_machine(row: PublishedRow, traits: EngineTraits) -> Machine | None:
    """The machine of a row, or None where it names no card that is known and none is stated to be absent."""
    card = _find("gpu", row.gpu)
    if card is None and row.strategy != "cpu_only":
        return None
    host, sockets, host_known = _host(row, traits)
    link, link_known = _link(row, card or {})
    assumed = (*(() if host_known else ("host",)), *(() if link_known else ("link",)))
    count = max(1, row.gpu_count)
    device = _device(row, card or {"match": ["none"], "memory_gb": 0, "memory_gb_per_s": 1, "tflops": 1})
    memory = 2**30 * row.device_memory_gb if row.device_memory_gb else count * device.memory_bytes.value
    name = f"{device.name}, {host.name}, {link.name}"
    profile = HardwareProfile(name=name, link=link, device=device, host=host)
    return Machine(profile, memory, count, sockets, assumed)


@cache
def _tables() -> dict[str, Any]:
    path = sample_folder() / "validation" / "machines.toml"
    return tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()


def _find(kind: str, text: str) -> dict[str, Any] | None:
    """The entry with the longest name that occurs in the text; of several parts joined by + that of the first."""
    upper = re.sub(r"\s+", " ", (text.split(" + ")[0] if kind == "gpu" else text).upper())
    found = [(len(name), entry) for entry in _tables()[kind] for name in entry["match"] if _names(name, upper)]
    return max(found, key=lambda item: item[0])[1] if found else None


def _names(name: str, text: str) -> bool:
    """Whether a text names something, not as part of a longer number: P40 is not in P4000."""
    return re.search(rf"(?<![0-9]){re.escape(name)}" + (r"(?![0-9])" if name[-1].isdigit() else ""), text) is not None


def _device(row: PublishedRow, card: dict[str, Any]) -> DeviceProfile:
    if "part" in card:
        return _part("gpu", card["part"], DeviceProfile)
    numbers = {
        "memory_bytes": _sheet(card["memory_gb"] * 2**30),
        "memory_bytes_per_s": _sheet(card["memory_gb_per_s"] * 1e9),
        "flops_per_s": _sheet(card["tflops"] * 1e12),
    }
    return _part("gpu", _LIKE_CARD, DeviceProfile).model_copy(update={"name": row.gpu or "no card"} | numbers)


def _host(row: PublishedRow, traits: EngineTraits) -> tuple[HostProfile, int, bool]:
    """The host, its sockets, and whether the row says enough of it."""
    entry = _find("cpu", row.cpu)
    known = entry is not None or row.ram_gb_per_s is not None
    sheet = entry or _tables()["defaults"]["host"]
    sockets = 2 if re.match(r"\s*(2x|2 x|dual)", row.cpu.lower()) else 1
    if "two nodes" in row.text or "numa distribute" in row.text:
        sockets = 2
    theoretical, sustained = sockets * sheet["memory_gb_per_s"], sockets * sheet["sustained_gb_per_s"]
    cores = float(sockets * sheet["cores"])
    if row.ram_gb_per_s is not None:
        given = row.ram_gb_per_s
        if entry is None:
            cores, theoretical = (8.0 if given < 120 else 32.0), given
        if sockets == 2 and given < 0.6 * theoretical and row.ram_kind != "measured":
            sockets, cores, sustained = 1, cores / 2, sustained / 2
        is_bare_product = row.ram_kind == "stated" and entry is not None and given >= 0.95 * theoretical
        if row.ram_kind == "theoretical" or is_bare_product:
            sustained = min(sustained, SUSTAINED_RATIO * given) if entry is not None else SUSTAINED_RATIO * given
        else:
            sustained = given
    if sockets == 2 and "one numa" in row.text:
        sockets, cores, sustained = 1, cores / 2, sustained / 2
    share = traits.numa_ratio if sockets == 2 else 1.0
    like = _part("host", _LIKE_HOST, HostProfile)
    codebook = CODEBOOK_RATIO if _is_codebook(row) else 1.0
    numbers = {
        "cores": _guess(cores * share, "derived"),
        "ram_bytes_per_s": _guess(sustained * 1e9 * share, "derived"),
        "read_ratio": _guess(RAM_SHARE, "derived"),
        "core_bytes_per_s": _guess(CORE_BYTES_PER_S, "derived"),
        "core_weights_per_s": _guess(CORE_WEIGHTS_PER_S * codebook, "derived"),
    }
    host = like.model_copy(update={"name": row.cpu or "host not named"} | numbers)
    return host, sockets, known


def _link(row: PublishedRow, card: dict[str, Any]) -> tuple[LinkProfile, bool]:
    """The link at its measured rate, else at that of the lanes that the row names, else of the card's own."""
    found = re.search(r"(\d)\.0(?: ?x(\d+))?", row.pcie)
    generation = int(found.group(1)) if found else int(card.get("pcie", 4))
    lanes = int(found.group(2) or card.get("lanes", 16)) if found else int(card.get("lanes", 16))
    rate = row.h2d_gb_per_s or _LANE_GB_PER_S.get(generation, 1.969) * lanes * LINK_RATIO
    like = _part("link", _LIKE_LINK, LinkProfile)
    pageable = min(rate * 1e9, (like.pageable_bytes_per_s or like.h2d_bytes_per_s).value)
    numbers = {
        "h2d_bytes_per_s": _guess(rate * 1e9, "measured" if row.h2d_gb_per_s else "derived"),
        "pageable_bytes_per_s": _guess(pageable, "derived"),
    }
    link = like.model_copy(update={"name": row.pcie or f"{generation}.0x{lanes} assumed"} | numbers)
    return link, row.h2d_gb_per_s is not None or found is not None


def _is_codebook(row: PublishedRow) -> bool:
    return re.search(r"IQ[123]_(XXS|XS|S|M)", row.quantisation.upper()) is not None


@cache
def _loaded(kind: str, name: str) -> BaseModel:
    return load_part(kind, name)


def _part(kind: str, name: str, of: type[Part]) -> Part:
    part = _loaded(kind, name)
    assert isinstance(part, of)  # noqa: S101 - load_part returns the type of the kind
    return part


def _sheet(value: float) -> Quantity:
    return Quantity(value=value, kind="data sheet")


def _guess(value: float, kind: Kind = "guess") -> Quantity:
    return Quantity(value=value, kind=kind)
