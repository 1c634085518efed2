"""A very small network, its schedule and a synthetic text: everything a fast training test needs."""

import numpy as np
import pytest
import torch

from runtime.demo_training.settings import NetworkShape, TrainingSettings


@pytest.fixture(autouse=True)
def _one_thread():
    """Bits repeat for equal thread counts; and one thread leaves the other cores alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_shape():
    return NetworkShape(
        hidden_size=32, num_layers=2, num_experts=8, top_k=2, expert_size=16, num_heads=2, num_kv_heads=1, head_size=16
    )


@pytest.fixture(scope="session")
def tiny_settings():
    return TrainingSettings(
        num_steps=16, batch_tokens=512, short_context=64, long_context=128, warmup_steps=4, adam_rate=2e-2
    )


@pytest.fixture(scope="session")
def counting_streams():
    """Two domains whose next token is easy to learn."""
    numbers = np.arange(6000)
    return {"novels": (numbers * 7 % 101).astype(np.uint16), "code": (numbers * 3 % 53 + 200).astype(np.uint16)}
