"""Tiny random models of each architecture, and one saved with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from runtime.models import LoadedModel, load_model, quiet_transformers

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1}
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    ),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}),
    "deepseek_v2": (
        "DeepseekV2Config",
        GROUPED
        | {
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        GROUPED | {"first_k_dense_replace": 1, "head_dim": 16, "n_group": 2, "topk_group": 1},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
}


def build(architecture: str, **changes: object) -> torch.nn.Module:
    """A tiny random model, float32, the same for the same arguments."""
    name, own = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    with quiet_transformers():
        config = getattr(transformers, name)(**(COMMON | own | changes))
        model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def tiny() -> Callable[..., torch.nn.Module]:
    """The builder of tiny random models."""
    return build


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The CPU with its emulated device, and CUDA where there is one."""
    return str(request.param)


@pytest.fixture(params=sorted(ARCHITECTURES))
def any_model(request: pytest.FixtureRequest, device: str) -> torch.nn.Module:
    """A tiny random model of every architecture in turn, on every device in turn."""
    return build(request.param).to(device)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Qwen3-MoE with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["the night was dark and the road was long"],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=vocabulary, show_progress=False
        ),
    )
    model = build("qwen3_moe", vocab_size=300, eos_token_id=0, max_position_embeddings=128)
    with quiet_transformers():
        model.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded(model_folder: Path) -> LoadedModel:
    """That model, loaded as every command loads one."""
    return load_model(str(model_folder))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Leave a core to the link's thread; for fixtures of a module too, since sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
