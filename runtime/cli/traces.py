"""Verbs that make traces and look into them: capture, inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.cli.app import (
    Json,
    Out,
    app,
    assignments,
    needs_live,
    progress_bar,
    quiet_threads,
    say,
    say_json,
    say_next,
)
from runtime.cli.capture_options import (
    ApiKeyEnv,
    Chat,
    Retries,
    ServedModel,
    Server,
    TimeoutS,
    capture_served,
    refuse_local_options,
)
from runtime.cli.draft_options import DEFAULT_ACCEPTANCE, Acceptance, Drafts
from runtime.cli.foresight import foresight, save_figure, say_foresight
from runtime.cli.worth import say_worth, worth

if TYPE_CHECKING:
    from trace_capture.trace import Trace

Texts = Annotated[list[str], typer.Option("--text", help="A prompt; may be given several times.")]
PromptFile = Annotated[Path | None, typer.Option("--prompts", help="Text file with one prompt per line.")]
Model = Annotated[str, typer.Option("--model", help="Model folder, hub id, or 'demo'.")]
CapturedModel = Annotated[
    str | None,
    typer.Option("--model", help="Model folder, hub id, or 'demo' (the default); with --server the shape it serves."),
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to generate per prompt.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Equal seeds give equal texts.")]
Vectors = Annotated[Path | None, typer.Option("--vectors", help="Default vectors (safetensors) of the model.")]
Draft = Annotated[
    str | None,
    typer.Option("--draft", help="Decode speculatively: a draft model, 'demo', or 'prompt-lookup' (n-grams)."),
]
Gamma = Annotated[int, typer.Option("--gamma", min=1, help="Tokens drafted per round.")]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream", help="Leave experts in the checkpoint's files; by default where RAM would not do."
    ),
]
Estimator = Annotated[Path | None, typer.Option("--estimator", help="Trained estimator (safetensors) of the model.")]


@app.command("capture")
def capture_command(
    out: Out,
    model: CapturedModel = None,
    prompts: PromptFile = None,
    text: Texts = [],  # noqa: B006 - typer reads it once
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.8,
    seed: Seed = 0,
    draft: Draft = None,
    gamma: Gamma = 8,
    predict: Annotated[
        str | None, typer.Option(help="Record this predictor too: quasi-hidden, estimator or hybrid.")
    ] = None,
    vectors: Vectors = None,
    estimator: Estimator = None,
    server: Server = None,
    served_model: ServedModel = None,
    chat: Chat = False,
    api_key_env: ApiKeyEnv = None,
    timeout_s: TimeoutS = 600.0,
    retries: Retries = 4,
    as_json: Json = False,
) -> None:
    """Record where a live model routes its tokens while it continues some prompts: a model loaded here, or one on a
    vLLM or SGLang server that was started with --enable-return-routed-experts.

    Example: moe-studio capture --model demo --text "It was a dark night" --predict quasi-hidden --out t.parquet

    Example: moe-studio capture --server http://127.0.0.1:8000 --model qwen3-30b-a3b --prompts p.txt --out t.parquet
    """
    if server is not None:
        refuse_local_options({"--draft": draft, "--predict": predict, "--vectors": vectors, "--estimator": estimator})
        asked = max_new_tokens, temperature, seed, served_model, chat
        capture_served(server, model, out, prompts, text, asked, api_key_env, timeout_s, retries, as_json)
        return
    with needs_live():
        from runtime.capture import capture
        from runtime.models import Sampling, load_model, read_prompts
        from runtime.speculative import load_drafting
    quiet_threads()
    texts = read_prompts(prompts, text)
    with progress_bar(not as_json) as step:
        loaded = load_model(model or "demo")
        trace = capture(
            loaded,
            texts,
            out,
            max_new_tokens,
            sampling=Sampling(temperature, seed),
            drafting=load_drafting(draft, gamma, loaded),
            predict=predict,
            vectors_path=vectors,
            estimator_path=estimator,
            progress=step("capture"),
        )
    report_trace(trace, out, as_json)


@app.command("calibrate-model")
def calibrate_model_command(
    texts: Annotated[list[Path], typer.Option("--texts", help="Text file; a form feed separates texts. Repeatable.")],
    out: Annotated[Path | None, typer.Option("--out", help="File; by default beside the model's weights.")] = None,
    model: Model = "demo",
    max_tokens: Annotated[int, typer.Option(min=256, help="Tokens to use at most.")] = 65_536,
    as_json: Json = False,
) -> None:
    """Measure a model's default vectors, the mean output of every expert, on calibration texts.

    Example: moe-studio calibrate-model --model MODEL --texts notes.txt
    """
    with needs_live():
        from runtime.capture import calibrate_model
        from runtime.default_vectors import VECTORS_FILE
        from runtime.models import load_model, read_texts
    quiet_threads()
    pieces = read_texts(texts)
    with progress_bar(not as_json) as step:
        loaded = load_model(model)
        place = out or Path(loaded.path) / VECTORS_FILE
        vectors = calibrate_model(loaded, pieces, place, max_tokens=max_tokens, progress=step("calibrate-model"))
    unseen, pairs = int((vectors.counts == 0).sum()), vectors.counts.numel()
    if as_json:
        say_json({"path": str(place), "pairs": pairs, "unseen_pairs": unseen, "tokens": int(vectors.counts[0].sum())})
        return
    say(f"{place}: default vectors of {pairs} (layer, expert) pairs, {unseen} never seen and left zero")
    say_next(f"moe-studio capture --model {model} --predict quasi-hidden --text 'your prompt' --out t.parquet")


@app.command("train-estimator")
def train_estimator_command(
    texts: Annotated[list[Path], typer.Option("--texts", help="Text file; a form feed separates texts. Repeatable.")],
    out: Annotated[Path | None, typer.Option("--out", help="File; by default beside the model's weights.")] = None,
    model: Model = "demo",
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 2000,
    vectors: Vectors = None,
    margin: Annotated[float, typer.Option(min=0, help="Recall by which it must beat the router on a layer.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal estimators.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint of a stopped training.")] = False,
    as_json: Json = False,
) -> None:
    """Train a small network that foresees the next layer's experts where the router drifts.

    Example: moe-studio train-estimator --model MODEL --texts notes.txt --steps 2000
    """
    with needs_live():
        from runtime.default_vectors import VECTORS_FILE, load_default_vectors
        from runtime.estimator import ESTIMATOR_FILE
        from runtime.estimator_training import TrainingSettings, train_estimator
        from runtime.models import load_model, read_texts
    quiet_threads()
    settings = TrainingSettings(steps=steps, margin=margin, seed=seed, warmup_steps=min(20, steps))
    pieces = read_texts(texts)
    with progress_bar(not as_json) as step:
        loaded = load_model(model)
        place = out or Path(loaded.path) / ESTIMATOR_FILE
        default_vectors = load_default_vectors(vectors or Path(loaded.path) / VECTORS_FILE)
        report = step("train-estimator")
        trained = train_estimator(loaded, pieces, default_vectors, place, settings, resume=resume, progress=report)
    facts = trained.facts() | {"path": str(place)}
    if as_json:
        say_json(facts)
        return
    _report_estimator(facts)
    say_next(f"moe-studio capture --model {model} --predict hybrid --text 'your prompt' --out t.parquet")


@app.command("inspect")
def inspect_command(
    trace: Annotated[Path, typer.Argument(help="A trace, or the .partial file of a capture that did not end.")],
    recover: Annotated[Path | None, typer.Option(help="Write what was complete to this Parquet file.")] = None,
    information: Annotated[
        bool, typer.Option("--information", help="Also what speculative counts tell, and foresee of hot experts.")
    ] = False,
    figure: Annotated[Path | None, typer.Option(help="Write that as a figure (HTML).")] = None,
    drafts: Drafts = None,
    acceptance: Acceptance = DEFAULT_ACCEPTANCE,
    worth_it: Annotated[
        bool, typer.Option("--worth", help="Also whether cache, prefetch, CPU experts or drafts would help.")
    ] = False,
    settings: Annotated[
        list[str], typer.Option("--set", help="With --worth: the machine, as for whatif, such as gpu=rtx3060.")
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Check a trace and say what is in it, and what would help this model.

    Example: moe-studio inspect t.parquet --worth --set gpu=rtx3060 --set host=ddr4-3600-2ch
    """
    from trace_capture.trace import Trace

    loaded = Trace.load(trace)
    if recover is not None:
        loaded.save(recover)
    more = foresight(loaded, drafts, acceptance) if information or figure else {}
    if figure is not None:
        save_figure(more, loaded.shape.name, figure)
    if worth_it:
        more |= worth(loaded, assignments(settings, "--set"), not as_json)
    report_trace(loaded, recover or trace, as_json, more)


