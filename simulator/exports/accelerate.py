"""accelerate and transformers: a `device_map` that keeps some layers' experts in host memory."""

from __future__ import annotations

import json

from simulator.exports.losses import lost_cache, lost_draft, lost_prefetch, lost_prefill
from simulator.exports.result import ExportedFile, Mapping
from simulator.exports.source import ExportSource
from simulator.exports.whole_layers import split_layers, split_notes
from trace_capture.errors import ConfigError

MAP_FILE = "device_map.json"
_PLAIN = ("self_attn", "mlp.gate", "input_layernorm", "post_attention_layernorm")
_SHARED = (*_PLAIN, "mlp.shared_experts")
BESIDE_EXPERTS: dict[str, tuple[str, ...]] = {
    "mixtral": _PLAIN,
    "qwen2_moe": (*_PLAIN, "mlp.shared_expert", "mlp.shared_expert_gate"),
    "qwen3_moe": _PLAIN,
    "olmoe": _PLAIN,
    "gpt_oss": ("self_attn", "mlp.router", "input_layernorm", "post_attention_layernorm"),
    "deepseek_v2": _SHARED,
    "deepseek_v3": _SHARED,
    "glm4_moe": _SHARED,
    "glm4_moe_lite": _SHARED,
}
"""Modules of a decoder layer beside `mlp.experts`, by model type, as in transformers 5."""


def _plain(architecture: str) -> str:
    """The name without `_` and `-`, which GGUF files leave out of some architectures."""
    return architecture.lower().replace("_", "").replace("-", "")


_BY_PLAIN_NAME = {_plain(name): modules for name, modules in BESIDE_EXPERTS.items()}


def to_accelerate(source: ExportSource) -> Mapping:
    """Each module on GPU 0, and the experts modules of the layers that do not fit on the CPU.

    Raises:
        ConfigError: the names of the architecture's modules are not known here.
    """
    beside = _BY_PLAIN_NAME.get(_plain(source.shape.architecture))
    if beside is None:
        raise ConfigError(
            f"a device_map needs the names of all modules, and those of architecture '{source.shape.architecture}' are "
            f"not known here (known: {', '.join(BESIDE_EXPERTS)}); choose another target"
        )
    split = split_layers(source)
    away = set(source.decoder_layers(split.elsewhere))
    device_map: dict[str, int | str] = {"model.embed_tokens": 0, "model.rotary_emb": 0}
    for layer in range(source.shape.num_layers):
        if layer not in away:
            device_map[f"model.layers.{layer}"] = 0
            continue
        device_map |= {f"model.layers.{layer}.{name}": 0 for name in beside}
        device_map[f"model.layers.{layer}.mlp.experts"] = "cpu"
    device_map |= {"model.norm": 0, "lm_head": 0}
    size = sum(source.shape.num_experts * source.shape.expert_bytes[layer] for layer in split.elsewhere)
    model = source.options.model_path or "MODEL"
    return Mapping(
        files=(ExportedFile(MAP_FILE, json.dumps(device_map, indent=1) + "\n"),),
        command=f"AutoModelForCausalLM.from_pretrained({model!r}, device_map=json.load(open({MAP_FILE!r})))",
        lost=tuple(_losses(source)),
        notes=tuple(
            [
                *split_notes(source, split),
                f"every pass copies all experts of the layers on the CPU: {size / 2**30:.2f} GiB per token in decode",
            ]
        ),
        not_predicted="accelerate moves whole modules before each of them runs, which the simulator does not have",
    )


def _losses(source: ExportSource) -> list[str]:
    lost = lost_cache(source, "accelerate", "it copies a module whenever it runs and drops it after")
    if source.config.cpu.is_used:
        lost.append("running experts on the CPU is lost: what is called 'cpu' here is moved to the GPU to run")
    lost += lost_prefetch(source, "accelerate")
    lost += lost_prefill(source, "accelerate", "prompts and tokens are treated alike")
    return lost + lost_draft(source, "accelerate")
