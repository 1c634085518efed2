"""Models whose experts stay in their safetensors files: equal to the whole model bit for bit, and refused clearly."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from runtime import OffloadConfig, offload, offloaded, unload
from runtime.capture import capture
from runtime.checkpoint import checkpoint_bytes, load_offloaded, load_streamed, stream_model
from runtime.expert_files import expert_files
from runtime.link import CopyJob, EmulatedLink
from runtime.models import Sampling, load_model, quiet_transformers
from runtime.slots import source_of
from runtime.tensor_files import TensorFile
from simulator.policies.config import parse_config
from trace_capture.errors import ModelError
from trace_capture.hooks import discover, model_shape

COUNTS = {
    "qwen3_moe": {"num_experts": 12},
    "mixtral": {"num_local_experts": 12},
    "gpt_oss": {"num_local_experts": 12},
    "deepseek_v2": {"n_routed_experts": 12},
    "olmoe": {"num_experts": 12},
    "deepseek_v3": {"n_routed_experts": 12},
}
IDS = torch.arange(2, 22).unsqueeze(0)
QUARTER = OffloadConfig.for_fraction(0.25)


def deepseek_v3() -> torch.nn.Module:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=12, num_experts_per_tok=2, n_group=2,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny bfloat16 model with twelve experts in several shards."""
    done: dict[tuple[str, bool], Path] = {}

    def save(architecture: str, hub_layout: bool = True) -> Path:
        if (architecture, hub_layout) not in done:
            built = deepseek_v3() if architecture == "deepseek_v3" else tiny(architecture, **COUNTS[architecture])
            folder = tmp_path_factory.mktemp(architecture)
            with quiet_transformers():
                built.to(torch.bfloat16).save_pretrained(
                    folder, max_shard_size="200KB", save_original_format=hub_layout
                )
            done[architecture, hub_layout] = folder
        return done[architecture, hub_layout]

    return save


def whole(folder: Path) -> torch.nn.Module:
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def answers(model: torch.nn.Module) -> tuple[torch.Tensor, list[int]]:
    with torch.no_grad():
        logits = model(input_ids=IDS, use_cache=False).logits
        tokens = model.generate(IDS[:, :6], max_new_tokens=12, do_sample=False, pad_token_id=0)
    return logits, tokens[0].tolist()


@pytest.mark.parametrize("hub_layout", [True, False], ids=["hub layout", "fused"])
@pytest.mark.parametrize("architecture", sorted(COUNTS))
def test_logits_tokens_and_shape_are_those_of_the_whole_model(saved, architecture: str, hub_layout: bool) -> None:
    folder = saved(architecture, hub_layout)
    assert len(list(folder.glob("*.safetensors"))) > 2
    plain = whole(folder)
    expected, tokens = answers(plain)
    expected_shape = model_shape(plain, discover(plain), "m")
    with offloaded(plain, QUARTER):
        offloaded_logits, offloaded_tokens = answers(plain)
    model = stream_model(str(folder))
    with offloaded(model, QUARTER, name="m") as engine:
        logits, streamed_tokens = answers(model)
        engine.verify_residency()
        assert engine.shape == expected_shape
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, offloaded_logits) and torch.equal(logits, expected)
    assert streamed_tokens == offloaded_tokens == tokens


@pytest.mark.parametrize("architecture", sorted(COUNTS))
def test_every_expert_is_the_slice_that_a_whole_load_gives(saved, architecture: str) -> None:
    folder = saved(architecture)
    parameters = dict(whole(folder).named_parameters())
    files = expert_files(stream_model(str(folder)))
    assert files is not None
    for path, banks in files.banks.items():
        for name, bank in banks.items():
            truth = parameters.pop(f"{path}.{name}")
            assert (bank.shape, bank.dtype, bank.num_bytes) == (truth.shape, truth.dtype, truth.numel() * 2)
            assert all(torch.equal(bank[expert], truth[expert]) for expert in range(12))
    assert not [name for name in parameters if ".experts." in name]


def test_pages_that_were_released_are_read_again(saved) -> None:
    file = TensorFile(second_shard(saved("mixtral")))
    key = next(key for key in file.keys() if ".experts." in key)
    view = file.read(key)
    before = view.clone()
    file.release()
    assert torch.equal(view, before) and torch.equal(file.read(key, 1), before[1])


def test_every_other_weight_is_loaded_and_no_expert_is(saved) -> None:
    folder = saved("qwen3_moe")
    model, plain = stream_model(str(folder)), whole(folder)
    assert type(model) is type(plain)
    truth = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == (".mlp.experts." in name)
        assert parameter.is_meta or torch.equal(parameter, truth[name])


@pytest.mark.parametrize("layers", [0.0, 0.5, 1.0])
def test_a_budget_of_host_memory_packs_whole_layers(saved, layers: float) -> None:
    folder = saved("mixtral")
    expected, tokens = answers(whole(folder))
    sizes = load_file_sizes(folder)
    model = stream_model(str(folder), host_bytes=round(layers * sizes))
    for _ in range(2):
        with offloaded(model, QUARTER) as engine:
            packed = [isinstance(bank["down_proj"], torch.Tensor) for bank in engine.store.banks]
            assert sum(packed) == layers * len(packed)
            logits, streamed = answers(model)
        assert torch.equal(logits, expected) and streamed == tokens


