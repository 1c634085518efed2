"""Experts on the CPU beside the device: exact, each pair once, at the same time, and sound when something fails."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from runtime import offload, offloaded, unload
from runtime.checkpoint import load_streamed
from runtime.device_experts import DeviceExperts
from runtime.engine import Engine
from runtime.host_experts import HostError, HostExperts, HostJob
from runtime.kernels import Routed, WaveSum, stock_kernel
from runtime.measure import measure
from runtime.models import LoadedModel
from simulator.policies.config import OffloadConfig, parse_config
from tests.runtime.test_architectures import SUPPORTED, change_experts
from tests.runtime.tiny_models import tiny_model
from trace_capture.errors import ConfigError
from trace_capture.hooks import discover

PLACEMENTS: dict[str, dict[str, Any]] = {
    "misses": {"policy": "misses"},
    "threshold": {"policy": "threshold", "max_tokens": 2},
    "half of the layers and misses": {"policy": "misses", "layers": [0, 2], "admissions": 4},
    "all": {"layers": "all"},
}
PROMPT = torch.arange(3, 27)[None]
TOLERANCE = {"cpu": 1e-6, "cuda": 1e-5}


def config(placement: str, ratio: float = 0.5, **more: Any) -> OffloadConfig:
    device = {"h2d_bytes_per_s": 2e8, "latency_ns": 1000} | more.pop("device", {})
    return parse_config({"cache": {"budget_ratio": ratio}, "cpu": PLACEMENTS[placement], "device": device} | more)


def greedy(model: torch.nn.Module) -> torch.Tensor:
    prompt = PROMPT.to(model.device)
    with torch.no_grad():
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)


def prefill(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT.to(model.device)).logits


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tokens_and_logits_equal_the_untouched_model(any_model: torch.nn.Module, placement: str) -> None:
    logits, tokens = prefill(any_model), greedy(any_model)
    with offloaded(any_model, config(placement)) as engine:
        assert torch.allclose(prefill(any_model), logits, atol=TOLERANCE[any_model.device.type], rtol=0)
        assert torch.equal(greedy(any_model), tokens)
        engine.verify_residency()
        assert engine.pairs_on_cpu > 0
        assert (engine.pairs_on_device > 0) == (placement != "all")


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_every_registered_architecture_runs_from_the_host_s_experts(model_type: str) -> None:
    """Biases, transposed weights, no gate, norms behind experts: whatever the layout, a prompt reads the same."""
    model = tiny_model(model_type)
    logits = prefill(model)
    with offloaded(model, config("misses", 0.25)) as engine:
        assert torch.allclose(prefill(model), logits, atol=1e-5, rtol=1e-5)
        assert engine.pairs_on_cpu > 0
        change_experts(engine.store.banks, 2.0)
        assert (prefill(model) - logits).abs().max() > 1e-3, "the output does not come from the host's experts"
        change_experts(engine.store.banks, 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("placement", ["misses", "all"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_decode_is_bit_equal_for_every_stock_kernel(
    tiny: Callable[..., torch.nn.Module], implementation: str, placement: str, dtype: torch.dtype
) -> None:
    """Each pair is the same product wherever it runs, and is added up in the kernel's own order. Batched products of
    float32 round differently with the size of the batch, and a part is a smaller batch."""
    model = tiny("qwen3_moe", num_experts_per_tok=4).to(dtype)
    model.set_experts_implementation(implementation)
    before = _decode_logits(model)
    with offloaded(model, config(placement)) as engine:
        after = _decode_logits(model)
        assert engine.pairs_on_cpu > 0 and (engine.pairs_on_device > 0) == (placement != "all")
    tolerance = 1e-6 if (implementation, dtype, placement) == ("batched_mm", torch.float32, "misses") else 0.0
    assert all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(before, after, strict=True))


def _decode_logits(model: torch.nn.Module) -> list[torch.Tensor]:
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        for token in (3, 9, 4, 9, 11, 3, 8, 9):
            logits.append(model(torch.tensor([[token]]), **{name: cache}).logits)
    return logits


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_add_up_to_the_whole_layer_with_its_rounding(
    tiny: Callable[..., torch.nn.Module], implementation: str, dtype: torch.dtype
) -> None:
    """Every split of one layer of several tokens over CPU and device, one of the ids being no expert."""
    model = tiny("qwen3_moe", num_experts_per_tok=4).to(dtype)
    site = discover(model)[1]
    torch.manual_seed(1)
    hidden = torch.randn(5, 64).to(dtype)
    index = torch.stack([torch.randperm(8)[:4] for _ in range(5)])
    weights = torch.rand(5, 4).to(dtype)
    kernel, in_expert_order = stock_kernel(site.experts, implementation)
    with torch.no_grad():
        whole = kernel(site.experts, hidden, index, weights)
        bank = {name: parameter.detach() for name, parameter in site.experts.named_parameters()}
        host = HostExperts([site], [bank], implementation, threads=1)
        for on_cpu in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 3, 7], [5], [1, 2, 4, 6]):
            routed = Routed(hidden, index.tolist(), weights)
            parts = WaveSum(routed, in_expert_order)
            job = host.start(0, on_cpu, routed)
            rest = {expert: expert for expert in range(8) if expert not in on_cpu}
            if rest:
                parts.add(kernel, site.experts, rest)
            parts.put(job.pairs.places, host.wait(job))
            assert parts.computed == 20
            assert torch.equal(parts.total(), whole)
        host.close()


def test_each_pair_is_computed_once(tiny: Callable[..., torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from outside: pairs that reach a kernel on either side, against those that the routers gave."""
    model = tiny("qwen3_moe")
    computed: list[tuple[str, int, int]] = []
    asked = 0
    run_whole, add, run_on_host = DeviceExperts.run_whole, DeviceExperts.add, HostExperts._run

    def whole(self: DeviceExperts, layer: int, experts: Any, routed: Routed, index: torch.Tensor) -> torch.Tensor:
        computed.extend(("device", layer, expert) for row in routed.rows for expert in row)
        return run_whole(self, layer, experts, routed, index)

    def part(self: DeviceExperts, parts: WaveSum, layer: int, experts: Any) -> None:
        rows = parts._routed.rows
        computed.extend(("device", layer, expert) for row in rows for expert in row if expert in experts)
        add(self, parts, layer, experts)

    def host(self: HostExperts, job: HostJob) -> torch.Tensor:
        outputs = run_on_host(self, job)
        assert outputs.shape == (len(job.pairs.places), 64)
        computed.extend(("cpu", job.layer, slot) for slot in job.pairs.slots)
        return outputs

    monkeypatch.setattr(DeviceExperts, "run_whole", whole)
    monkeypatch.setattr(DeviceExperts, "add", part)
    monkeypatch.setattr(HostExperts, "_run", host)
    with offloaded(model, config("half of the layers and misses")) as engine:
        greedy(model)
        for record in engine.passes:
            asked += record.tokens * 2 * len(record.layers)
        assert len(computed) == asked == engine.pairs_on_device + engine.pairs_on_cpu
        assert sum(side == "cpu" for side, _, _ in computed) == engine.pairs_on_cpu
        assert 0 < engine.pairs_on_cpu < asked
        assert {layer for side, layer, _ in computed if side == "cpu"} >= {0, 2}
        assert not {layer for side, layer, _ in computed if side == "device"} & {0, 2}


