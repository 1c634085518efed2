"""`capture`: record where a live model routes its tokens, while it continues some prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.default_vectors import (
    VECTORS_FILE,
    DefaultVectors,
    LayerDefaults,
    load_default_vectors,
    save_default_vectors,
)
from runtime.estimator import ESTIMATOR_FILE, PREDICTORS, make_predictor
from runtime.models import GREEDY, LoadedModel, Sampling, prompts_digest
from runtime.offloading import model_name
from runtime.remainder import Remainder
from runtime.speculative import Drafting, watch_drafts
from trace_capture.errors import ConfigError, ModelError
from trace_capture.files import make_folder
from trace_capture.hooks import MoeSite, RoutingRecorder, discover, model_shape
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Trace, TraceInfo
from trace_capture.trace_store import TraceWriter
from trace_capture.versions import software_versions

Progress = Callable[[int, int], None]


def capture(
    loaded: LoadedModel,
    prompts: Sequence[str],
    out: Path,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    drafting: Drafting | None = None,
    predict: str | None = None,
    vectors_path: Path | None = None,
    estimator_path: Path | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Record prefill and decode of every prompt into a trace.

    Rows reach the disk pass by pass; a capture that is killed leaves `<out>.partial`, which `read_trace` understands.

    Args:
        loaded: an untouched model; it is not changed.
        prompts: run one after the other, batch size 1.
        out: Parquet file to write.
        max_new_tokens: per prompt.
        sampling: how tokens are chosen.
        drafting: decode speculatively; passes that verify drafts are recorded with what was accepted.
        predict: one of `PREDICTORS`, to record its ids beside the true ones.
        vectors_path: default vectors for that predictor; by default the file beside the model, and if there is none
            they are measured on the prompts' prefill and written beside the trace.
        estimator_path: trained estimator for `estimator` and `hybrid`; by default the file beside the model.
        progress: called with (prompts done, prompts in all).

    Returns:
        the trace, also written to `out`.

    Raises:
        ConfigError: unknown predictor.
        ModelError: a prompt does not fit the context, or the architecture cannot be captured.
        StudioError: the output folder cannot be written to.
    """
    if predict is not None and predict not in PREDICTORS:
        raise ConfigError(f"unknown predictor '{predict}'; choose one of: {', '.join(PREDICTORS)}")
    encoded = [loaded.encode(prompt, max_new_tokens) for prompt in prompts]
    sites = discover(loaded.model)
    shape = model_shape(loaded.model, sites, model_name(loaded.model))
    info = _info(loaded, shape, prompts, max_new_tokens, sampling, drafting, predict)
    with TraceWriter(out, info, {predict: shape.top_k} if predict else {}) as writer:
        predictor = None
        if predict is not None:
            vectors = _default_vectors(loaded, sites, shape, encoded, out, vectors_path)
            estimator = estimator_path or Path(loaded.path) / ESTIMATOR_FILE
            predictor = make_predictor(predict, sites, vectors, estimator)
        recorder = RoutingRecorder(loaded.model, sites, writer.append, predictor)
        with recorder, watch_drafts(loaded.model, [recorder.passes]):
            for number, ids in enumerate(encoded):
                recorder.begin_sequence(number)
                loaded.generate(ids, max_new_tokens, sampling, number, drafting)
                if progress is not None:
                    progress(number + 1, len(prompts))
        return writer.finish()


def measure_default_vectors(
    loaded: LoadedModel,
    sites: Sequence[MoeSite],
    shape: ModelShape,
    encoded: Sequence[torch.Tensor],
    progress: Progress | None = None,
) -> DefaultVectors:
    """Mean unweighted expert outputs, and means of what layers add beside them, over the prefill of encoded texts
    (each [1, T]).

    Source: Speculating Experts (arXiv 2603.19289), default vectors "aggregated offline during ordinary inference".
    """
    hidden = shape.hidden_size or 0
    vectors = DefaultVectors.empty(shape.num_moe_layers, shape.num_experts, hidden)
    remainder = Remainder(loaded.model, sites, hidden)
    with RoutingRecorder(loaded.model, sites, lambda rows: None, observer=vectors) as recorder, torch.no_grad():
        handles = remainder.attach()
        try:
            for number, ids in enumerate(encoded):
                recorder.begin_sequence(number)
                loaded.model(input_ids=ids, use_cache=False)
                if progress is not None:
                    progress(number + 1, len(encoded))
        finally:
            for handle in handles:
                handle.remove()
    vectors.beside = remainder.means()
    return vectors


def calibrate_model(
    loaded: LoadedModel,
    texts: Sequence[str],
    out: Path,
    *,
    window_tokens: int = 256,
    max_tokens: int = 65_536,
    progress: Progress | None = None,
) -> DefaultVectors:
    """Measure a model's default vectors on calibration texts and write them beside its weights.

    Args:
        loaded: an untouched model.
        texts: whatever the model is used on; some tens of thousands of tokens see nearly every expert.
        out: safetensors file with `vectors` [L, E, H] float16 and `counts` [L, E]; zero where never seen; and `beside`
            [L, H] where layers add something beside their routed experts.
        window_tokens: texts are cut into windows of this length.
        max_tokens: at most so many tokens are used.
        progress: called with (windows done, windows in all).

    Raises:
        ModelError: no text, or the architecture cannot be captured.
        StudioError: the file cannot be written.
    """
    make_folder(Path(out).parent)
    windows = [window for text in texts for window in loaded.windows(text, window_tokens)]
    windows = windows[: max(1, max_tokens // window_tokens)]
    if not windows:
        raise ModelError("no calibration text; give text files with --texts")
    sites = discover(loaded.model)
    shape = model_shape(loaded.model, sites, model_name(loaded.model))
    vectors = measure_default_vectors(loaded, sites, shape, windows, progress)
    tokens = sum(int(window.shape[1]) for window in windows)
    save_default_vectors(vectors, out, f"{tokens} tokens of calibration text, windows of {window_tokens}")
    return vectors


def _default_vectors(
    loaded: LoadedModel,
    sites: Sequence[MoeSite],
    shape: ModelShape,
    encoded: Sequence[torch.Tensor],
    out: Path,
    vectors_path: Path | None,
) -> LayerDefaults:
    beside_model = Path(loaded.path) / VECTORS_FILE
    path = vectors_path or (beside_model if beside_model.is_file() else None)
    if path is not None:
        return load_default_vectors(path)
    vectors = measure_default_vectors(loaded, sites, shape, encoded)
    save_default_vectors(vectors, vectors_beside(out), f"prefill of {len(encoded)} captured prompts")
    return load_default_vectors(vectors_beside(out))


def vectors_beside(trace: Path) -> Path:
    """Where a capture writes default vectors that it had to measure."""
    return Path(trace).with_suffix("." + VECTORS_FILE)


def _info(
    loaded: LoadedModel,
    shape: ModelShape,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Sampling,
    drafting: Drafting | None,
    predict: str | None,
) -> TraceInfo:
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "predict": predict or "",
    }
    return TraceInfo(
        shape=shape,
        source="capture",
        tokenizer=type(loaded.tokenizer).__name__,
        prompts_digest=prompts_digest(prompts),
        draft=drafting.settings if drafting else None,
        versions=software_versions("torch", "transformers"),
        options=options,
    )
