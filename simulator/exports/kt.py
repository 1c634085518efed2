"""kt-kernel with SGLang: hot experts of a count file on the GPU, all others on the CPU.

Flags: kt-kernel/README.md and the experts-sched tutorial; how `frequency` reads and chooses: `kt_ep_wrapper.py` of the
SGLang fork and `generate_gpu_experts_masks` of kt-kernel 0.7.2.
"""

from __future__ import annotations

import json

import numpy as np

from simulator.exports.commands import command_line, script
from simulator.exports.losses import lost_draft, lost_prefetch, lost_prefill
from simulator.exports.result import ExportedFile, Mapping
from simulator.exports.source import ExportSource
from simulator.policies.config import CacheConfig, CpuConfig, HotExperts, OffloadConfig
from trace_capture.errors import ConfigError
from trace_capture.statistics import Counts
from trace_capture.weight_formats import is_whole_file_format

COUNTS_FILE = "logical_count.json"
_TENSOR_FILE = "logical_count.pt"
_TO_TENSOR = (
    "import json, torch; counts = json.load(open('logical_count.json'))['logical_count']; "
    "torch.save({'logical_count': torch.tensor(counts)}, 'logical_count.pt')"
)
_METHODS = {
    "bfloat16": "BF16",
    "bf16": "BF16",
    "float8": "FP8",
    "fp8": "FP8",
    "mxfp4": "MXFP4",
    "int4": "RAWINT4",
    "gptq": "GPTQ_INT4",
}


def to_kt(source: ExportSource) -> Mapping:
    """As many GPU experts per layer as the budget holds; `frequency` then takes the hottest of all layers together.

    Raises:
        ConfigError: the budget holds less than one expert per MoE layer.
    """
    count = source.budget_bytes // sum(source.shape.expert_bytes)
    if not count:
        raise ConfigError(
            f"kt needs room for at least one expert per MoE layer ({sum(source.shape.expert_bytes):,} bytes), and the "
            f"configuration gives experts {source.budget_bytes:,}; raise cache.budget_bytes or take layers off the CPU"
        )
    counts = _ranking(source, source.counts)
    words = ["python", "-m", "sglang.launch_server", *_flags(source, count, counts is not None)]
    files = [ExportedFile("kt-server.sh", _script(words, counts is not None), has_about=True)]
    if counts is not None:
        rows = [counts.tolist()]
        files.append(ExportedFile(COUNTS_FILE, json.dumps({"logical_count": rows}, separators=(",", ":")) + "\n"))
    return Mapping(
        files=tuple(files),
        command=command_line(words),
        flags=tuple(words[3:]),
        lost=tuple(_losses(source)),
        notes=tuple(_notes(source, count, counts)),
        mapped=_mapped(source, count),
        not_predicted="" if counts is not None else "without a trace kt takes the first experts of each layer",
        family="cpu_experts",
    )


def _ranking(source: ExportSource, counts: Counts | None) -> Counts | None:
    """Counts by decoder layer, int64 [decoder layers, E]; zeros where the configuration wants a layer on the CPU."""
    if counts is None:
        return None
    rows = source.by_decoder_layer(counts)
    rows[list(source.decoder_layers(tuple(sorted(source.cpu_layers))))] = 0
    return rows


def chosen_experts(source: ExportSource, counts: Counts, per_layer: int) -> HotExperts:
    """What `frequency` puts on the GPU: the experts with the largest counts of all layers together, hottest first.

    Args:
        source: the model's layers.
        counts: by decoder layer and expert.
        per_layer: GPU experts; so many times the MoE layers are chosen.
    """
    rows = counts[list(source.shape.moe_layer_ids)]
    total = per_layer * rows.shape[0]
    ranked = np.argsort(-rows, axis=None, kind="stable")[:total]
    chosen: list[list[int]] = [[] for _ in range(rows.shape[0])]
    for place in ranked.tolist():
        layer, expert = divmod(place, rows.shape[1])
        if layer not in source.cpu_layers:
            chosen[layer].append(expert)
    return tuple(tuple(ids) for ids in chosen)


