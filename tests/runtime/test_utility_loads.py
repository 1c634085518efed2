"""MoE-SpAc live: same tokens, loads while drafting, times measured where no profile is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.link import wait_until
from runtime.measure import generate_offloaded
from runtime.models import GREEDY, LoadedModel, Sampling
from runtime.offloading import offload, offloaded, unload
from runtime.speculative import Drafting, watch_drafts
from simulator.policies.config import OffloadConfig, parse_config
from simulator.policies.utility_core import UtilityCore
from tests.runtime.test_speculative import GAMMA, PROMPT, _Bytes, half_right
from trace_capture.hardware import HardwareProfile
from trace_capture.machine_parts import with_quantities


def full(**changes: object) -> OffloadConfig:
    raw = {
        "cache": {"policy": "utility", "budget_ratio": 0.5},
        "utility": {"gamma": GAMMA, "loads": "always", "boundaries": "capacity"},
        "cpu": {"policy": "balanced"},
        "device": {"h2d_bytes_per_s": 3e8, "latency_ns": 1000},
    }
    return parse_config(raw | changes)


MACHINE = HardwareProfile.load(Path("rtx4090-pcie4x16"))
SLOW_COPIES = with_quantities(MACHINE, {"link.latency_ns": 60_000.0}, "so that not all misses are worth a copy")


def test_greedy_output_is_that_of_the_untouched_model(any_model: torch.nn.Module, device: str) -> None:
    check_output(any_model, device, "cpu")


@pytest.mark.parametrize("misses", ["load", "balance"])
def test_so_it_is_where_misses_are_awaited(loaded: LoadedModel, misses: str) -> None:
    check_output(loaded.model, "cpu", misses)


def check_output(any_model: torch.nn.Module, device: str, misses: str) -> None:
    loaded = LoadedModel(any_model, _Bytes(), "tiny")
    ids = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9]], device=device)
    plain = loaded.generate(ids, 24, GREEDY, 0)
    drafting = Drafting("draft", GAMMA, half_right(any_model))
    machine = SLOW_COPIES if misses == "balance" else MACHINE
    with (
        offloaded(any_model, full(cpu={"policy": "balanced", "hot_misses": misses}), hardware=machine) as engine,
        watch_drafts(any_model, [engine]),
    ):
        assert loaded.generate(ids, 24, GREEDY, 0, drafting) == plain
        assert loaded.generate(ids, 24, GREEDY, 0) == plain, "and without drafts, planned before each pass"
        engine.verify_residency()
        assert engine.core.decode_counters.prefetch_loads > 0 or misses != "cpu"
        assert engine.pairs_on_cpu > 0


def test_times_are_measured_where_no_profile_is_given(loaded: LoadedModel) -> None:
    engine = offload(loaded.model, full())
    try:
        assert isinstance(engine.core, UtilityCore)
        times = engine.core.hot._times
    finally:
        unload(loaded.model)
    layers = engine.shape.num_moe_layers
    assert times.device_ns.shape == times.cpu_ns.shape == (layers, GAMMA + 2)
    assert not times.device_ns[:, 0].any() and (times.cpu_base_ns + times.cpu_ns[:, 1] > 0).all()
    assert (np.diff(times.copy_ns) == 0).all()
    assert times.copy_ns[0] == pytest.approx(1000 + engine.shape.expert_bytes[0] / 0.3, abs=1)


def test_copies_of_the_coming_pass_run_while_drafts_are_made(loaded: LoadedModel) -> None:
    draft = half_right(loaded.model)
    config = full(utility={"gamma": GAMMA, "loads": "drafting", "boundaries": "capacity"})
    ids = loaded.encode(PROMPT, 40)
    with offloaded(loaded.model, config, hardware=MACHINE) as engine:
        engine.link.spans = []

        def wait_for_copies(*_: object) -> None:
            """Drafting lasts until what was planned for it has landed, however loaded the machine is."""
            for job in list(engine.link._outstanding.values()):
                assert job.copied.wait(30), "a copy does not go on while drafts are made"
                wait_until(job.end_ns)

        with draft.register_forward_pre_hook(wait_for_copies):
            generate_offloaded(
                engine, loaded, ids, 40, Sampling(ignore_eos=True), drafting=Drafting("draft", GAMMA, draft)
            )
        copies = [span for span in engine.link.spans if span.reason == "utility"]
        drafted = [(one.began_ns, one.began_ns + one.planned_ns + one.drafting_ns) for one in engine.passes]
    assert copies
    beside = [any(begin <= copy.start_ns and copy.end_ns <= end for begin, end in drafted) for copy in copies]
    assert all(beside), "a load was planned too late for the drafting that it should run beside"
