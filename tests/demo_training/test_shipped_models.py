"""The models in `traces/` load with the stock classes, have learnt, route as trained models do, match their cards."""

import re
import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.demo_training.corpus import HELD_OUT_MODULES
from runtime.demo_training.export import load_weights
from runtime.demo_training.network import logits
from trace_capture.files import file_digest
from trace_capture.samples import sample_folder

TARGET, DRAFT = sample_folder() / "demo_model", sample_folder() / "demo_draft_model"
PROMPTS = sample_folder() / "demo_prompts.txt"
MODULES = ("heapq.py", "shlex.py", "textwrap.py")
CONTEXT = 256

pytestmark = pytest.mark.skipif(not TARGET.is_dir(), reason="the demo model is not in this checkout")


def _load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def target():
    return _load(TARGET)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def windows(tokenizer):
    """Token windows [W, CONTEXT] of library modules that were held out of training."""
    assert set(MODULES) <= HELD_OUT_MODULES
    root = Path(sysconfig.get_path("stdlib"))
    rows = []
    for name in MODULES:
        ids = tokenizer((root / name).read_text(encoding="utf-8")).input_ids
        rows += [ids[start : start + CONTEXT] for start in range(0, min(len(ids), 1800) - CONTEXT, CONTEXT)]
    return torch.tensor(rows)


def _loss(model, windows):
    with torch.no_grad():
        scores = model(windows[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].reshape(-1)))


def test_target_has_learnt_code_it_has_not_seen(target, windows):
    fresh = type(target)(target.config).eval()
    trained, untrained = _loss(target, windows), _loss(fresh, windows)
    assert trained < 3.6, "3.40 when the weights were made; experts that are not loaded cost far more"
    assert untrained > trained + 4.0


def test_stock_model_equals_training_network(target, windows):
    weights, shape = load_weights(TARGET)
    with torch.no_grad():
        expected = target(windows[:2]).logits
    assert (logits(weights, windows[:2], shape) - expected).abs().max() < 1e-3


def test_draft_shares_the_vocabulary_and_has_learnt(windows):
    assert (DRAFT / "tokenizer.json").read_bytes() == (TARGET / "tokenizer.json").read_bytes()
    assert _loss(_load(DRAFT), windows) < 4.5, "4.31 when the weights were made"


@pytest.mark.parametrize(("folder", "limit_bytes"), [(TARGET, 25_000_000), (DRAFT, 2_500_000)])
def test_weights_are_small_and_half_precision(folder, limit_bytes):
    assert (folder / "model.safetensors").stat().st_size < limit_bytes
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.parametrize("folder", [TARGET, DRAFT])
def test_card_names_the_files_that_are_there(folder):
    card = (folder / "README.md").read_text(encoding="utf-8")
    digests = dict(re.findall(r"- `([\w.]+)` (sha256:\w+)", card))
    assert "model.safetensors" in digests
    for name, digest in digests.items():
        assert file_digest(folder / name) == digest, name


def _router_inputs(model, windows):
    """Input of each layer's router [L][T, H]."""
    seen = []
    routers = [layer.mlp.gate for layer in model.model.layers]
    handles = [
        router.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2))) for router in routers
    ]
    with torch.no_grad():
        model(windows)
    for handle in handles:
        handle.remove()
    return routers, seen


def _chosen(router, states, top_k=4):
    return (states @ router.weight.t()).topk(top_k, dim=-1).indices


def test_routing_is_that_of_a_trained_model(target, windows):
    routers, inputs = _router_inputs(target, windows)
    hits = []
    for layer, router in enumerate(routers):
        chosen = _chosen(router, inputs[layer])
        assert chosen.unique().numel() >= 20, f"layer {layer} hardly uses its experts"
        if layer:
            early = _chosen(router, inputs[layer - 1])
            hits.append(float((chosen[:, :, None] == early[:, None, :]).any(-1).float().mean()))
    assert min(hits) == hits[0], "the first step is the hardest to foresee"
    assert 0.75 < sum(hits) / len(hits) < 0.95


def test_default_generation_samples_and_does_not_loop(target, tokenizer):
    torch.manual_seed(5)
    ids = tokenizer("The default value of this argument is", return_tensors="pt")
    output = target.generate(**ids, max_new_tokens=60)[0, ids.input_ids.shape[1] :].tolist()
    assert target.generation_config.do_sample
    assert len(set(output)) > len(output) // 3


def test_prompts_are_short_and_many(tokenizer):
    prompts = PROMPTS.read_text(encoding="utf-8").splitlines()
    assert len(prompts) == len(set(prompts)) == 24
    for prompt in prompts:
        assert 20 <= len(tokenizer(prompt).input_ids) <= 60, prompt