def _mapped(source: ExportSource, per_layer: int) -> OffloadConfig | None:
    """Hot experts stay, everything else runs on the CPU and is never loaded; None without a trace.

    For the prediction experts are counted on the part of the trace that it does not replay.
    """
    counts = _ranking(source, source.training_counts)
    if counts is None:
        return None
    hot = chosen_experts(source, counts, per_layer)
    size = sum(len(ids) * each for ids, each in zip(hot, source.shape.expert_bytes, strict=True))
    return OffloadConfig(
        label="hot experts on the device, others on the CPU",
        cache=CacheConfig(policy="static", scope="global", budget_bytes=size, hot_experts=hot),
        cpu=CpuConfig(
            policy="misses",
            layers=tuple(sorted(source.cpu_layers)),
            admissions=0,
            threads=source.config.cpu.used_threads,
        ),
        device=source.config.device,
    )


def _flags(source: ExportSource, count: int, has_counts: bool) -> list[str]:
    model = source.options.model_path or "MODEL"
    flags = ["--model-path", model]
    method = _method(source.shape.weight_dtype)
    if method is not None:
        flags += ["--kt-method", method]
    flags += ["--kt-weight-path", model, "--kt-num-gpu-experts", str(count)]
    if source.threads:
        flags += ["--kt-cpuinfer", str(source.threads)]
    flags += ["--kt-threadpool-count", "1", "--kt-max-deferred-experts-per-token", "0"]
    if has_counts:
        flags += ["--kt-expert-placement-strategy", "frequency", "--init-expert-location", _TENSOR_FILE]
    if source.config.prefill.micro_batch:
        flags += ["--chunked-prefill-size", str(source.config.prefill.micro_batch)]
    if source.options.context:
        flags += ["--context-length", str(source.options.context)]
    return flags


def _method(weight_dtype: str) -> str | None:
    """The kernels for a weight format; None where kt has none by that name."""
    name = weight_dtype.lower()
    if name in _METHODS:
        return _METHODS[name]
    return "LLAMAFILE" if is_whole_file_format(name) and name not in ("float32", "float16", "int8") else None


def _script(words: list[str], has_counts: bool) -> str:
    before = ['cd "$(dirname "$0")"'] if has_counts else []
    if has_counts:
        before.append(f"[ -f {_TENSOR_FILE} ] || {command_line(['python', '-c', _TO_TENSOR])}")
    return script(words, before=before)


def _losses(source: ExportSource) -> list[str]:
    lost = []
    if source.config.cache.policy != "static":
        lost.append(
            f"the expert cache ({source.config.cache.policy}) is lost: kt keeps one set of GPU experts while it "
            "decodes, and the CPU runs every other expert"
        )
    if not source.is_even:
        lost.append(
            "slots per layer are lost: kt takes the hottest experts of all layers together, not so many of each"
        )
    if source.config.cpu.policy == "none":
        lost.append("loading what is missing is lost: an expert that is not on the GPU runs on the CPU")
    elif source.config.cpu.admissions:
        lost.append("moving experts to the GPU after they ran on the CPU is lost")
    lost += lost_prefetch(source, "kt")
    lost += lost_prefill(source, "kt", "--kt-gpu-prefill-token-threshold of the fork streams layers for long prompts")
    return lost + lost_draft(source, "SGLang")


def _notes(source: ExportSource, count: int, counts: Counts | None) -> list[str]:
    notes = [
        f"{count} GPU experts per MoE layer, {count * source.shape.num_moe_layers} in all",
        "--kt-threadpool-count is 1: set it to the number of NUMA nodes, and --kt-weight-path to weights that "
        "kt-kernel has converted where the method asks for it",
    ]
    if _method(source.shape.weight_dtype) is None:
        notes.append(f"--kt-method is left out: kt has no method for {source.shape.weight_dtype}; convert and name one")
    if counts is None:
        return [*notes, "without a trace there is no count file, so the GPU set does not follow your prompts"]
    return [
        *notes,
        f"the fork's 'frequency' reads a .pt file and takes any other for no counts at all, so the script makes "
        f"{_TENSOR_FILE} out of {COUNTS_FILE} with torch where it starts; the JSON alone is what SGLang itself reads",
        "SGLang without the fork has no --kt-expert-placement-strategy: leave that flag out there",
        "counts have a row per decoder layer, zeros for layers without experts",
    ]