def test_device_and_copies_go_on_while_the_cpu_computes(
    tiny: Callable[..., torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's part returns only when the device has run its own and a copy has landed beside it."""
    model = tiny("qwen3_moe")
    device_ran, copied = threading.Event(), threading.Event()
    add, run_on_host = DeviceExperts.add, HostExperts._run

    def part(self: DeviceExperts, parts: WaveSum, layer: int, experts: Any) -> None:
        add(self, parts, layer, experts)
        device_ran.set()

    def host(self: HostExperts, job: HostJob) -> torch.Tensor:
        if waits:
            device_ran.clear()
            copied.clear()
            assert device_ran.wait(20), "the device waits for the CPU"
            assert copied.wait(20), "the link waits for the CPU"
            waits.clear()
        return run_on_host(self, job)

    waits: list[bool] = []
    monkeypatch.setattr(DeviceExperts, "add", part)
    monkeypatch.setattr(HostExperts, "_run", host)
    expected = prefill(model)
    with offloaded(model, config("threshold", 0.3)) as engine:
        copy = engine.link._copy

        def noted(job: Any) -> None:
            copy(job)
            copied.set()

        monkeypatch.setattr(engine.link, "_copy", noted)
        prefill(model)
        waits.append(True)
        assert torch.equal(prefill(model), expected)
        assert not waits
        counters = engine.core.prefill_counters
        assert counters.demand_loads > 0 and counters.cpu_runs > 0


def test_a_streamed_model_runs_experts_on_the_cpu_from_its_files(model_folder: Path, loaded: LoadedModel) -> None:
    streamed = load_streamed(str(model_folder))
    prompts, options = ["the night was dark"], {"max_new_tokens": 12}
    expected = measure(loaded, prompts, config("misses"), **options)
    run = measure(streamed, prompts, config("misses"), **options)
    assert run.texts == expected.texts
    assert run.metrics.cpu_runs > 0
    for one in (run, expected):
        assert any("threads of one processor" in note for note in one.info.notes)
        terms = one.metrics.tpot_terms_ms
        assert terms["cpu_experts"] > 0
        assert sum(terms.values()) == pytest.approx(one.metrics.tpot_ms)
        spans = sorted((span for span in one.spans if span.track == "cpu"), key=lambda span: span.start_ns)
        assert spans and all(a.end_ns <= b.start_ns for a, b in zip(spans, spans[1:], strict=False))


def test_a_failure_on_the_cpu_reaches_the_caller_and_the_next_pass_works(
    tiny: Callable[..., torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen3_moe")
    expected = greedy(model)
    run_on_host, calls = HostExperts._run, []

    def fail_once(self: HostExperts, job: HostJob) -> torch.Tensor:
        calls.append(job)
        if len(calls) == 7:
            raise ValueError("bad memory")
        return run_on_host(self, job)

    monkeypatch.setattr(HostExperts, "_run", fail_once)
    with offloaded(model, config("misses")):
        with pytest.raises(HostError, match=r"MoE layer \d on the CPU failed: bad memory"):
            greedy(model)
        assert torch.equal(greedy(model), expected)


def test_threads_of_the_cpu_s_side_are_its_own(tiny: Callable[..., torch.nn.Module]) -> None:
    model = tiny("qwen3_moe")
    chosen = parse_config({"cache": {"budget_ratio": 0.5}, "cpu": {"policy": "misses", "threads": 2}})
    counts: list[int] = []
    with offloaded(model, chosen) as engine:
        host = _host_of(engine)
        kernel = host._kernels[0]
        host._kernels = [lambda *call: counts.append(torch.get_num_threads()) or kernel(*call)] * len(host._kernels)
        greedy(model)
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert set(counts) == {2}
    assert torch.get_num_threads() == 1 and later == [1]
    assert not [thread for thread in threading.enumerate() if thread.name == "moe-studio-cpu"]


def _host_of(engine: Engine) -> HostExperts:
    assert engine._host is not None
    return engine._host


def test_without_a_cpu_policy_there_is_no_thread(tiny: Callable[..., torch.nn.Module]) -> None:
    model = tiny("qwen3_moe")
    engine = offload(model, parse_config({"cache": {"budget_ratio": 0.5}}))
    assert engine._host is None
    assert not [thread for thread in threading.enumerate() if thread.name == "moe-studio-cpu"]
    unload(model)


def test_more_threads_than_cores_are_refused_before_anything_is_changed(tiny: Callable[..., torch.nn.Module]) -> None:
    model = tiny("qwen3_moe")
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    chosen = parse_config({"cache": {"budget_ratio": 0.5}, "cpu": {"policy": "misses", "threads": 9999}})
    with pytest.raises(ConfigError, match="cpu.threads is 9999 and this machine has"):
        offload(model, chosen)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    with offloaded(model, parse_config({"cache": {"budget_ratio": 0.5}, "cpu": {"threads": 9999}})):
        pass  # nothing runs on the CPU