def summary(trace: Trace) -> dict[str, Any]:
    """What `inspect` says about a trace."""
    from trace_capture.statistics import consecutive_overlap, expert_load, load_entropy_ratio, predictor_recall
    from trace_capture.trace import Phase

    def mean(values: Any) -> float | None:
        import numpy as np

        kept = np.asarray(values, dtype=float)
        kept = kept[np.isfinite(kept)]
        return round(float(kept.mean()), 4) if kept.size else None

    shape = trace.shape
    phases = {phase.name.lower(): int((trace.phase == phase).sum()) for phase in Phase}
    return {
        "model": shape.name,
        "architecture": shape.architecture,
        "source": trace.info.source,
        "complete": trace.info.complete,
        "moe_layers": shape.num_moe_layers,
        "experts": shape.num_experts,
        "top_k": shape.top_k,
        "expert_bytes": list(shape.expert_bytes),
        "total_expert_bytes": shape.total_expert_bytes,
        "sequences": len(trace.sequences()),
        "passes": len(trace.passes),
        "tokens": trace.num_tokens,
        "tokens_by_phase": phases,
        "previous_token_overlap": mean(consecutive_overlap(trace)),
        "load_entropy_ratio": mean(load_entropy_ratio(expert_load(trace))),
        "predictor_recall": {name: mean(recall) for name, recall in predictor_recall(trace).items()},
        "notes": list(trace.info.options.get("notes", [])),
        "digest": trace.digest,
    }


