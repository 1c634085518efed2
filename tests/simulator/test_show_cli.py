"""The verbs that show runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simulator import simulate
from tests.simulator.builders import make_config, make_hardware, make_shape, mixed_trace
from tests.studio import studio


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    trace = mixed_trace(make_shape())
    configs = [make_config("none", budget_bytes=20_000), make_config("lru", "quasi-hidden", budget_bytes=20_000)]
    return [
        simulate(trace, make_hardware(), config, record_spans=True).save(folder, name)
        for name, config in zip(("plain", "ahead"), configs, strict=True)
    ]


def test_timeline_puts_two_runs_and_a_window_of_tokens_into_one_packed_file(runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "t.json.gz"
    result = studio("timeline", *runs, "--tokens", "2:5", "--out", out, "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    events: list[dict[str, Any]] = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    assert said["tokens"] == [2, 5] and said["slices"] == sum(event["ph"] == "X" for event in events)
    for pid in (1, 2):
        names = {event["name"] for event in events if event["pid"] == pid and "token" in event["name"]}
        assert names == {"token 2", "token 3", "tokens 4 to 6, 2 drafts"}
    assert {event["pid"] for event in events if event["ph"] in "sf"} == {2}, "only one of them prefetches"
    refused = studio("timeline", runs[0], "--tokens", "5", "--out", out)
    assert refused.returncode == 2 and "write FIRST:STOP, such as 10:20" in refused.stderr


def test_compare_says_what_limits_each_run_without_reading_timelines(runs: list[Path]) -> None:
    for path in runs:
        path.with_name(path.name.replace(".run.json", ".spans.parquet")).write_bytes(b"not a timeline")
    result = studio("compare", *runs, "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)["what_limits"]
    assert said["first"].startswith("The link is the limit: ") and said["second"] != said["first"]
