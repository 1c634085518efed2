"""An offloaded model is a Hugging Face model to lm-evaluation-harness, and scores what the untouched one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.models import LoadedModel, load_model
from runtime.offloading import offloaded
from simulator.policies.config import OffloadConfig, parse_config

QUESTIONS = [
    (
        "import os\nimport sys\n\ndef main(argv):\n    if not argv:\n        return",
        [" None", " banana", " Mr. Darcy"],
        0,
    ),
    ("for index in range(", ["10):", " whereas", " Elizabeth"], 0),
    ("It is a truth universally", [" acknowledged", " import", " self.assertEqual"], 0),
    ("class Stack:\n    def __init__(", ["the house", "self):", "very much"], 1),
    ("The hacker said that the machine", [" was", " ):", " {}"], 0),
    ("try:\n    value = int(text)\nexcept", [" she", " ValueError:", " Emma"], 1),
]
TASK = """
task: studio_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
  cache_dir: {cache}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a multiple-choice task and its questions."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"text": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "studio_choice.yaml").write_text(TASK.format(data=data, cache=folder / "cache"))
    return folder


def config(mode: str) -> OffloadConfig:
    prefetch = {"source": "quasi-hidden", "mode": mode}
    device = {"h2d_bytes_per_s": 1e12, "latency_ns": 0}
    return parse_config({"cache": {"budget_ratio": 0.5}, "prefetch": prefetch, "device": device})


def log_likelihoods(loaded: LoadedModel, tasks: Path) -> list[float]:
    """Of every choice of every question."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    harness = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=2)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    result: Any = simple_evaluate(
        model=harness, tasks=["studio_choice"], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    assert result["results"]["studio_choice"]["acc,none"] >= 0.5
    samples = sorted(result["samples"]["studio_choice"], key=lambda sample: int(sample["doc_id"]))
    return [float(choice[0]) for sample in samples for choice in sample["filtered_resps"]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
def test_the_harness_gives_an_offloaded_model_the_same_log_likelihoods(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[evaluation]'")
    demo = load_model("demo")
    exact = log_likelihoods(demo, tasks)
    assert len(exact) == 3 * len(QUESTIONS)
    for mode in ("hint", "verify"):
        with offloaded(demo.model, config(mode)) as engine:
            engine.speculate_in_prefill = True
            assert log_likelihoods(demo, tasks) == exact
        assert engine.core.decode_counters.prefetch_loads > 0
    with offloaded(demo.model, config("commit")) as engine:
        engine.speculate_in_prefill = True
        committed = log_likelihoods(demo, tasks)
    assert committed != exact
    assert committed == pytest.approx(exact, abs=6.0), "speculation changes scores, but not beyond recognition"
    assert log_likelihoods(demo, tasks) == exact, "unload leaves the model as it was"
