"""Memory of loading a checkpoint: `python tests/benchmarks/checkpoint_memory.py [GIGABYTES] [FOLDER]`.

Writes a synthetic bfloat16 Qwen3-MoE checkpoint (2 GB unless told otherwise) in shards into a temporary folder (inside
FOLDER, if given), then loads it in fresh processes, whole and streamed, each continuing a prompt by 8 tokens with a
quarter of the experts in slots, and prints peak and final resident memory, anonymous (must be in RAM) and of files (a
mapping that the system can take back at any time).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INTER, EXPERTS, VOCABULARY = 1024, 1024, 32, 4096
EXPERT_BYTES = 2 * 3 * HIDDEN * INTER
TOKENS = 8
WAYS = {
    "only imports": "imports",
    "whole: from_pretrained, generate": "whole",
    "whole: from_pretrained, then offload, generate": "whole-offloaded",
    "streamed, all experts mapped, generate": "streamed",
    "streamed, experts packed in host memory, generate": "packed",
}


def write_checkpoint(folder: Path, num_bytes: int) -> int:
    """A checkpoint of about `num_bytes`, a layer in memory at a time; gives its true size."""
    from transformers import Qwen3MoeConfig

    layers = max(2, round(num_bytes / (EXPERTS * EXPERT_BYTES)))
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTER, moe_intermediate_size=INTER,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=128, num_experts=EXPERTS,
        num_experts_per_tok=4, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16", tie_word_embeddings=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    config.save_pretrained(folder)
    shards: dict[str, str] = {}
    total = 0
    for number in range(layers + 1):
        tensors = _layer(number - 1) if number else _ends()
        shard = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / shard, {"format": "pt"})
        shards |= dict.fromkeys(tensors, shard)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _weight(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) / 32).to(torch.bfloat16)


def _ends() -> dict[str, torch.Tensor]:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: _weight(VOCABULARY, HIDDEN) for name in names} | {
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)
    }


def _layer(layer: int) -> dict[str, torch.Tensor]:
    ones, one_head = torch.ones(HIDDEN, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    tensors = {
        "input_layernorm.weight": ones,
        "post_attention_layernorm.weight": ones.clone(),
        "self_attn.q_proj.weight": _weight(1024, HIDDEN),
        "self_attn.k_proj.weight": _weight(256, HIDDEN),
        "self_attn.v_proj.weight": _weight(256, HIDDEN),
        "self_attn.o_proj.weight": _weight(HIDDEN, 1024),
        "self_attn.q_norm.weight": one_head,
        "self_attn.k_norm.weight": one_head.clone(),
        "mlp.gate.weight": _weight(EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        for name, shape in (("gate", (INTER, HIDDEN)), ("up", (INTER, HIDDEN)), ("down", (HIDDEN, INTER))):
            tensors[f"mlp.experts.{expert}.{name}_proj.weight"] = _weight(*shape)
    return {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


def memory_mb() -> dict[str, int]:
    """Resident memory of this process now, and at its peak, in units of 10^6 bytes.

    The peak is VmHWM, which is ru_maxrss without what the parent process had before this one was started.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    anonymous, resident = kilobytes["Anonymous"], kilobytes["Rss"]
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0])
    return {
        "anonymous": round(anonymous * 1.024e-3),
        "files": round((resident - anonymous) * 1.024e-3),
        "peak": round(peak * 1.024e-3),
    }


def measure(way: str, folder: str) -> dict[str, Any]:
    """Load, offload and generate in this process; memory after loading and at the end."""
    from transformers import AutoModelForCausalLM

    from runtime import OffloadConfig, offload
    from runtime.checkpoint import stream_model
    from runtime.models import quiet_transformers

    torch.set_num_threads(1)
    start = time.perf_counter()
    if way == "imports":
        return {"seconds": 0.0, "loaded": memory_mb(), "done": memory_mb(), "tokens": []}
    if way.startswith("whole"):
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    else:
        model = stream_model(folder, host_bytes=10**15 if way == "packed" else 0)
    loaded = memory_mb()
    if way != "whole":
        offload(model, OffloadConfig.for_fraction(0.25))
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    ids = torch.arange(2, 10).unsqueeze(0)
    with torch.no_grad():
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    generating = time.perf_counter() - start
    return {
        "seconds": seconds,
        "generating": generating,
        "loaded": loaded,
        "done": memory_mb(),
        "tokens": tokens[0].tolist(),
    }


def main() -> None:
    """Write, measure each way in a process of its own, print, clean up."""
    if len(sys.argv) > 3:
        print(json.dumps(measure(sys.argv[3], sys.argv[2])))
        return
    wanted = float(sys.argv[1]) * 1e9 if len(sys.argv) > 1 else 2e9
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        size = write_checkpoint(Path(folder), round(wanted))
        print(f"checkpoint of {size / 1e6:.0f} MB; all figures MB (10^6 bytes)")
        print(
            f"{'':50} {'peak':>6} | {'loaded: anon':>12} {'files':>6} | {'end: anon':>10} {'files':>6} | load s  gen. s"
        )
        texts = []
        for title, way in WAYS.items():
            command = [sys.executable, __file__, "0", folder, way]
            environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
            result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            row = json.loads(result.stdout.splitlines()[-1])
            loaded, done = row["loaded"], row["done"]
            print(
                f"{title:50} {done['peak']:6} | {loaded['anonymous']:12} {loaded['files']:6} | "
                f"{done['anonymous']:10} {done['files']:6} | {row['seconds']:6.1f} {row.get('generating', 0):6.1f}"
            )
            texts.append(row["tokens"])
    same = all(tokens == texts[1] for tokens in texts[1:])
    print(f"tokens of all ways are {'equal' if same else 'NOT EQUAL'}")


if __name__ == "__main__":
    main()
