"""What `llama-bench` results of one model tell of a machine: the rate at which its cores work through experts.

Results are JSON, JSON lines, CSV, SQL or the markdown table, all with the same fields: `n_gpu_layers` (`ngl`),
`n_cpu_moe`, `n_prompt` and `n_gen` (or `test`, such as tg128), `avg_ts` (`t/s`), `backends` (`backend`). Two results of
generation that differ in `n_cpu_moe` alone tell the rate by what the layers between them cost; else one without a GPU
does, by all bytes that a token reads. Nothing in them tells the link's rate or what cores and copies do to each other.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from trace_capture.errors import ProfileError
from trace_capture.importers.calibration import Calibration
from trace_capture.model_shape import ModelShape

_TEST = re.compile(r"(pp|tg)(\d+)(?: ?@ ?d(\d+))?")
_TABLE = re.compile(r"\| *test *\| *t/s *\|")
_ONLY_CPU = ("CPU", "BLAS", "BLAS,CPU", "CPU,BLAS")
_INSERT = re.compile(r"INSERT INTO \w+ \((.*?)\) VALUES \((.*)\);")
_SHORT = {"ngl": "n_gpu_layers", "ncmoe": "n_cpu_moe", "t/s": "avg_ts", "backend": "backends", "threads": "n_threads"}
_NOT_SETTINGS = ("avg_ts", "avg_ns", "stddev_ts", "stddev_ns", "samples_ts", "samples_ns", "test_time", "n_cpu_moe")


class _Result(NamedTuple):
    """One test of generation."""

    token_s: float
    gpu_layers: int
    cpu_moe: int
    is_cpu_only: bool
    threads: int | None
    gpu: str | None
    settings: tuple[tuple[str, str], ...]


def is_llama_bench(text: str) -> bool:
    """Whether a text is such results."""
    return '"avg_ts"' in text or "avg_ts," in text or bool(_TABLE.search(text))


def _other_threads(alone: list[_Result], chosen: _Result) -> list[str]:
    """That there are results with other numbers of threads."""
    others = sorted({result.threads for result in alone if result.threads not in (None, chosen.threads)})
    if not others or chosen.threads is None:
        return []
    return [
        f"the file also has slower results with {', '.join(map(str, others))} threads: the rate is that with "
        f"{chosen.threads}, and of other numbers is derived from it"
    ]


def read_llama_bench(
    text: str, path: Path, shape: ModelShape, device_bytes_per_s: float, layer_ns: float
) -> Calibration:
    """The rate of experts on the CPU.

    Args:
        text: content of the file.
        path: the file, for messages and provenance.
        shape: the model in the format that was run; bytes come from it.
        device_bytes_per_s: at which the device reads weights; of little weight, as cores are much slower.
        layer_ns: hand-over from the device to the cores and back, per layer, which is not the experts' own time.

    Raises:
        ProfileError: no results of generation, or none that tell it.
    """
    results = [result for row in _rows(text, path) for result in _generation(row, path)]
    if not results:
        raise ProfileError(f"{path} has no result of generation (n_gen, or test tg128); run llama-bench with -n 128")
    alone = [result for result in results if result.is_cpu_only]
    pairs = _pairs(results, shape)
    if pairs:
        fewer, slow, layers = max(pairs, key=lambda pair: pair[2])
        moved = shape.top_k * sum(shape.expert_bytes) / shape.num_moe_layers * layers
        cpu_s = slow.token_s - fewer.token_s + moved / device_bytes_per_s - layers * layer_ns / 1e9
        what = f"n_cpu_moe {fewer.cpu_moe} and {slow.cpu_moe}, {layers} MoE layers apart"
    elif alone:
        slow = min(alone, key=lambda result: result.token_s)
        moved = shape.top_k * sum(shape.expert_bytes) + sum(shape.dense_bytes) + shape.head_bytes
        cpu_s, what = slow.token_s, "all weights that a token reads, on the CPU alone"
    else:
        raise ProfileError(
            f"{path} tells nothing of experts on the CPU: run llama-bench with two values of --n-cpu-moe (-ngl 99 "
            "-ncmoe 0,16 or, where the model does not fit, two others), or without a GPU (-ngl 0 -dev none)"
        )
    if cpu_s <= 0:
        raise ProfileError(f"{path}: {what}: more experts on the CPU cost no time; run it again with -r 10")
    return Calibration(
        source=f"llama-bench ({path.name}): {what}",
        gpu=next((result.gpu for result in results if result.gpu and not result.is_cpu_only), None),
        cpu_experts=moved / cpu_s,
        threads=slow.threads,
        notes=(
            f"bytes are those of {shape.name}; another model or format in the file makes the rate wrong in proportion",
            "llama-bench tells nothing of the link, nor of cores and copies together: those numbers are the parts'",
            *([] if pairs else _other_threads(alone, slow)),
        ),
    )


def _pairs(results: list[_Result], shape: ModelShape) -> list[tuple[_Result, _Result, int]]:
    """Results that differ in how many layers have their experts on the CPU, and by how many MoE layers."""
    found = []
    for one, other in combinations(results, 2):
        fewer, more = sorted((one, other), key=lambda result: result.cpu_moe)
        between = [layer for layer in shape.moe_layer_ids if fewer.cpu_moe <= layer < more.cpu_moe]
        whole = fewer.gpu_layers >= shape.num_layers and not fewer.is_cpu_only
        if fewer.settings == more.settings and between and whole:
            found.append((fewer, more, len(between)))
    return found


def _generation(row: Mapping[str, Any], path: Path) -> Iterator[_Result]:
    """A result, if it is one of generation without a prompt."""
    fields = {_SHORT.get(name.strip(), name.strip()): value for name, value in row.items() if name}
    test = _TEST.fullmatch(str(fields.get("test", "")).strip())
    try:
        is_generation = test[1] == "tg" if test else int(fields["n_gen"]) > 0 and not int(fields["n_prompt"])
        if not is_generation:
            return
        rate = float(str(fields["avg_ts"]).split("±")[0])
        settings = {name: str(value) for name, value in fields.items() if name not in _NOT_SETTINGS}
        threads = str(fields.get("n_threads") or "")
        yield _Result(
            token_s=1 / rate,
            gpu_layers=int(fields.get("n_gpu_layers") or 99),
            cpu_moe=int(fields.get("n_cpu_moe") or 0),
            is_cpu_only=str(fields.get("backends", "")).strip() in _ONLY_CPU or str(fields.get("n_gpu_layers")) == "0",
            threads=int(threads) if threads else None,
            gpu=str(fields["gpu_info"]).strip() or None if "gpu_info" in fields else None,
            settings=tuple(sorted(settings.items())),
        )
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise ProfileError(
            f"{path}: a result lacks a field or a number ({error}); save llama-bench's output again"
        ) from error


def _rows(text: str, path: Path) -> Iterator[Mapping[str, Any]]:
    """The results, whichever form they are in."""
    start = text.lstrip()[:1]
    try:
        if start == "[":
            yield from json.loads(text)
        elif start == "{":
            yield from (json.loads(line) for line in text.splitlines() if line.strip())
        elif "INSERT INTO" in text:
            for names, values in _INSERT.findall(text):
                row = next(csv.reader([values], quotechar="'", skipinitialspace=True))
                yield dict(zip(names.split(", "), row, strict=True))
        elif "|" in text and "avg_ts" not in text:
            yield from _markdown(text)
        else:
            yield from csv.DictReader(text.splitlines())
    except (ValueError, AttributeError) as error:
        raise ProfileError(f"{path} is cut or edited ({error}); save llama-bench's output again") from error


def _markdown(text: str) -> Iterator[Mapping[str, Any]]:
    header: list[str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.strip().startswith("|") or all(set(cell) <= set("-: ") for cell in cells):
            continue
        if "test" in cells and "t/s" in cells:
            header = cells
        elif header is not None and len(cells) == len(header):
            yield dict(zip(header, cells, strict=True))
