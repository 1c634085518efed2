"""Formats that weights are stored in, and the bits that one weight takes in each, scales included.

Block formats count their scales: a GGUF `q4_k` block is 144 bytes for 256 weights (ggml's block definitions), an
MXFP4 block one scale byte for 32, an NVFP4 block one for 16. Mixtures (`q4_k_m` and the like) are llama.cpp's recipes
for the three matrices of an expert: gate and up in one type, down half of the layers in a larger one.
"""

from __future__ import annotations

import difflib
import re

from trace_capture.errors import ModelError

_PLAIN = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "float8": 8.0, "int8": 8.0}
_BLOCKS = {
    "int4": (4 * 128 + 16 + 4) / 128,  # AWQ and GPTQ: a scale and a zero point per 128 weights
    "mxfp4": (4 * 32 + 8) / 32,
    "nvfp4": (4 * 16 + 8) / 16,
}
_GGUF_BLOCK_BYTES = {
    # bytes per 256 weights
    "q2_k": 84,
    "q3_k": 110,
    "q4_k": 144,
    "q5_k": 176,
    "q6_k": 210,
    "q4_0": 144,
    "q4_1": 160,
    "q5_0": 176,
    "q5_1": 192,
    "q8_0": 272,
    "iq1_s": 50,
    "iq1_m": 56,
    "iq2_xxs": 66,
    "iq2_xs": 74,
    "iq2_s": 82,
    "iq3_xxs": 98,
    "iq3_s": 110,
    "iq4_nl": 144,
    "iq4_xs": 136,
    # ik_llama.cpp
    "iq2_ks": 70,
    "iq2_k": 76,
    "iq3_k": 110,
    "iq4_ks": 136,
    "iq4_k": 144,
    "iq5_ks": 168,
    "iq5_k": 176,
    "iq6_k": 212,
}
_GGUF = {name: size * 8 / 256 for name, size in _GGUF_BLOCK_BYTES.items()}
_MIXTURES = {
    # gate and up, then down as (type, share of layers)
    "q3_k_s": ("q3_k", (("q3_k", 1.0),)),
    "q3_k_m": ("q3_k", (("q4_k", 1.0),)),
    "q3_k_l": ("q3_k", (("q5_k", 1.0),)),
    "q4_k_s": ("q4_k", (("q5_k", 0.125), ("q4_k", 0.875))),
    "q4_k_m": ("q4_k", (("q6_k", 0.5), ("q4_k", 0.5))),
    "q4_k_l": ("q4_k", (("q6_k", 0.5), ("q4_k", 0.5))),
    "q5_k_s": ("q5_k", (("q5_k", 1.0),)),
    "q5_k_m": ("q5_k", (("q6_k", 0.5), ("q5_k", 0.5))),
}


def _mixture_bits(gate_up: str, down: tuple[tuple[str, float], ...]) -> float:
    return (2 * _GGUF[gate_up] + sum(share * _GGUF[name] for name, share in down)) / 3


_GGUF |= {name: _mixture_bits(gate_up, down) for name, (gate_up, down) in _MIXTURES.items()}
WEIGHT_BITS: dict[str, float] = _PLAIN | _BLOCKS | _GGUF
"""Bits per weight by format, scales included."""
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
_ALIASES |= {"fp8": "float8", "float8_e4m3fn": "float8", "float8_e5m2": "float8", "awq": "int4", "gptq": "int4"}
_BITS_BY_NUMBER = re.compile(r"(\d+(?:\.\d+)?) ?(?:bpw|bits)")


def find_weight_bits(name: str) -> float | None:
    """Bits per weight of a format, or None where it is not known.

    Args:
        name: a key of `WEIGHT_BITS` in any case, a common other name (`bf16`, `fp8`), with or without ik_llama.cpp's
            `_r4` for repacked rows, or a number such as `4.05bpw` or `4.05 bits`.
    """
    key = name.lower().strip().removesuffix("_r4").removesuffix("_r8")
    number = _BITS_BY_NUMBER.fullmatch(key)
    if number is not None:
        return float(number[1])
    return WEIGHT_BITS.get(_ALIASES.get(key, key))


def weight_bits(name: str) -> float:
    """Bits per weight of a format.

    Raises:
        ModelError: not known; the message lists what is.
    """
    bits = find_weight_bits(name)
    if not bits:
        near = difflib.get_close_matches(name.lower(), WEIGHT_BITS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ModelError(f"unknown weight format '{name}'; {hint}known: {', '.join(WEIGHT_BITS)}, or bits as 4.05bpw")
    return bits


def is_whole_file_format(name: str) -> bool:
    """Whether files in this format store attention and shared experts in it as well, as GGUF files do."""
    key = name.lower().strip().removesuffix("_r4").removesuffix("_r8")
    return key in _GGUF or _ALIASES.get(key, key) in _PLAIN
