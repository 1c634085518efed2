"""What one prediction of the next layer's experts costs, for predictors that have a trained network."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from torch import Tensor

from runtime.estimator import ESTIMATOR_FILE, Estimator, Hybrid
from runtime.measure import generate_offloaded
from runtime.models import LoadedModel, Sampling
from runtime.offloading import offloaded
from simulator.policies.config import parse_config

_TOKENS = 24


def network_prediction_ns(
    loaded: LoadedModel, ids: Tensor, vectors_path: Path | None, estimator_path: Path | None
) -> dict[str, float]:
    """Median time of a prediction by `estimator` and `hybrid` in decode, everything resident, by prefetch source.

    Args:
        loaded: an untouched model.
        ids: some prompt [1, T].
        vectors_path: default vectors; by default the file beside the model.
        estimator_path: trained estimator; by default the file beside the model, and if there is none the result is
            empty.

    Raises:
        ModelError: a given file is missing, or made for another model.
    """
    if estimator_path is None and not (Path(loaded.path) / ESTIMATOR_FILE).is_file():
        return {}
    result = {}
    for source in (Estimator.name, Hybrid.name):
        raw = {"cache": {"budget_ratio": 1.0}, "prefetch": {"source": source}}
        fast = {"device": {"h2d_bytes_per_s": 1e12, "latency_ns": 0}}
        with offloaded(
            loaded.model, parse_config(raw | fast), default_vectors=vectors_path, estimator=estimator_path
        ) as engine:
            engine.link.times_parts = True
            generate_offloaded(engine, loaded, ids[:, :2], _TOKENS, Sampling(ignore_eos=True))
            layers = [layer for record in engine.passes[1:] for layer in record.layers[:-1]]
        result[source] = median(layer.predicted_ns - layer.decided_ns for layer in layers)
    return result
