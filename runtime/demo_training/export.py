"""Write a trained network as a `transformers` model folder, and prove that the folder holds the same network."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from runtime.demo_training.network import Weights, logits
from runtime.demo_training.settings import NetworkShape
from runtime.demo_training.tokenizer import END_OF_TEXT, PADDING, as_pretrained
from trace_capture.errors import ModelError, StudioError
from trace_capture.files import make_folder

_LAYER_NAMES = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "in_norm": "input_layernorm.weight",
    "moe_norm": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
    "down": "mlp.experts.down_proj",
}
_MAX_LOGIT_DIFFERENCE = 1e-3


def as_config(shape: NetworkShape, tokenizer: Tokenizer | None = None) -> Qwen3MoeConfig:
    """The `transformers` configuration of a shape; special tokens come from the tokenizer."""
    return Qwen3MoeConfig(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.expert_size,
        intermediate_size=shape.expert_size * shape.top_k,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.norm_epsilon,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.001,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT) if tokenizer else None,
        pad_token_id=tokenizer.token_to_id(PADDING) if tokenizer else None,
    )


def as_model(weights: Weights, shape: NetworkShape, tokenizer: Tokenizer | None = None) -> Qwen3MoeForCausalLM:
    """The stock `transformers` model with these weights, in their precision; every key must fit."""
    model = Qwen3MoeForCausalLM(as_config(shape, tokenizer)).to(weights["embedding"].dtype)
    model.load_state_dict(_as_state(weights, shape), strict=True)
    return model.eval()


def _as_state(weights: Weights, shape: NetworkShape) -> dict[str, Tensor]:
    """State dictionary with the names of the `transformers` modules (fused experts)."""
    detached = {name: weight.detach() for name, weight in weights.items()}
    state = {
        "model.embed_tokens.weight": detached["embedding"],
        "lm_head.weight": detached["embedding"],
        "model.norm.weight": detached["final_norm"],
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, key in _LAYER_NAMES.items():
            state[prefix + key] = detached[name][layer]
        state[prefix + "mlp.experts.gate_up_proj"] = torch.cat([detached["gate"][layer], detached["up"][layer]], dim=1)
    return state


def load_weights(folder: Path) -> tuple[Weights, NetworkShape]:
    """The fp32 weights and shape of a model folder that this package has written.

    Raises:
        ModelError: the folder holds no such model.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"no model in {folder}: {str(error).splitlines()[0]}") from error
    if not isinstance(model, Qwen3MoeForCausalLM):
        raise ModelError(f"{folder} holds a {type(model).__name__}; only models that this package trained can be used")
    config = model.config
    shape = NetworkShape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        expert_size=config.moe_intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        vocabulary_size=config.vocab_size,
        rope_theta=config.rope_parameters["rope_theta"],
        norm_epsilon=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
    )
    return _from_state(model.state_dict(), shape), shape


def _from_state(state: dict[str, Tensor], shape: NetworkShape) -> Weights:
    """The inverse of `_as_state`."""
    layers = range(shape.num_layers)
    weights = {"embedding": state["model.embed_tokens.weight"], "final_norm": state["model.norm.weight"]}
    for name, key in _LAYER_NAMES.items():
        weights[name] = torch.stack([state[f"model.layers.{layer}.{key}"] for layer in layers])
    fused = torch.stack([state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] for layer in layers])
    weights["gate"], weights["up"] = (half.contiguous() for half in fused.chunk(2, dim=2))
    return weights


def save_model(
    folder: Path, weights: Weights, shape: NetworkShape, tokenizer: Tokenizer, generation: dict[str, Any]
) -> None:
    """Write config, generation defaults, bf16 weights and tokenizer; the files appear only when all are good.

    Raises:
        StudioError: the folder cannot be written, or the files do not give the network back.
    """
    make_folder(folder)
    rounded = {name: weight.detach().to(torch.bfloat16) for name, weight in weights.items()}
    model = as_model(rounded, shape, tokenizer)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT), pad_token_id=tokenizer.token_to_id(PADDING), **generation
    )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
        model.save_pretrained(partial)
        as_pretrained(tokenizer, max_positions=shape.max_positions).save_pretrained(partial)
        check_same_network(Path(partial), rounded, shape)
        for path in sorted(Path(partial).iterdir()):
            path.chmod(0o644)  # safetensors writes for the owner alone
            shutil.move(path, folder / path.name)


def check_same_network(folder: Path, weights: Weights, shape: NetworkShape) -> None:
    """Compare the logits of the saved folder with those of the training network, both in fp32.

    Raises:
        StudioError: they differ, for example because experts were not restored under their saved names.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    tokens = torch.arange(128).view(2, 64) * 31 % shape.vocabulary_size
    wide = {name: weight.float() for name, weight in weights.items()}
    with torch.no_grad():
        difference = float((model(tokens).logits - logits(wide, tokens, shape)).abs().max())
    if not difference < _MAX_LOGIT_DIFFERENCE:
        raise StudioError(f"the saved model differs from the trained one by {difference:.4g} in its logits; not kept")
