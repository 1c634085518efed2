"""What sets engines apart, as far as the cost of a token goes. Structure, not fitted numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineFamily = Literal["llama.cpp", "ik_llama.cpp", "ktransformers", "vllm", "custom", "transformers"]
Streaming = Literal["active experts", "whole layers", "all weights", "modules"]


@dataclass(frozen=True)
class EngineTraits:
    """How a family of engines offloads."""

    family: EngineFamily
    """Engines that share one efficiency."""
    reads_gguf: bool = False
    """Weights come in GGUF types; without a named type most users run Q4_K_M."""
    misses_on_cpu: bool = False
    """Experts that a cache does not hold are computed on the CPU instead of being copied."""
    reads_router_on_host: bool = False
    """A cache's table lies on the host: every layer waits for the router's choice to get there."""
    runs_both_at_once: bool = False
    """The card starts its experts of a layer while the CPU works on the others, which hides the launches."""
    caches: bool = False
    """Keeps experts on the card even where a row calls its strategy prefetch."""
    prefills_on_cpu: bool = False
    """Experts on the CPU run there in prefill too, instead of crossing the link once per micro-batch."""
    numa_ratio: float = 0.5
    """Share of two sockets' memory rate that CPU experts get. Published: ktransformers 12.95 tok/s on two sockets,
    9.5 on one, llama.cpp 4.51 on two (DeepSeek-R1)."""
    launch_ratio: float = 1.0
    """Launches per layer against those of fused kernels; eager PyTorch launches every operation of
    every expert out of Python, about a millisecond per layer."""
    streaming: Streaming = "active experts"
    """What crosses the link when nothing is cached: the active experts, all weights of layers that do not fit,
    all weights of all layers (ZeRO-3 keeps none), or every module that runs, one synchronous pageable copy each."""


_LLAMA = EngineTraits("llama.cpp", reads_gguf=True, misses_on_cpu=True, reads_router_on_host=True, numa_ratio=0.25)
_KTRANSFORMERS = EngineTraits(
    "ktransformers",
    reads_gguf=True,
    misses_on_cpu=True,
    runs_both_at_once=True,
    prefills_on_cpu=True,
    numa_ratio=0.7,
)
_BY_NAME: tuple[tuple[str, EngineTraits], ...] = (
    (
        "ik_llama",
        EngineTraits("ik_llama.cpp", reads_gguf=True, misses_on_cpu=True, reads_router_on_host=True, numa_ratio=0.3),
    ),
    ("llama.cpp", _LLAMA),
    ("llama-cpp", _LLAMA),
    ("koboldcpp", _LLAMA),
    ("ollama", _LLAMA),
    ("lm studio", _LLAMA),
    (
        "ktransformers",
        _KTRANSFORMERS,
    ),
    (
        "kt-kernel",
        _KTRANSFORMERS,
    ),
    ("vllm", EngineTraits("vllm", streaming="whole layers", numa_ratio=0.5)),
    ("sglang", EngineTraits("vllm", streaming="whole layers", numa_ratio=0.5)),
    ("tensorrt", EngineTraits("vllm", streaming="whole layers", numa_ratio=0.5)),
    ("atlas", EngineTraits("vllm", streaming="whole layers", numa_ratio=0.5)),
    ("accelerate", EngineTraits("transformers", launch_ratio=10.0, streaming="modules")),
    ("deepspeed", EngineTraits("transformers", launch_ratio=10.0, streaming="all weights")),
    ("moe-infinity", EngineTraits("transformers", launch_ratio=10.0, caches=True)),
    ("mixtral-offloading", EngineTraits("transformers", launch_ratio=10.0)),
    ("fiddler", EngineTraits("transformers", launch_ratio=10.0, misses_on_cpu=True)),
    ("transformers", EngineTraits("transformers", launch_ratio=10.0, streaming="modules")),
    ("yalis", EngineTraits("transformers")),
)
_CUSTOM = EngineTraits("custom")


def engine_traits(engine: str) -> EngineTraits:
    """Traits of an engine by its published name; one that nobody described is taken for an expert cache of its own."""
    name = engine.lower()
    return next((traits for key, traits in _BY_NAME if key in name), _CUSTOM)
