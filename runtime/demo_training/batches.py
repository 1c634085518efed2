"""Pick training windows: a pure function of seed and step, so that a resumed run sees the same text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from runtime.demo_training.corpus import DOMAIN_WEIGHTS

Stream = npt.NDArray[np.uint16]


def domain_shares(streams: Mapping[str, Stream]) -> npt.NDArray[np.float64]:
    """Share of each domain in a batch: the fixed weights, rescaled to the domains that are present."""
    total = sum(DOMAIN_WEIGHTS[domain] for domain in streams)
    return np.asarray([DOMAIN_WEIGHTS[domain] / total for domain in streams])


def training_batch(
    streams: Mapping[str, Stream], *, step: int, seed: int, num_windows: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next tokens [num_windows, context] (int64) of one step, all domains mixed."""
    generator = np.random.default_rng((seed, step))
    domains = list(streams)
    picks = generator.choice(len(domains), size=num_windows, p=domain_shares(streams))
    windows = np.empty((num_windows, context + 1), dtype=np.int64)
    for row, pick in enumerate(picks):
        stream = streams[domains[pick]]
        start = int(generator.integers(0, len(stream) - context))
        windows[row] = stream[start : start + context + 1]
    tokens = torch.from_numpy(windows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def evaluation_windows(stream: Stream, *, num_windows: int, context: int) -> torch.Tensor:
    """Evenly spread windows [W, context + 1] (int64) of a held-out stream; fewer when it is short."""
    last = len(stream) - context - 1
    count = max(1, min(num_windows, (last + 1) // context + 1))
    starts = np.linspace(0, max(last, 0), count).astype(np.int64)
    rows = [stream[start : start + context + 1].astype(np.int64) for start in starts]
    return torch.from_numpy(np.stack(rows))
