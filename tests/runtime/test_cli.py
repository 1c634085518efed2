"""The command line: mistakes end in one clear line and exit code 2, results are JSON on request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from runtime.capture import capture
from runtime.cli import register_verbs
from runtime.cli.app import app
from runtime.models import LoadedModel
from simulator import compiled
from tests.simulator.builders import make_shape
from tests.studio import assert_refused, studio
from trace_capture.synthetic import synthetic_trace

register_verbs()
VERBS = sorted(command.name or "" for command in app.registered_commands)


def in_a_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """As a shell would: with an interpreter of its own."""
    start = [sys.executable, "-c", "from runtime.cli import main; main()"]
    root = Path(__file__).parents[2]
    return subprocess.run([*start, *map(str, arguments)], capture_output=True, text=True, timeout=600, cwd=root)


@pytest.fixture(scope="module")
def trace(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "t.parquet"
    capture(loaded, ["the night was dark"] * 3, out, 8, predict="quasi-hidden")
    return out


def test_every_verb_is_listed_and_has_help_with_an_example() -> None:
    listing = studio("--help").stdout
    assert len(VERBS) >= 12
    for verb in VERBS:
        assert verb in listing
        assert f"Example: moe-studio {verb}" in " ".join(studio(verb, "--help").stdout.split())


def test_help_needs_no_heavy_import() -> None:
    code = "import sys; sys.argv = ['moe-studio', 'simulate', '--help']\n"
    code += "from runtime.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
    code += "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'plotly', 'dash', 'pulp', 'simpy', 'scipy'}\n"
    code += "print(sorted(heavy & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.stdout.strip().splitlines()[-1] == "[]"


def test_simulate_prints_what_others_rely_on(trace: Path) -> None:
    result = studio("simulate", trace, "--strategy", "lru", "--scope", "layer", "--budget-ratio", "0.5", "--json")
    found = json.loads(result.stdout)
    assert {"hit_rate", "tpot_ms", "tpot_terms_ms", "bytes_loaded", "loads"} <= found.keys()
    assert sum(found["tpot_terms_ms"].values()) == pytest.approx(found["tpot_ms"])
    assert found["hit_rate"] == pytest.approx(found["hits"] / found["lookups"])


def test_capture_simulate_tune_run_is_one_chain(model_folder: Path, trace: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned.toml"
    result = studio("tune", trace, "--budget-ratio", "0.5", "--out", tuned, "--json")
    assert result.returncode == 0, result.stderr
    promised = json.loads(result.stdout)["held_out"]["tpot_ms"]
    vectors = trace.with_suffix(".default_vectors.safetensors")
    arguments = ["--model", model_folder, "--config", tuned, "--prompt", "the night", "--max-new-tokens", "6"]
    result = studio("run", *arguments, "--vectors", vectors, "--out", tmp_path / "runs", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["predicted_tpot_ms"] == promised
    assert 0 < found["routing"]["popularity"] and 0 <= found["routing"]["overlap"] <= 1
    assert found["kind"] == "measured"
    assert len(found["texts"]) == 1
    record = tmp_path / "runs" / "measured.run.json"
    assert studio("compare", record, record, "--json").returncode == 0
    shown = in_a_process("run", *arguments, "--vectors", vectors).stdout
    assert "predicted" in shown
    assert "emulated link" in shown
    assert "routing of these prompts is" in shown
    again = ["--from-run", record, "--budget-ratio", "0.5", "--out", tmp_path / "again.toml", "--json"]
    assert_refused(studio("tune", trace, *again), "--from-run", "emulated link")


def test_cpu_options_reach_simulation_and_engine(trace: Path, model_folder: Path, tmp_path: Path) -> None:
    placed = ["--cpu-layers", "1", "--cpu-experts", "threshold:3"]
    found = json.loads(studio("simulate", trace, *placed, "--json").stdout)
    assert found["cpu_runs"] > 0 and found["tpot_terms_ms"]["cpu_experts"] > 0
    assert found["label"] == "lru/layer + CPU: 1 layer and misses of up to 3 tokens"
    arguments = ["run", "--model", model_folder, "--text", "the night", "--max-new-tokens", "6", "--json"]
    runs = [json.loads(studio(*arguments, *flags).stdout) for flags in ([], ["--cpu-experts", "misses"])]
    assert runs[0]["texts"] == runs[1]["texts"]
    assert runs[0]["cpu_runs"] == 0 < runs[1]["cpu_runs"]
    times = [
        json.loads(studio("simulate", trace, *placed, "--cpu-threads", count, "--json").stdout)["tpot_ms"]
        for count in (1, 4)
    ]
    assert times[0] > times[1] > 0, "a data sheet's host: four cores work through more than one"
    assert_refused(studio("simulate", trace, *placed, "--cpu-threads", "999"), "cpu.threads is 999", "cores")
    assert_refused(studio("simulate", trace, "--cpu-threads", "2"), "no expert runs on the CPU")
    assert_refused(studio(*arguments, *placed, "--cpu-threads", "999"), "cpu.threads is 999 and this machine has")
    assert_refused(studio("simulate", trace, "--cpu-layers", "few"), "--cpu-layers", "a number of layers, or 'all'")
    assert_refused(studio("simulate", trace, "--cpu-experts", "mises"), "did you mean 'misses'")
    assert_refused(studio("simulate", trace, "--ablate", "cpu"), "no such part")
    assert_refused(studio("run", "--ablate", "drafts"), "nothing is drafted")


def test_run_from_streamed_experts_writes_the_same_text(model_folder: Path) -> None:
    arguments = ["run", "--model", model_folder, "--text", "the night", "--max-new-tokens", "6", "--json"]
    texts = [json.loads(studio(*arguments, flag).stdout)["texts"] for flag in ("--stream", "--no-stream")]
    assert texts[0] == texts[1]


def test_truncated_edited_and_foreign_traces(trace: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(trace.read_bytes()[:-200])
    assert_refused(in_a_process("inspect", cut), "cut.parquet")
    table = pq.read_table(trace)
    other = table.replace_schema_metadata(
        {
            key: value.replace(b'"schema_version":1', b'"schema_version":9')
            for key, value in table.schema.metadata.items()
        }
    )
    pq.write_table(other, tmp_path / "version.parquet")
    assert_refused(studio("simulate", tmp_path / "version.parquet"), "schema version 9")
    wrong = table.set_column(0, "sequence", table.column("position"))
    pq.write_table(wrong, tmp_path / "edited.parquet")
    assert_refused(studio("inspect", tmp_path / "edited.parquet"), "edited.parquet", "row")
    assert_refused(studio("inspect", tmp_path / "absent.parquet"), "moe-studio capture")


def test_unknown_names_offer_the_nearest(trace: Path) -> None:
    assert_refused(studio("simulate", trace, "--strategy", "lruu"), "did you mean 'lru'")
    assert_refused(studio("simulate", trace, "--prefetch", "oracel"), "did you mean 'oracle'")
    assert_refused(studio("simulate", trace, "--hardware", "rtx9999"), "rtx4090-pcie4x16")
    assert_refused(studio("simulate", trace, "--scope", "galaxy"), "scope")


def test_a_budget_below_top_k_names_the_smallest_that_would_do(trace: Path, tmp_path: Path) -> None:
    assert_refused(studio("simulate", trace, "--budget-mib", "0.01"), "top-2", "at least")
    out = tmp_path / "tuned.toml"
    assert_refused(studio("tune", trace, "--budget-mib", "0.01", "--out", out), "at least")
    assert not out.exists()


def test_missing_models_long_prompts_and_damaged_configs(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    assert_refused(studio("capture", "--model", tmp_path / "nowhere", "--text", "a", "--out", out), "config.json")
    long = "dark " * 200
    arguments = ["--model", model_folder, "--text", long, "--out", out]
    assert_refused(studio("capture", *arguments), "context of 128")
    assert_refused(studio("capture", "--model", model_folder, "--out", out), "no prompt given")
    (tmp_path / "c.toml").write_text("schema_version = 1\n[cache]\npolicy = 'lru'\nbudget_ration = 0.5\n")
    assert_refused(studio("run", "--model", model_folder, "--text", "a", "--config", tmp_path / "c.toml"), "c.toml")
    assert list(tmp_path.glob("t.parquet*")) == []


def test_an_unwritable_output_folder_is_refused(trace: Path, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "out"
    assert_refused(studio("simulate", trace, "--out", inside), "cannot write")
    assert_refused(studio("demo", "--out", inside), "cannot write")
    arguments = ["--model", model_folder, "--text", "a", "--max-new-tokens", "2"]
    assert_refused(studio("capture", *arguments, "--out", inside / "t.parquet"), "cannot write")
    assert (tmp_path / "file").read_text() == ""


def test_doctor_is_content_in_a_clean_environment() -> None:
    result = in_a_process("doctor", "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["name_collisions"] == {}
    assert facts["hot_modules"]["state"] == compiled.status().state
    assert (facts["hot_modules"]["mend"] == "") == bool(facts["hot_modules"]["modules"])


def test_doctor_says_why_the_hot_modules_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "0")
    result = in_a_process("doctor")
    assert "interpreted, which is slower: MOE_STUDIO_COMPILED=0 is set; unset MOE_STUDIO_COMPILED" in result.stdout


def test_what_drafts_would_tell_and_cost_is_told_for_a_decoded_trace(tmp_path: Path) -> None:
    shape = make_shape(layers=2, experts=16, top_k=2)
    path, page = tmp_path / "t.parquet", tmp_path / "page.html"
    synthetic_trace(shape, 2, 2, 40, reuse_ratio=0.4, skew=1.0, predictor_recall=0.5, seed=0).save(path)
    facts = json.loads(studio("inspect", path, "--information", "--drafts", 4, "--figure", page, "--json").stdout)
    assert [row["gamma"] for row in facts["information"]] == list(range(9))
    assert facts["forecast"]["gamma"] == 4 and set(facts["forecast"]["by_hot_frequency"]) == {"1", "2", "3"}
    assert "this trace" in page.read_text(encoding="utf-8")
    assert "signal/noise" in studio("inspect", path, "--information").stdout
    flags = ("--budget-ratio", 0.5, "--json")
    plain, drafted = (json.loads(studio("simulate", path, *flags, *more).stdout) for more in ((), ("--drafts", 4)))
    assert drafted["drafted_tokens"] > 0 == plain["drafted_tokens"]
    assert drafted["decode_tokens"] == plain["decode_tokens"]
