"""One decision code: the live engine and the simulator decide alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.capture import capture
from runtime.measure import measure
from runtime.models import LoadedModel, Sampling
from runtime.offloading import offload, unload
from runtime.speculative import Drafting, watch_drafts
from simulator.expert_times import times_for
from simulator.hot_experts import with_hot_experts
from simulator.policies.config import OffloadConfig, parse_config
from simulator.policies.core import OffloadCore
from simulator.replay import simulate
from tests.runtime.test_speculative import GAMMA, half_right
from trace_capture.hardware import HardwareProfile
from trace_capture.trace import Trace

PROMPTS = ["the night was dark", "and the road", "was long and the night"]
SAMPLING = Sampling(temperature=1.0, seed=4)
TOKENS = 12
GREEDY_ON = Sampling(ignore_eos=True)
CONFIGS = {
    "lru": {"cache": {"budget_ratio": 0.5}},
    "lfu, one pool": {"cache": {"policy": "lfu", "scope": "global", "budget_ratio": 0.4}},
    "lfu with ageing": {"cache": {"policy": "lfu-ageing", "budget_ratio": 0.3}},
    "random": {"cache": {"policy": "random", "budget_ratio": 0.5}},
    "no cache, quasi-hidden": {
        "cache": {"policy": "none", "budget_ratio": 0.5},
        "prefetch": {"source": "quasi-hidden"},
    },
    "lru, quasi-hidden": {"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "quasi-hidden", "max_experts": 1}},
    "s3-fifo, filled": {"cache": {"policy": "s3-fifo", "budget_ratio": 0.4, "preload": True}},
    "static": {"cache": {"policy": "static", "budget_ratio": 0.5}},
    "static, one pool, not filled": {
        "cache": {"policy": "static", "scope": "global", "budget_ratio": 0.5, "preload": False},
        "prefetch": {"source": "quasi-hidden"},
    },
    "resident": {"cache": {"policy": "resident", "budget_ratio": 1.0}},
    "lru, popularity": {"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "popularity"}},
    "streamed prefill": {"cache": {"budget_ratio": 0.5}, "prefill": {"strategy": "stream"}},
    "prefill in pieces": {"cache": {"budget_ratio": 0.4}, "prefill": {"micro_batch": 2}},
    "lru, previous token": {"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "previous-token"}},
    "misses on the CPU": {"cache": {"budget_ratio": 0.5}, "cpu": {"policy": "misses", "admissions": 1}},
    "misses on the CPU, quasi-hidden": {
        "cache": {"policy": "lfu", "budget_ratio": 0.4},
        "prefetch": {"source": "quasi-hidden"},
        "cpu": {"policy": "misses", "layers": 1},
    },
    "threshold": {"cache": {"budget_ratio": 0.4}, "cpu": {"policy": "threshold", "max_tokens": 3, "admissions": 0}},
    "layers on the CPU": {"cache": {"budget_ratio": 0.4}, "cpu": {"layers": [1, 2]}},
    "utility": {"cache": {"policy": "utility", "budget_ratio": 0.4}, "utility": {"gamma": 0}},
    "utility, one pool": {
        "cache": {"policy": "utility", "scope": "global", "budget_ratio": 0.4},
        "utility": {"gamma": 0, "signal": "recency"},
    },
}


@pytest.fixture(scope="module")
def captured(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Path]:
    out = tmp_path_factory.mktemp("parity") / "t.parquet"
    trace = capture(loaded, PROMPTS, out, TOKENS, sampling=SAMPLING, predict="quasi-hidden")
    return trace, out.with_suffix(".default_vectors.safetensors")


def live_log(loaded: LoadedModel, config: OffloadConfig, vectors: Path) -> list[tuple[Any, ...]]:
    """Calls and plans of a live run over the captured prompts with the captured tokens."""
    log: list[tuple[Any, ...]] = []
    offload(loaded.model, config, default_vectors=vectors, log=log)
    try:
        for number, prompt in enumerate(PROMPTS):
            loaded.generate(loaded.encode(prompt, TOKENS), TOKENS, SAMPLING, number)
    finally:
        unload(loaded.model)
    return log


@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_race_every_call_and_plan_is_the_same(
    loaded: LoadedModel, captured: tuple[Trace, Path], name: str
) -> None:
    trace, vectors = captured
    device = {"serial": True, "h2d_bytes_per_s": 1e9, "latency_ns": 0}
    config = with_hot_experts(parse_config(CONFIGS[name] | {"device": device}), trace)
    live = live_log(loaded, config, vectors)
    simulated: list[tuple[Any, ...]] = []
    simulate(trace, HardwareProfile.load(Path("rtx4090-pcie4x16")), config, log=simulated)
    for place, (left, right) in enumerate(zip(live, simulated, strict=False)):
        assert left == right, f"entry {place} differs"
    assert len(live) == len(simulated)
    plans = [entry[1].loads if entry[0] == "wave" else entry[1] for entry in live if entry[0] in ("wave", "prefetch")]
    assert any(plans) == (name != "resident"), "what is there from the start is never loaded"
    assert any(entry[0] == "wave" and entry[1].cpu_experts for entry in live) == config.cpu.is_used


@pytest.mark.parametrize("name", ["lru, quasi-hidden", "no cache, quasi-hidden", "misses on the CPU, quasi-hidden"])
def test_a_live_run_with_races_replays_offline_decision_by_decision(
    loaded: LoadedModel, captured: tuple[Trace, Path], name: str
) -> None:
    trace, vectors = captured
    config = parse_config(CONFIGS[name] | {"device": {"h2d_bytes_per_s": 3e7, "latency_ns": 10_000}})
    live = live_log(loaded, config, vectors)
    again: list[tuple[Any, ...]] = []
    core = OffloadCore.from_config(config, trace.shape, again)
    calls = {"wave": "next_wave"}
    for entry in live:
        if entry[0] == "prefetch":
            continue  # the answer to plan_prefetch
        getattr(core, calls.get(entry[0], entry[0]))(*(() if entry[0] == "wave" else entry[1:]))
    assert again == live


def test_hits_loads_and_bytes_of_on_demand_loading_are_predicted_exactly(
    loaded: LoadedModel, captured: tuple[Trace, Path]
) -> None:
    trace, vectors = captured
    config = parse_config({"cache": {"budget_ratio": 0.4}, "device": {"h2d_bytes_per_s": 1e8, "latency_ns": 5_000}})
    predicted = simulate(trace, HardwareProfile.load(Path("rtx4090-pcie4x16")), config).metrics
    measured = measure(loaded, PROMPTS, config, TOKENS, sampling=SAMPLING, vectors_path=vectors).metrics
    for name in ("lookups", "hits", "loads", "evictions", "bytes_loaded", "prefill_tokens", "decode_tokens"):
        assert getattr(predicted, name) == getattr(measured, name), name


def test_next_wave_ends_a_layer_in_the_log_of_calls(loaded: LoadedModel, captured: tuple[Trace, Path]) -> None:
    """The log holds calls and answers in the order of the protocol."""
    log = live_log(loaded, parse_config(CONFIGS["lru"]), captured[1])
    names = [entry[0] for entry in log]
    assert names[0] == "begin_pass"
    assert names.count("layer_routed") == names.count("layer_done")
    assert names.index("wave") < names.index("plan_prefetch") < names.index("wave_done")


SPECULATIVE = {
    "lru": {"cache": {"budget_ratio": 0.5}},
    "drafting": {"utility": {"loads": "drafting"}, "cpu": {"policy": "balanced"}},
    "always, a tau per layer": {"utility": {"loads": "always", "scope": "layer"}, "cpu": {"policy": "balanced"}},
    "one pool, hot misses loaded": {
        "cache": {"policy": "utility", "scope": "global", "budget_ratio": 0.4},
        "utility": {"loads": "always", "signal": "recency"},
        "cpu": {"policy": "balanced", "hot_misses": "load"},
    },
    "misses balanced with the link": {
        "utility": {"loads": "drafting"},
        "cpu": {"policy": "balanced", "hot_misses": "balance"},
    },
    "joined with predictions": {
        "utility": {"loads": "always", "tau": 1},
        "prefetch": {"source": "quasi-hidden", "max_experts": 1},
        "cpu": {"policy": "balanced"},
    },
    "no CPU side": {"utility": {"loads": "always"}, "cpu": {"policy": "none"}},
}
SLOW_HOST = HardwareProfile.load(Path("rtx4090-pcie4x16"))


def speculative(name: str, **device: object) -> OffloadConfig:
    base = {"cache": {"policy": "utility", "budget_ratio": 0.4}} | SPECULATIVE[name]
    if "utility" in base:
        base["utility"] = {"gamma": GAMMA, "window_ns": 1_000_000, "boundaries": "capacity"} | base["utility"]
    return parse_config(base | {"device": device})


@pytest.fixture(scope="module")
def drafted(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Path, Drafting]:
    drafting = Drafting("draft", GAMMA, half_right(loaded.model))
    out = tmp_path_factory.mktemp("speculative") / "t.parquet"
    trace = capture(loaded, PROMPTS, out, 24, sampling=GREEDY_ON, drafting=drafting, predict="quasi-hidden")
    return trace, out.with_suffix(".default_vectors.safetensors"), drafting


def speculative_log(
    loaded: LoadedModel, config: OffloadConfig, drafted: tuple[Trace, Path, Drafting]
) -> list[tuple[Any, ...]]:
    _, vectors, drafting = drafted
    log: list[tuple[Any, ...]] = []
    engine = offload(loaded.model, config, default_vectors=vectors, hardware=SLOW_HOST, log=log)
    try:
        with watch_drafts(loaded.model, [engine]):
            for number, prompt in enumerate(PROMPTS):
                loaded.generate(loaded.encode(prompt, 24), 24, GREEDY_ON, number, drafting)
        engine.verify_residency()
    finally:
        unload(loaded.model)
    return log


@pytest.mark.parametrize("name", SPECULATIVE)
def test_speculative_decoding_decides_alike_live_and_simulated(
    loaded: LoadedModel, drafted: tuple[Trace, Path, Drafting], name: str
) -> None:
    config = speculative(name, serial=True, h2d_bytes_per_s=1e9, latency_ns=0)
    live = speculative_log(loaded, config, drafted)
    simulated: list[tuple[Any, ...]] = []
    simulate(drafted[0], SLOW_HOST, config, log=simulated)
    for place, (left, right) in enumerate(zip(live, simulated, strict=False)):
        assert left == right, f"entry {place} differs"
    assert len(live) == len(simulated)
    reasons = {load.reason for entry in live if entry[0] == "prefetch" for load in entry[1]}
    assert ("utility" in reasons) == (name != "lru")
    assert ("prefetch" in reasons) == ("predictions" in name)


@pytest.mark.parametrize("name", ["always, a tau per layer", "joined with predictions"])
def test_a_speculative_run_with_races_replays_from_its_log(
    loaded: LoadedModel, drafted: tuple[Trace, Path, Drafting], name: str
) -> None:
    config = speculative(name, h2d_bytes_per_s=3e7, latency_ns=10_000)
    config = config.model_copy(update={"utility": config.utility.model_copy(update={"window_ns": None})})
    live = speculative_log(loaded, config, drafted)
    again: list[tuple[Any, ...]] = []
    core = OffloadCore.from_config(
        config, drafted[0].shape, again, times=times_for(config, SLOW_HOST, drafted[0].shape)
    )
    for entry in live:
        if entry[0] != "prefetch":
            getattr(core, "next_wave" if entry[0] == "wave" else entry[0])(*(() if entry[0] == "wave" else entry[1:]))
    assert again == live
    windows = {entry[1] for entry in live if entry[0] == "drafting_begins"}
    assert len(windows) > 2 and max(windows) > 0, "a running mean of what was measured"
