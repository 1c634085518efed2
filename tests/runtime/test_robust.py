"""Failures, interruptions and company: each works or gives a clear error, and never hangs."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from runtime import offloading
from runtime.engine import Engine
from runtime.link import CopyJob, LinkError
from runtime.offloading import offload, unload
from runtime.turns import Turns
from simulator.policies.config import parse_config
from trace_capture.errors import ConfigError

PROMPT = torch.arange(3, 15)[None]
OTHER = torch.arange(40, 50)[None]


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A hang ends the test run with a traceback of every thread."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def generate(model: torch.nn.Module, ids: torch.Tensor = PROMPT, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, **({"do_sample": False} | options)
        )


@pytest.fixture
def model(tiny: Callable[..., torch.nn.Module]) -> torch.nn.Module:
    return tiny("qwen3_moe")


@pytest.fixture
def expected(model: torch.nn.Module) -> torch.Tensor:
    return generate(model)


@pytest.fixture
def engine(model: torch.nn.Module, expected: torch.Tensor) -> Iterator[Engine]:
    raw = {"cache": {"budget_ratio": 0.3}, "prefetch": {"source": "previous-token"}}
    yield offload(model, parse_config(raw | {"device": {"h2d_bytes_per_s": 5e7, "latency_ns": 1000}}))
    unload(model)


def test_a_failing_copy_ends_the_pass_and_the_next_one_works(
    model: torch.nn.Module, engine: Engine, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, calls = engine.link._copy, []

    def fail_once(job: CopyJob) -> None:
        calls.append(job.key)
        if len(calls) == 5:
            raise OSError("the disk is gone")
        copy(job)

    monkeypatch.setattr(engine.link, "_copy", fail_once)
    with pytest.raises(LinkError, match="the disk is gone"):
        generate(model)
    assert torch.equal(generate(model), expected)
    engine.verify_residency()


@pytest.mark.parametrize("error", [RuntimeError("a hook failed"), KeyboardInterrupt()])
def test_an_exception_between_layers_leaves_a_working_engine(
    model: torch.nn.Module, engine: Engine, expected: torch.Tensor, error: BaseException
) -> None:
    passes = []

    def hook(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 4:
            raise error

    handle = model.model.layers[2].register_forward_pre_hook(hook)
    with pytest.raises(type(error)):
        generate(model)
    handle.remove()
    assert torch.equal(generate(model), expected)


def test_ctrl_c_while_waiting_for_the_link_leaves_a_working_engine(
    model: torch.nn.Module, engine: Engine, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, calls = engine.link.wait, []

    def interrupted(keys: Any) -> None:
        calls.append(keys)
        if len(calls) == 6:
            raise KeyboardInterrupt
        wait(keys)

    monkeypatch.setattr(engine.link, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(model)
    assert torch.equal(generate(model), expected)
    assert engine.core.resident_bytes() <= sum(pool.num_bytes for pool in engine.pools)


def test_two_threads_take_turns_and_both_are_right(
    model: torch.nn.Module, expected: torch.Tensor, tiny: Callable[..., torch.nn.Module]
) -> None:
    other = generate(model, OTHER)
    offload(model, parse_config({"cache": {"budget_ratio": 0.3}, "device": {"h2d_bytes_per_s": 5e7, "latency_ns": 0}}))
    found: dict[str, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda n=name, i=ids: found.__setitem__(n, generate(model, i)), daemon=True)
        for name, ids in (("first", PROMPT), ("second", OTHER))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    unload(model)
    assert torch.equal(found["first"], expected)
    assert torch.equal(found["second"], other)


def test_a_thread_that_died_in_a_pass_does_not_keep_its_turn() -> None:
    turns = Turns()
    dead = threading.Thread(target=turns.take)
    dead.start()
    dead.join()
    taken = threading.Event()
    threading.Thread(target=lambda: (turns.take(), taken.set(), turns.give()), daemon=True).start()
    assert taken.wait(timeout=10)
    turns.take()
    turns.take()
    turns.give()


def test_sampling_and_streaming_work(model: torch.nn.Module, engine: Engine) -> None:
    unload(model)
    torch.manual_seed(5)
    sampled = generate(model, do_sample=True)
    again = offload(model, engine.config)

    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    streamer = Streamer()
    torch.manual_seed(5)
    assert torch.equal(generate(model, do_sample=True, streamer=streamer), sampled)
    assert streamer.tokens == [*sampled[0].tolist(), -1]
    assert again.core.decode_counters.lookups > 0


def test_unload_works_after_a_failure(tiny: Callable[..., torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("mixtral")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = offload(model, parse_config({"cache": {"budget_ratio": 0.5}}))

    def fail(job: CopyJob) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.link, "_copy", fail)
    with pytest.raises(LinkError):
        generate(model)
    unload(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "step", ["make_pools", "_make_link", "Engine", "_take_over", "watch_passes", "refuse_state", "ChunkedPrefill"]
)
def test_whatever_fails_in_offload_leaves_the_model_as_it_was(
    model: torch.nn.Module, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    threads, real = threading.active_count(), getattr(offloading, step)

    def fail_afterwards(*args: Any, **options: Any) -> None:
        if step in ("_make_link", "Engine", "_take_over"):
            made = real(*args, **options)
            getattr(made, "close", lambda: None)()
        raise OSError("no room")

    monkeypatch.setattr(offloading, step, fail_afterwards)
    config = parse_config({"cache": {"budget_ratio": 0.5}, "prefill": {"micro_batch": 4}})
    with pytest.raises(OSError, match="no room"):
        offload(model, config)
    monkeypatch.undo()
    assert threading.active_count() == threads
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(generate(model), expected)
    with offloading.offloaded(model, config):
        assert torch.equal(generate(model), expected)


def test_a_device_without_room_for_the_slots_is_told(
    model: torch.nn.Module, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("runtime.slots.torch.zeros", no_room)
    with pytest.raises(ConfigError, match=r"cpu has no room for slots of [\d,]+ bytes; make cache.budget_ratio"):
        offload(model, parse_config({"cache": {"budget_ratio": 0.5}}))
    monkeypatch.undo()
    assert torch.equal(generate(model), expected)
