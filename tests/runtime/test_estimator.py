"""The estimator: its size, that it learns, that the hybrid takes the better of two, and that files and engine hold."""

from __future__ import annotations

import ast
import heapq
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from runtime.capture import capture
from runtime.default_vectors import load_default_vectors
from runtime.estimator import (
    PREDICTORS,
    EstimatorNetwork,
    EstimatorSizes,
    TrainedEstimator,
    facts_path,
    load_estimator,
    make_predictor,
)
from runtime.estimator_training import (
    TrainingSettings,
    checkpoint_path,
    choose_layers,
    measure_recall,
    split_windows,
    train_estimator,
)
from runtime.models import LoadedModel, load_model
from runtime.offloading import offloaded
from runtime.recall import Recall
from runtime.routing_reader import RoutingReader, router_distribution
from simulator.policies.config import parse_config
from simulator.policies.prefetch import make_prefetch_policy
from trace_capture.errors import ConfigError, ModelError
from trace_capture.hooks import RoutingRecorder, discover
from trace_capture.trace import NO_EXPERT

TEXTS = ["the night was dark and the road was long " * 40, "the road was dark and the night was long " * 40]
QUICK = TrainingSettings(steps=12, window_tokens=32, validation_every=4, checkpoint_every=5, warmup_steps=2)


