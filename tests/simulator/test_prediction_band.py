"""Which band a prediction carries: the calibrated machine's own, what was published, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator import simulate
from simulator.validation.families import MIN_PUBLISHED, published_band, strategy_family
from simulator.validation.record import Pair, make_record
from tests.simulator.builders import make_config, make_hardware, make_measured, make_shape, mixed_trace
from trace_capture.band import ErrorBand, band_of, spread_of
from trace_capture.hardware import HardwareProfile
from trace_capture.run import Run

SHAPE = make_shape(layers=4)
OWN = ErrorBand(low_ratio=0.95, high_ratio=1.06, count=12, source="here")


def band(hardware: HardwareProfile) -> ErrorBand | None:
    run = simulate(mixed_trace(SHAPE), hardware, make_config("lru", budget_ratio=0.5))
    text = " ".join(run.info.notes)
    assert ("no error band" in text) == (run.info.error_band is None)
    return run.info.error_band


def test_a_calibrated_machine_has_its_own_band_for_its_own_model_only() -> None:
    calibrated = make_hardware(measured=make_measured(model=SHAPE.name)).model_copy(update={"error_band": OWN})
    assert band(calibrated) == OWN
    assert band(calibrated.model_copy(update={"error_band": None})) is None
    other = make_hardware(measured=make_measured(model="another")).model_copy(update={"error_band": OWN})
    found = band(other)
    assert found is not None and found != OWN and "published" in found.source
    assert band(other.model_copy(update={"emulated": True})) is None


def test_the_profile_s_band_survives_a_run_s_file_and_old_files_are_read(tmp_path: Path) -> None:
    calibrated = make_hardware(measured=make_measured(model=SHAPE.name)).model_copy(update={"error_band": OWN})
    run = simulate(mixed_trace(SHAPE), calibrated, make_config("lru", budget_ratio=0.5))
    path = run.save(tmp_path, "x")
    assert Run.load(path).info.error_band == OWN
    record = json.loads(path.read_text())
    record["info"] |= {"error_band_ratio": 0.07}
    del record["info"]["error_band"]
    path.write_text(json.dumps(record))
    old = Run.load(path).info.error_band
    assert old is not None and (old.low_ratio, old.high_ratio) == pytest.approx((0.93, 1.07))


@pytest.mark.parametrize(
    ("family", "cache", "source", "cpu"),
    [
        ("on_demand", {"policy": "none", "budget_ratio": 1.0}, "none", {}),
        ("all_resident", {"policy": "lru", "budget_ratio": 1.0}, "none", {}),
        ("expert_cache", {"policy": "lru", "budget_ratio": 0.5}, "none", {}),
        ("prefetch", {"policy": "lru", "budget_ratio": 0.5}, "previous-token", {}),
        ("cpu_experts", {"policy": "lru", "budget_ratio": 0.5}, "none", {"layers": "all"}),
        ("layer_split", {"policy": "lru", "budget_ratio": 0.5}, "none", {"layers": 2}),
        ("hybrid", {"policy": "lru", "budget_ratio": 0.5}, "none", {"policy": "misses"}),
    ],
)
def test_configurations_fall_into_the_families_of_published_tables(
    family: str, cache: dict[str, object], source: str, cpu: dict[str, object]
) -> None:
    from simulator.policies.config import parse_config

    config = parse_config({"cache": cache, "prefetch": {"source": source}, "cpu": cpu})
    assert strategy_family(config, SHAPE) == family


def test_bands_to_one_side_come_from_both_tails() -> None:
    ratios = [1 + place / 100 for place in range(1, 20)]
    both = spread_of(ratios, "x")
    assert (both.low_ratio, both.high_ratio) == (1.01, 1.19) and both.count == 19
    assert spread_of(ratios[:18], "x") == band_of(ratios[:18], "x")
    assert both.text() == "+1 % to +19 %, from 19 measurements"


def test_published_bands_are_of_predictions_before_any_engine_s_efficiency(tmp_path: Path) -> None:
    def pairs(family: str, count: int, ratio: float) -> list[Pair]:
        details = {"unscaled_ms": 10.0}
        return [
            Pair(id=f"{family}{n}", family=family, predicted_ms=10 * ratio, measured_ms=10 * ratio, details=details)  # type: ignore[arg-type]
            for n in range(count)
        ]

    path = tmp_path / "published.json"
    make_record("published", pairs("layer_split", MIN_PUBLISHED, 1.5) + pairs("hybrid", 3, 4.0), "c").save(path)
    own, borrowed = published_band(path, "layer_split"), published_band(path, "hybrid")
    assert own is not None and (own.low_ratio, own.high_ratio) == (1.5, 1.5)
    assert borrowed is not None and borrowed.high_ratio == 4.0 and borrowed.count == MIN_PUBLISHED + 3
    assert published_band(tmp_path / "missing.json", "hybrid") is None
