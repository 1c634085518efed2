"""How long a layer takes when the CPU runs some of its experts: `python tests/benchmarks/cpu_beside_device.py`.

One decode token through a layer of the shape of Qwen3-30B-A3B's (top-8, hidden 2048, intermediate 768, bfloat16; 32
experts are enough to draw from) and through one of small experts. The device is emulated, so both parts are threads of
one processor: two idle cores are needed, and the best to expect is half the time.
"""

from __future__ import annotations

import statistics
import time

import torch
import transformers

from runtime.host_experts import HostExperts
from runtime.kernels import Routed, SlotExperts, WaveSum, stock_kernel
from runtime.models import quiet_transformers
from trace_capture.hooks import MoeSite, discover

TOP_K, EXPERTS, REPEATS = 8, 32, 40


def layer_of(hidden: int, intermediate: int) -> MoeSite:
    """The experts of a one-layer random model."""
    with quiet_transformers():
        config = transformers.Qwen3MoeConfig(
            hidden_size=hidden,
            intermediate_size=hidden,
            moe_intermediate_size=intermediate,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            vocab_size=128,
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16)
    return discover(model)[0]


def run_layer(site: MoeSite, host: HostExperts, view: SlotExperts, on_cpu: int) -> tuple[int, int, int]:
    """Nanoseconds of the whole layer, of the device's part, and of the CPU's."""
    kernel, in_expert_order = stock_kernel(site.experts, "grouped_mm")
    row = torch.randperm(EXPERTS)[:TOP_K].tolist()
    hidden = torch.randn(1, view.gate_up_proj.shape[2]).to(torch.bfloat16)
    routed = Routed(hidden, [row], torch.rand(1, TOP_K).to(torch.bfloat16))
    began_ns = time.perf_counter_ns()
    job = host.start(0, row[:on_cpu], routed) if on_cpu else None
    parts = WaveSum(routed, in_expert_order)
    device_ns = time.perf_counter_ns()
    if on_cpu < TOP_K:
        parts.add(kernel, view, {expert: expert for expert in row[on_cpu:]})
    device_ns = time.perf_counter_ns() - device_ns
    if job is not None:
        parts.put(job.pairs.places, host.wait(job))
    parts.total()
    return time.perf_counter_ns() - began_ns, device_ns, job.ended_ns - job.began_ns if job else 0


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    for hidden, intermediate in ((2048, 768), (256, 128)):
        site = layer_of(hidden, intermediate)
        bank = {name: tensor.detach() for name, tensor in site.experts.named_parameters(recurse=False)}
        host, view = HostExperts([site], [bank], "grouped_mm", threads=1), SlotExperts(site.experts, bank)
        megabytes = 3 * hidden * intermediate * 2 / 1e6
        print(f"experts of {megabytes:.2f} MB\n  on CPU   layer ms  device part ms  CPU part ms  speed-up")
        with torch.no_grad():
            alone_ms = 0.0
            for on_cpu in range(TOP_K + 1):
                times = [run_layer(site, host, view, on_cpu) for _ in range(REPEATS)]
                layer, device, cpu = (statistics.median(column) / 1e6 for column in zip(*times, strict=True))
                alone_ms = alone_ms or layer
                print(f"  {on_cpu} of {TOP_K}  {layer:9.3f}  {device:14.3f}  {cpu:11.3f}  {alone_ms / layer:7.2f}x")
        host.close()


if __name__ == "__main__":
    main()