def vectors(layers: int = 4) -> torch.Tensor:
    return torch.randn(layers, 8, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def quick(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedEstimator, Path]:
    out = tmp_path_factory.mktemp("estimator") / "estimator.safetensors"
    return train_estimator(loaded, TEXTS, vectors(), out, QUICK), out


@pytest.mark.parametrize(
    ("sizes", "millions"),
    [
        (EstimatorSizes(2048, 1024, 7, 128, 48), 16.96),
        (EstimatorSizes(2048, 1536, 3, 128, 48), 17.57),
        (EstimatorSizes(2880, 720, 2, 32, 24), 4.19),
        (EstimatorSizes(2880, 1440, 10, 128, 36), 45.9),
    ],
)
def test_sizes_follow_the_formula_behind_the_papers_17_4_and_45_million(sizes: EstimatorSizes, millions: float) -> None:
    assert sizes.num_parameters / 1e6 == pytest.approx(millions, abs=0.05)
    with torch.device("meta"):
        network = EstimatorNetwork(sizes)
    assert sum(parameter.numel() for parameter in network.parameters()) == sizes.num_parameters


def test_divergence_falls(quick: tuple[TrainedEstimator, Path]) -> None:
    training = quick[0].training
    assert training["kl_nats_last_tenth"] < 0.8 * training["kl_nats_first_tenth"]


def test_targets_are_the_routers_own_rule(any_model: torch.nn.Module) -> None:
    """The experts chosen are the likeliest of the target, unless the router limits its choice to groups."""
    sites = discover(any_model)
    device = next(any_model.parameters()).device
    for site in sites:
        hidden = torch.randn(24, 64, generator=torch.Generator().manual_seed(3)).to(device)
        hidden = hidden if site.router_rank == 2 else hidden.unsqueeze(0)
        with torch.no_grad():
            first, weights, ids = (x.reshape(24, -1) for x in site.router(hidden, *site.router_extra))
            target = router_distribution(site, first, weights, ids)
        assert torch.allclose(target.sum(dim=-1), torch.ones(24, device=device))
        chosen = target.gather(-1, ids)
        assert torch.allclose(chosen / chosen.sum(-1, keepdim=True), weights / weights.sum(-1, keepdim=True), atol=1e-4)
        if any_model.config.model_type != "glm4_moe":
            assert torch.equal(target.topk(2, dim=-1).indices.sort().values, ids.sort().values)


def test_a_resumed_training_equals_an_uninterrupted_one(
    loaded: LoadedModel, quick: tuple[TrainedEstimator, Path], tmp_path: Path
) -> None:
    out = tmp_path / "estimator.safetensors"

    def stop(step: int, steps: int) -> None:
        if step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_estimator(loaded, TEXTS, vectors(), out, QUICK, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_path(out).name]
    other = TrainingSettings(**{**vars(QUICK), "seed": 5})
    with pytest.raises(ConfigError, match="different: seed"):
        train_estimator(loaded, TEXTS, vectors(), out, other, resume=True)
    seen: list[int] = []
    train_estimator(loaded, TEXTS, vectors(), out, QUICK, resume=True, progress=lambda step, _: seen.append(step))
    assert seen == list(range(6, 13)), "it went on behind the checkpoint of step 5"
    assert out.read_bytes() == quick[1].read_bytes()
    assert not checkpoint_path(out).exists()
    with pytest.raises(ModelError, match="without --resume"):
        train_estimator(loaded, TEXTS, vectors(), out, QUICK, resume=True)


def test_windows_that_do_not_fit_in_memory_are_run_again_with_equal_bits(
    loaded: LoadedModel, quick: tuple[TrainedEstimator, Path], tmp_path: Path
) -> None:
    settings = TrainingSettings(**{**vars(QUICK), "cache_bytes": 0})
    uncached = train_estimator(loaded, TEXTS, vectors(), tmp_path / "e.safetensors", settings)
    for name, value in quick[0].network.state_dict().items():
        assert torch.equal(value, uncached.network.state_dict()[name])


def test_files_give_back_what_was_saved(quick: tuple[TrainedEstimator, Path], tmp_path: Path) -> None:
    trained, path = quick
    read = load_estimator(path)
    assert read.facts() == json.loads(json.dumps(trained.facts()))
    assert json.loads(facts_path(path).read_text())["layer_map"] == list(trained.layer_map)
    states = torch.randn(3, 64)
    assert torch.equal(read.network(states, torch.tensor(1)), trained.network(states, torch.tensor(1)))
    (tmp_path / "noise.safetensors").write_bytes(b"noise" * 9)
    for bad in (tmp_path / "none.safetensors", tmp_path / "noise.safetensors"):
        with pytest.raises(ModelError, match="train-estimator"):
            load_estimator(bad)


def test_mistakes_are_named(loaded: LoadedModel, quick: tuple[TrainedEstimator, Path], tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="trained for"):
        make_predictor("hybrid", discover(tiny("mixtral", num_hidden_layers=3)), vectors(3), quick[1])
    with pytest.raises(ConfigError, match="crystal-ball"):
        make_predictor("crystal-ball", discover(loaded.model), vectors(), quick[1])
    with pytest.raises(ModelError, match="give more text"):
        train_estimator(loaded, ["the night"], vectors(), tmp_path / "e.safetensors", QUICK)
    with pytest.raises(ConfigError, match="at least 1"):
        TrainingSettings(steps=0)


def test_a_layer_goes_to_the_estimator_where_it_wins_by_the_margin() -> None:
    router, estimator = (0.0, 0.5, 0.8, 0.6), (0.0, 0.7, 0.8, 0.65)
    assert choose_layers(router, estimator, 0.0) == ("none", "estimator", "router", "estimator")
    assert choose_layers(router, estimator, 0.1) == ("none", "estimator", "router", "router")


@pytest.mark.parametrize("name", ["estimator", "hybrid"])
def test_an_offloaded_model_stays_exact_and_names_what_it_foresaw(
    loaded: LoadedModel, quick: tuple[TrainedEstimator, Path], tmp_path: Path, name: str
) -> None:
    assert make_prefetch_policy(name).prediction == name
    ids = loaded.encode("the night was dark", 16)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    with torch.no_grad():
        expected = loaded.model.generate(ids, **options)
        config = parse_config({"cache": {"budget_ratio": 0.5}, "prefetch": {"source": name}})
        with offloaded(loaded.model, config, default_vectors=vectors(), estimator=quick[1]) as engine:
            assert torch.equal(loaded.model.generate(ids, **options), expected)
            assert engine.recall[1].tokens > 0
            assert engine.core.decode_counters.prefetch_loads > 0
    trace = capture(loaded, ["the night"], tmp_path / "t.parquet", 6, predict=name, estimator_path=quick[1])
    assert (trace.predictions(name)[:, 1:] != NO_EXPERT).all()
    with pytest.raises(ModelError, match="train-estimator"):
        capture(loaded, ["the night"], tmp_path / "u.parquet", 6, predict=name)


def test_weights_of_a_prediction_sum_to_those_of_the_router(
    loaded: LoadedModel, quick: tuple[TrainedEstimator, Path]
) -> None:
    sites = discover(loaded.model)
    predictor = make_predictor("estimator", sites, vectors(), quick[0])
    found: list[torch.Tensor] = []
    handles = predictor.attach()
    hook = sites[0].router.register_forward_hook(
        lambda _, __, output: found.append(predictor.predict(0, output[2], output[1])[1])
    )
    loaded.model(input_ids=torch.arange(3, 20)[None])
    for handle in (*handles, hook):
        handle.remove()
    assert torch.allclose(found[0].sum(dim=-1), torch.full((17,), quick[0].weight_sums[1]), atol=1e-5)


def recall_by_layer(loaded: LoadedModel, predictor, windows: Sequence[torch.Tensor]) -> list[float]:
    """Share of routed experts that a live predictor names, for layers 1..L-1."""
    sites = discover(loaded.model)
    recall = [Recall() for _ in sites]

    def sink(rows) -> None:
        guess = rows[f"predicted:{predictor.name}"]
        for layer in range(1, len(sites)):
            recall[layer].add(guess[:, layer].tolist(), rows["experts"][:, layer].tolist())

    with RoutingRecorder(loaded.model, sites, sink, predictor) as recorder, torch.no_grad():
        for number, window in enumerate(windows):
            recorder.begin_sequence(number)
            loaded.model(input_ids=window, use_cache=False)
    return [one.slot_ratio for one in recall[1:]]


@pytest.mark.slow
def test_on_the_demo_model_it_beats_the_router_where_that_drifts_and_hybrid_is_never_worse(tmp_path: Path) -> None:
    demo = load_model("demo")
    default_vectors = load_default_vectors(Path(demo.path) / "default_vectors.safetensors")
    texts = [Path(module.__file__ or "").read_text()[:60_000] for module in (ast, json.decoder, textwrap)]
    settings = TrainingSettings(steps=250, validation_every=6)
    path = tmp_path / "estimator.safetensors"
    trained = train_estimator(demo, texts, default_vectors, path, settings)
    windows = [window for text in texts for window in demo.windows(text, settings.window_tokens)]
    kept = [windows[number] for number in split_windows(windows, settings.validation_every, settings.seed)[1]]
    sites = discover(demo.model)
    router, estimator, hybrid = (
        recall_by_layer(demo, make_predictor(name, sites, default_vectors, path), kept) for name in PREDICTORS
    )
    assert all(mix >= max(pair) - 1e-9 for mix, *pair in zip(hybrid, router, estimator, strict=True))
    assert hybrid == pytest.approx(list(trained.recall["hybrid"])[1:], abs=1e-6)
    unseen = demo.windows(Path(heapq.__file__).read_text(), settings.window_tokens)
    with RoutingReader(demo.model, sites, default_vectors) as reader:
        scores = measure_recall(reader, unseen, range(len(unseen)), load_estimator(path).network)
    assert trained.layer_map[1] == "estimator"
    assert scores.estimator[1] > scores.router[1] + 0.02


def test_the_shipped_estimator_fits_the_demo_model_and_takes_the_drifting_layers() -> None:
    demo = load_model("demo")
    path = Path(demo.path) / "estimator.safetensors"
    assert path.stat().st_size < 500_000
    trained = load_estimator(path)
    assert json.loads(facts_path(path).read_text()) == trained.facts()
    assert trained.layer_map[:4] == ("none", "estimator", "estimator", "router")
    recall = trained.recall
    both = zip(recall["router"], recall["estimator"], recall["hybrid"], strict=True)
    assert all(hybrid >= max(router, estimator) for router, estimator, hybrid in both)
    config = parse_config({"cache": {"budget_ratio": 0.5}, "prefetch": {"source": "hybrid"}})
    with offloaded(demo.model, config) as engine, torch.no_grad():
        demo.model.generate(torch.arange(5, 25)[None], max_new_tokens=8, do_sample=False)
    assert engine.recall[1].tokens == 7


def test_the_verb_trains_reports_and_refuses(model_folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from runtime.cli import traces  # noqa: F401 - registers the verb
    from runtime.cli.app import app
    from runtime.default_vectors import DefaultVectors, save_default_vectors

    save_default_vectors(DefaultVectors.empty(4, 8, 64), tmp_path / "v.safetensors", "none: zeros")
    (tmp_path / "texts.txt").write_text("the road was dark and the night was long " * 60)
    arguments = ["train-estimator", "--model", str(model_folder), "--texts", str(tmp_path / "texts.txt")]
    arguments += [
        "--steps",
        "3",
        "--vectors",
        str(tmp_path / "v.safetensors"),
        "--out",
        str(tmp_path / "e.safetensors"),
    ]
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    facts = json.loads(result.stdout)
    assert facts["layer_map"] == list(load_estimator(tmp_path / "e.safetensors").layer_map)
    assert "recall on validation text" in CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    with pytest.raises(ModelError, match="without --resume"):
        CliRunner().invoke(app, [*arguments, "--resume"], catch_exceptions=False)