def _report_estimator(facts: dict[str, Any]) -> None:
    training, recall = facts["training"], facts["recall"]
    say(f"{facts['path']}: estimator of {facts['parameters']:,} parameters for {facts['model']}")
    first, last = training["kl_nats_first_tenth"], training["kl_nats_last_tenth"]
    held_out = training["kl_nats_validation"]
    say(f"  KL divergence {first:.3f} nats at first, {last:.3f} at last, {held_out:.3f} on validation text")
    say("  recall on validation text")
    say("  layer   router  estimator  taken")
    for layer, taken in list(enumerate(facts["layer_map"]))[1:]:
        router, estimator = recall["router"][layer], recall["estimator"][layer]
        say(f"  {layer:5d} {100 * router:6.1f} %   {100 * estimator:6.1f} %  {taken}")


def report_trace(trace: Trace, path: Path, as_json: bool, more: dict[str, Any] | None = None) -> None:
    """Say what is in a trace that was just written or read."""
    more = more or {}
    facts = summary(trace) | {"path": str(path)} | more
    if as_json:
        say_json(facts)
        return
    say(f"{path}: {facts['model']} ({facts['architecture']}), {facts['source']}")
    say(
        f"  {facts['moe_layers']} MoE layers x {facts['experts']} experts, top-{facts['top_k']}, "
        f"{facts['total_expert_bytes'] / 1e6:,.1f} MB of experts"
    )
    phases = ", ".join(f"{count} {phase}" for phase, count in facts["tokens_by_phase"].items() if count)
    say(f"  {facts['sequences']} sequences, {facts['passes']} passes, {facts['tokens']} tokens ({phases})")
    say(f"  shared with the previous token: {_percent(facts['previous_token_overlap'])} of top-{facts['top_k']}")
    say(f"  load entropy: {_percent(facts['load_entropy_ratio'])} of even")
    for name, recall in facts["predictor_recall"].items():
        say(f"  predictor {name}: recall {_percent(recall)}")
    for note in facts["notes"]:
        say(f"  note: {note}")
    if "information" in more:
        say_foresight(more)
    if "verdicts" in more:
        say_worth(more)
    if not facts["complete"]:
        say("  recovered from a capture that did not end; keep what it holds with:")
        say(f"  moe-studio inspect {path} --recover NEW.parquet")
    say_next(f"moe-studio simulate {path} --strategy lru --budget-ratio 0.5")


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"
