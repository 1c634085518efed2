"""What the tune page says and draws, and what it saves, without a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboard.saving import free_name, save_new_config
from dashboard.tune_maps import modes_figure, slots_figure
from dashboard.tune_view import NATIVE, ON_CPU, Pace, budget_sentence, layer_map, tau_rows
from simulator.config_file import load_config
from simulator.policies.config import OffloadConfig, parse_config
from trace_capture.errors import ConfigError, StudioError
from trace_capture.model_shape import ModelShape


def config_of(**tables: object) -> OffloadConfig:
    return parse_config({"cache": {"slots_per_layer": [0, 2, 4, 6, 8, 10]}} | tables)


def test_the_map_tells_slots_and_mode_of_each_layer(shape: ModelShape) -> None:
    prefetch = {"source": "estimator", "mode": ["verify", "hint", "verify", "commit", "hint", "hint"]}
    layers = layer_map(config_of(prefetch=prefetch, cpu={"layers": [0]}), shape)
    assert layers["slots"] == [0, 2, 4, 6, 8, 10]
    assert layers["even"] == [0, 6, 6, 6, 6, 6]
    assert layers["modes"] == [ON_CPU, "hint", "verify", "commit", "hint", "hint"]
    assert layer_map(config_of(cpu={"layers": [0]}), shape)["modes"] == [ON_CPU, *[NATIVE] * 5]
    slots = slots_figure(layers)
    assert list(slots.data[0].y) == layers["slots"] and list(slots.data[1].y) == layers["even"]
    assert slots.layout.yaxis.title.text == "slots (of 16 experts)"
    drawn = {trace.name: list(trace.x) for trace in modes_figure(layers).data}
    assert drawn == {ON_CPU: ["0"], "hint": ["1", "4", "5"], "verify": ["2"], "commit": ["3"]}


def test_one_pool_has_no_slots_of_a_layer(shape: ModelShape) -> None:
    config = parse_config({"cache": {"scope": "global", "budget_bytes": 20 * shape.expert_bytes[0]}})
    layers = layer_map(config, shape)
    assert layers["slots"] is None
    assert "one pool" in slots_figure(layers).layout.annotations[0].text


def test_tau_is_told_where_there_is_one() -> None:
    cache = {"budget_ratio": 0.5, "policy": "utility"}
    assert tau_rows(parse_config({"cache": {"budget_ratio": 0.5}})) == []
    assert "threshold tau" not in dict(tau_rows(parse_config({"cache": cache})))
    fixed = tau_rows(parse_config({"cache": cache, "utility": {"loads": "drafting", "tau": 3}}))
    assert dict(fixed)["threshold tau"] == "3"
    each = tau_rows(parse_config({"cache": cache, "utility": {"loads": "drafting", "scope": "layer"}}))
    assert dict(each)["threshold tau"].endswith("one for each layer")


def test_progress_and_budget_in_words(shape: ModelShape) -> None:
    pace = Pace()
    known = [pace.text(done, 60, 0.001 * done) for done in range(1, 21)]
    assert known[0] == "1 of 60 simulations" and known[1] == "2 of 60 simulations, about 0 s left"
    later = [pace.text(20 + step, 60, 0.02 + 2.0 * step) for step in range(1, 18)]
    assert later[-1] == "37 of 60 simulations, about 46 s left"
    assert Pace().text(60, 60, 9.0) == "60 of 60 simulations"
    slow = Pace()
    slow.text(1, 1_201, 0.0)
    assert slow.text(2, 1_202, 1.0) == "2 of 1,202 simulations, about 20 min left"
    assert budget_sentence(shape, 50) == "14.2 MB of 28.3 MB of experts; each layer's top-2 needs 12.5 %."


def test_saving_takes_new_plain_names_alone(tmp_path: Path) -> None:
    raw = config_of().model_dump(mode="json", exclude_none=True)
    assert free_name(tmp_path) == "tuned.toml"
    assert load_config(save_new_config(tmp_path, " tuned.toml ", raw)) == config_of()
    assert free_name(tmp_path) == "tuned-2.toml"
    before = (tmp_path / "tuned.toml").read_bytes()
    with pytest.raises(StudioError, match="here already; take another name, such as tuned-2.toml"):
        save_new_config(tmp_path, "tuned.toml", raw)
    for name in ("../out.toml", "/tmp/out.toml", ".hidden.toml", "tuned.txt", ""):
        with pytest.raises(StudioError, match="not a plain file name"):
            save_new_config(tmp_path, name, raw)
    with pytest.raises(ConfigError, match="new.toml: cache: Field required"):
        save_new_config(tmp_path, "new.toml", {"cach": {}})
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.toml"]
    assert (tmp_path / "tuned.toml").read_bytes() == before
