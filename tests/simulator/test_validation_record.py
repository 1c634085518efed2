"""The validation record: which band follows from which pairs, and the file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from simulator.policies.config import OffloadConfig, parse_config
from simulator.validation.promises import record_promise
from simulator.validation.record import MIN_COUNT, Pair, ValidationRecord, make_record
from trace_capture.band import COVERAGE, ErrorBand, band_of
from trace_capture.errors import ConfigError, TraceError
from trace_capture.run import Metrics, Run, RunInfo


def pairs(family: str, ratios: list[float]) -> list[Pair]:
    """Pairs with these ratios of measured over predicted."""
    return [
        Pair(id=f"{family}-{place}", family=family, predicted_ms=10, measured_ms=10 * ratio)  # type: ignore[arg-type]
        for place, ratio in enumerate(ratios)
    ]


def test_from_nine_pairs_on_the_band_is_the_conformal_quantile() -> None:
    errors = [0.01 * place for place in range(1, 20)]
    signs = [1 if place % 2 else -1 for place in range(19)]
    band = band_of([math.exp(sign * error) for sign, error in zip(signs, errors, strict=True)], "x")
    assert band.high_ratio == pytest.approx(math.exp(0.18)) and band.low_ratio == pytest.approx(math.exp(-0.18))
    assert (band.count, band.source) == (19, "x")
    assert band_of([math.exp(error) for error in errors[:9]], "").high_ratio == pytest.approx(math.exp(0.09))


def test_with_few_pairs_the_band_is_wider_than_what_was_seen() -> None:
    assert band_of([math.exp(0.1)], "").high_ratio == pytest.approx(math.exp(0.6314))
    assert band_of([math.exp(0.1), math.exp(-0.1)], "").high_ratio == pytest.approx(math.exp(0.292))
    one_outlier = [1.0] * 7 + [math.exp(0.5)]
    assert band_of(one_outlier, "").high_ratio == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize("count", [1, 3, 6, 9, 12, 30])
def test_bands_contain_nine_in_ten_of_further_measurements(count: int) -> None:
    """Coverage over many draws of normal errors, where both rules promise at least 90 %."""
    generator = np.random.default_rng(count)
    inside = 0
    for _ in range(1500):
        *seen, further = np.exp(generator.normal(0, 0.05, count + 1))
        inside += band_of(seen, "").contains(1.0, further)
    assert inside / 1500 > COVERAGE - 0.025


def test_a_family_with_few_pairs_takes_the_band_of_all() -> None:
    record = make_record("published", pairs("prefetch", [1.5] * 4) + pairs("on_demand", [1.1] * 20), "a command")
    assert len(pairs("prefetch", [1.5] * 4)) < MIN_COUNT
    own, borrowed = record.band("on_demand"), record.band("prefetch")
    assert own.high_ratio == pytest.approx(1.1) and own.low_ratio == pytest.approx(1 / 1.1) and own.count == 20
    assert borrowed.high_ratio == pytest.approx(1.5) and borrowed.count == 24
    assert record.band("speculative") == borrowed
    assert "on demand" in own.source and "all strategies" in borrowed.source
    assert "published" in own.source and "90 %" in own.source


def test_errors_count_too_fast_and_too_slow_alike() -> None:
    record = make_record("live", pairs("prefetch", [0.5, 2.0, 2.0]), "c")
    assert {band.family for band in record.bands} == {"prefetch", "any"}
    assert record.bands[0].median_abs_error == pytest.approx(1.0)
    assert record.bands[0].p90_abs_error == pytest.approx(1.0)
    assert pairs("prefetch", [0.5])[0].error_ratio == pytest.approx(1.0)


def test_a_record_survives_its_file_and_grows_by_pairs(tmp_path: Path) -> None:
    about = {"model": "m", "hardware": "h", "hardware_digest": "sha256:0", "emulated": True, "versions": {"simpy": "4"}}
    record = make_record("live", pairs("prefetch", [1.02, 0.97]), "moe-studio validate --live", **about)
    record.save(tmp_path / "new" / "record.json")
    again = ValidationRecord.load(tmp_path / "new" / "record.json")
    assert again == record and again.bands[0].versions == {"simpy": "4"}
    grown = again.with_pairs(pairs("on_demand", [1.3]))
    assert [band.family for band in grown.bands] == ["prefetch", "on_demand", "any"]
    assert grown.bands[-1].n == 3 and grown.band("any").high_ratio > record.band("any").high_ratio
    assert grown.model == "m" and list(tmp_path.glob("**/*.tmp")) == []


def test_damaged_records_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(TraceError, match=r"cannot read validation record .*record\.json.*moe-studio validate"):
        ValidationRecord.load(path)
    path.write_text("{")
    with pytest.raises(TraceError, match="not a validation record"):
        ValidationRecord.load(path)
    make_record("live", pairs("prefetch", [1.02]), "c").save(path)
    good = json.loads(path.read_text())
    for change, words in (
        ({"schema_version": 2}, "schema_version 2, wanted 1"),
        ({"pairs": [good["pairs"][0] | {"measured_ms": -1}]}, r"pairs\.0\.measured_ms"),
        ({"bands": [band | {"band_high_ratio": 1.01} for band in good["bands"]]}, "do not follow from its pairs"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(TraceError, match=words):
            ValidationRecord.load(path)
    with pytest.raises(TraceError, match="nothing was both predicted and measured"):
        make_record("live", [], "c")


def test_a_band_says_its_sides_and_what_is_behind_it() -> None:
    assert ErrorBand(low_ratio=0.96, high_ratio=1.05, count=12).text() == "-4.0 % to +5.0 %, from 12 measurements"
    assert ErrorBand(low_ratio=0.7, high_ratio=1.4).text() == "-30 % to +40 %"
    assert ErrorBand(low_ratio=0.7, high_ratio=1.4).half_width_ratio == pytest.approx(0.4)


def promising(**changes: object) -> OffloadConfig:
    provenance = {
        "model": "m",
        "trace_digest": "sha256:1",
        "hardware": "h",
        "hardware_digest": "sha256:2",
        "predicted_tpot_ms": 20.0,
        "predicted_hit_rate": 0.5,
        "family": "prefetch",
    }
    return parse_config({"cache": {"budget_ratio": 0.5}, "provenance": provenance | changes})


def measured_run(tpot_ms: float) -> Run:
    metrics = Metrics(tpot_ms=tpot_ms, decode_tokens=3)
    info = RunInfo(kind="measured", label="x", emulated=True, model="m", hardware="this machine", metrics=metrics)
    return Run(info, np.array([1, 2, 3]))


def test_promises_are_appended_to_a_record_of_their_machine_and_model(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record_promise(path, promising(), measured_run(25.0), "moe-studio run")
    record_promise(path, promising(family="on_demand"), measured_run(16.0), "another")
    record = ValidationRecord.load(path)
    assert [(pair.family, pair.error_ratio) for pair in record.pairs] == [
        ("prefetch", 20 / 25 - 1),
        ("on_demand", 0.25),
    ]
    assert (record.model, record.hardware_digest, record.emulated) == ("m", "sha256:2", True)
    assert record.command == "moe-studio run" and record.band("any").count == 2
    before = path.read_bytes()
    for config, run, error, words in (
        (parse_config({"cache": {"budget_ratio": 0.5}}), measured_run(20), ConfigError, "promises a time per token"),
        (promising(model="other"), measured_run(20), ConfigError, "for other, and m was run"),
        (promising(hardware_digest="sha256:3"), measured_run(20), TraceError, "has hardware_digest 'sha256:2'"),
        (promising(), measured_run(0), TraceError, "decoded no token"),
    ):
        with pytest.raises(error, match=words):
            record_promise(path, config, run, "c")
    assert path.read_bytes() == before