def load_file_sizes(folder: Path) -> int:
    return sum(
        tensor.numel() * 2
        for shard in folder.glob("*.safetensors")
        for name, tensor in load_file(shard).items()
        if ".experts." in name
    )


def test_prefetch_works_on_a_streamed_model(saved) -> None:
    folder = saved("qwen3_moe")
    config = parse_config({"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "quasi-hidden"}})
    expected, tokens = answers(whole(folder))
    model = stream_model(str(folder))
    with offloaded(model, config, default_vectors=torch.randn(4, 12, 64)):
        logits, streamed = answers(model)
    assert torch.equal(logits, expected) and streamed == tokens


def test_files_are_read_by_the_thread_of_the_link(saved) -> None:
    files = expert_files(stream_model(str(saved("qwen3_moe"))))
    assert files is not None
    bank = next(iter(files.banks.values()))["gate_up_proj"]
    readers: list[str] = []

    def read() -> torch.Tensor:
        readers.append(threading.current_thread().name)
        return bank[11]

    assert callable(source_of(bank, 11)) and not callable(source_of(bank.packed(False), 11))
    slot = torch.zeros(bank.shape[1:], dtype=bank.dtype)
    link = EmulatedLink(1e9, 0)
    link.submit([CopyJob((0, 11), 1, "demand", 0, [(slot, read)])])
    link.wait([(0, 11)])
    link.close()
    assert readers == ["moe-studio-link"] and torch.equal(slot, bank[11])


def test_load_offloaded_gives_the_texts_of_the_whole_model(model_folder: Path) -> None:
    sampling = Sampling(temperature=0.8, seed=3)
    plain = load_model(str(model_folder))
    expected = plain.generate(plain.encode("the night", 12), 12, sampling, 0)
    loaded, engine = load_offloaded(str(model_folder), OffloadConfig.for_fraction(0.5))
    assert loaded.generate(loaded.encode("the night", 12), 12, sampling, 0) == expected
    assert engine.core.decode_counters.demand_loads > 0
    unload(loaded.model)


def test_a_streamed_model_runs_only_while_it_is_offloaded(model_folder: Path, tmp_path: Path) -> None:
    loaded = load_streamed(str(model_folder))
    with pytest.raises(ModelError, match="call offload"):
        loaded.model(input_ids=IDS)
    with pytest.raises(ModelError, match="load it whole"):
        capture(loaded, ["the night"], tmp_path / "t.parquet", 4)
    with offloaded(loaded.model, OffloadConfig.for_fraction(0.5)), torch.no_grad():
        first = loaded.model(input_ids=IDS).logits
    with pytest.raises(ModelError, match="call offload"):
        loaded.model(input_ids=IDS)
    offload(loaded.model, OffloadConfig.for_fraction(0.25))
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids=IDS).logits, first)
    unload(loaded.model)


def test_saving_a_streamed_model_is_refused(saved, tmp_path: Path) -> None:
    model = stream_model(str(saved("mixtral")))
    with pytest.raises(ModelError, match="copy that folder"):
        model.save_pretrained(tmp_path / "out")
    with offloaded(model, QUARTER), pytest.raises(ModelError, match="copy that folder"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def copied(saved, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved("qwen3_moe"), tmp_path / "copy"))


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def test_a_missing_shard_is_named(copied: Path) -> None:
    shard = second_shard(copied)
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard} is missing; copy or download"):
        stream_model(str(copied))


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_shard_that_was_cut_short_is_named(copied: Path, size: int) -> None:
    shard = second_shard(copied)
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(ModelError, match=f"{shard} is .*; copy or download") as caught:
        stream_model(str(copied))
    assert "\n" not in str(caught.value)


def test_a_shard_of_noise_and_a_damaged_index_are_named(copied: Path) -> None:
    index = copied / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text[:50])
    with pytest.raises(ModelError, match=f"{index} is damaged"):
        stream_model(str(copied))
    index.write_text(text)
    shard = second_shard(copied)
    shard.write_bytes(b"\x40\0\0\0\0\0\0\0" + b"x" * 4096)
    with pytest.raises(ModelError, match=f"{shard} is"):
        stream_model(str(copied))


@pytest.mark.parametrize("victim", ["mlp.experts.11.up_proj", "mlp.gate", "self_attn.o_proj"])
def test_a_tensor_that_no_shard_holds_is_named(copied: Path, victim: str) -> None:
    for shard in copied.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            metadata = file.metadata()
        kept = {name: tensor for name, tensor in load_file(shard).items() if f"layers.1.{victim}" not in name}
        save_file(kept, shard, metadata)
    with pytest.raises(ModelError, match=r"layers\.1\..*download it again"):
        stream_model(str(copied))


def test_quantised_and_other_formats_are_refused(copied: Path) -> None:
    path = copied / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="quantised"):
        stream_model(str(copied))
    path.write_text(json.dumps(config))
    for file in [*copied.glob("*.safetensors"), copied / "model.safetensors.index.json"]:
        file.unlink()
    with pytest.raises(ModelError, match="only from safetensors"):
        stream_model(str(copied))


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no fused experts"):
        stream_model(str(tmp_path))


def test_bytes_of_a_checkpoint(saved) -> None:
    folder = saved("mixtral")
    assert checkpoint_bytes(str(folder)) == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
