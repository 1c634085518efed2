"""Reading a Hugging Face `config.json`: field names of the MoE families, and the bytes that matrices take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trace_capture.errors import ModelError

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ConfigFields:
    """Reads a configuration's fields, whatever name a family gives them."""

    config: Mapping[str, Any]
    where: str

    @staticmethod
    def of_language_model(config: Mapping[str, Any], where: str) -> ConfigFields:
        """The fields of the language model: those under `text_config` where the file describes more than one."""
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            return ConfigFields(config, where)
        outer = {
            key: config[key] for key in ("model_type", "quantization_config", "torch_dtype", "dtype") if key in config
        }
        return ConfigFields(outer | dict(text), where)

    @property
    def model_type(self) -> str:
        """The family, `model_type`."""
        return str(self.config.get("model_type", "none"))

    @property
    def hidden(self) -> int:
        """H, the hidden size."""
        return self.integer("hidden_size")

    @property
    def num_experts(self) -> int:
        """E, routed experts per MoE layer."""
        return self.first("num_experts", "num_local_experts", "n_routed_experts")

    @property
    def moe_intermediate(self) -> int:
        """Inner size of one routed expert."""
        return self.first("moe_intermediate_size", "intermediate_size")

    @property
    def dense_intermediate(self) -> int:
        """Inner size of the MLP of a layer without experts; Llama-4 names it apart from the experts'."""
        return self.integer("intermediate_size_mlp", self.integer("intermediate_size", 0))

    @property
    def has_latent_attention(self) -> bool:
        """Whether keys and values are compressed to a latent (multi-head latent attention)."""
        return self.config.get("kv_lora_rank") is not None

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads; all heads where the field is absent."""
        return self.integer("num_key_value_heads", self.integer("num_attention_heads"))

    @property
    def head_dim(self) -> int:
        """d, size of one attention head."""
        heads = self.integer("num_attention_heads")
        if heads == 0:
            raise ModelError(f"{self.where}: field 'num_attention_heads' is 0; mend it")
        return self.integer("head_dim", self.hidden // heads)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number that is not negative; absent and null give the default.

        Raises:
            ModelError: absent without a default, or something else than a whole number.
        """
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(f"{self.where}: field '{name}' is missing; give the complete config.json of the model")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelError(f"{self.where}: field '{name}' is {value!r}, wanted a whole number; mend it")
        return value

    def first(self, *names: str) -> int:
        """The first of several fields that is there.

        Raises:
            ModelError: none of them is.
        """
        present = [name for name in names if self.config.get(name) is not None]
        if not present:
            raise ModelError(
                f"{self.where}: none of {', '.join(names)} is there; give the model's complete config.json"
            )
        return self.integer(present[0])

    def flag(self, name: str, default: bool = False) -> bool:
        """A truth value; absent and null give the default."""
        value = self.config.get(name)
        return default if value is None else bool(value)


@dataclass(frozen=True)
class Storage:
    """How many bytes matrices take: plain, in 8-bit floats with block scales, or in MXFP4."""

    value_bytes: int
    expert_dtype: str
    quantisation: str = ""
    dense_dtype: str = "bfloat16"
    block: tuple[int, int] = (128, 128)

    @staticmethod
    def of(fields: ConfigFields) -> Storage:
        """From `torch_dtype` and `quantization_config`.

        Raises:
            ModelError: a dtype or quantisation whose bytes are not known.
        """
        dtype = str(fields.config.get("torch_dtype") or fields.config.get("dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in _DTYPE_BYTES:
            raise ModelError(f"{fields.where}: torch_dtype '{dtype}'; known are {', '.join(_DTYPE_BYTES)}")
        quantisation = fields.config.get("quantization_config") or {}
        method = str(quantisation.get("quant_method", "")) if isinstance(quantisation, dict) else "unknown"
        if method == "":
            return Storage(_DTYPE_BYTES[dtype], dtype, dense_dtype=dtype)
        if method == "mxfp4":
            return Storage(_DTYPE_BYTES[dtype], "mxfp4", method, dtype)
        if method == "fp8" and quantisation.get("weight_block_size"):
            block = _block_size(fields, quantisation["weight_block_size"])
            return Storage(_DTYPE_BYTES[dtype], "float8", method, "float8", block)
        raise ModelError(
            f"{fields.where}: quantization_config.quant_method '{method}' has no byte arithmetic here (known: mxfp4, "
            "fp8 with weight_block_size); take the field out for 16-bit sizes"
        )

    def plain(self, values: int) -> int:
        """Norms, biases, router, embedding and head, which quantisation leaves alone."""
        return values * self.value_bytes

    def linear(self, out_size: int, in_size: int) -> int:
        """A matrix of attention or of a dense or shared MLP."""
        if self.quantisation == "fp8":
            blocks = -(-out_size // self.block[0]) * -(-in_size // self.block[1])
            return out_size * in_size + 4 * blocks
        return self.plain(out_size * in_size)

    def expert(self, out_size: int, in_size: int) -> int:
        """A matrix of a routed expert."""
        if self.quantisation == "mxfp4":
            return out_size * in_size // 2 + out_size * -(-in_size // 32)
        return self.linear(out_size, in_size)


def _block_size(fields: ConfigFields, block: Any) -> tuple[int, int]:
    """The checked `weight_block_size` of an 8-bit float quantisation."""
    if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
        return block[0], block[1]
    raise ModelError(f"{fields.where}: weight_block_size is {block!r}, wanted two positive whole numbers; mend it")
