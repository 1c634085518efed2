"""A what-if question: one trace, one machine, one strategy, each by settings that a person can name.

Where no budget is given the experts get what the device has left beside everything else that must be on it, which is
what users of a card want to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simulator.ablation import ablated, ablated_trace, read_ablations
from simulator.config_file import load_config
from simulator.policies.config import OffloadConfig, parse_config
from simulator.policies.errors import unknown_name
from trace_capture.errors import ConfigError
from trace_capture.hardware import HardwareProfile, Quantity
from trace_capture.machine_parts import compose_profile, with_quantities
from trace_capture.model_shape import ModelShape
from trace_capture.rewindow import rewindow
from trace_capture.trace import Phase, Trace

GIB = 1 << 30
MIB = 1 << 20
_TABLES = ("device.", "host.", "link.", "disk.")
_CONFIG = "config."


class Scenario(BaseModel):
    """Settings of one question; every field can be set and swept by its name, and so can `host.cores` and all other
    numbers of the machine, and `config.cache.policy` and all other keys of a configuration.

    Raises:
        pydantic.ValidationError: from the constructor; `set_values` turns it into a `ConfigError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    hardware: str = "rtx4090-pcie4x16"
    """A shipped machine, parts joined by `+`, or a TOML file; the parts below replace its own."""
    gpu: str | None = None
    host: str | None = None
    link: str | None = None
    disk: str | None = None
    vram_gb: float | None = Field(default=None, gt=0)
    """Memory of the device in GiB, as cards are sold, instead of the profile's."""
    reserve_gb: float = Field(default=1.5, ge=0)
    """Device memory in GiB for the driver, buffers and the embedding."""
    weights: str | None = None
    """Format of the experts' weights, such as q4_k_m; None: as captured."""
    context: int | None = Field(default=None, ge=0)
    """Tokens in the cache at the first generated token; None: as captured."""
    strategy: str = "lru"
    scope: Literal["layer", "global"] = "layer"
    budget_ratio: float | None = Field(default=None, gt=0, le=1)
    """Share of the experts that get a place, instead of what the device's memory leaves."""
    budget_mib: float | None = Field(default=None, gt=0)
    prefetch: str = "none"
    mode: Literal["hint", "verify", "commit"] = "hint"
    recall: float = Field(default=1.0, ge=0, le=1)
    preload: bool | None = None
    cpu_layers: int | Literal["all"] | None = None
    cpu_experts: Literal["none", "misses", "threshold"] = "none"
    cpu_max_tokens: int = Field(default=1, gt=0)
    cpu_threads: int | None = Field(default=None, gt=0)
    """Cores that run experts; None: all of the host."""
    prefill: Literal["on-demand", "stream"] = "on-demand"
    micro_batch: int | None = Field(default=None, gt=0)
    gamma: int | None = Field(default=None, ge=0)
    """Drafts per verify pass; None: passes as captured."""
    acceptance: float = Field(default=0.7, ge=0, le=1)
    draft_mib: float = Field(default=0.0, ge=0)
    """Weights of the draft model, on the device."""
    ablate: str | None = None
    """Parts of MoE-SpAc that are taken away, joined by `+`; see `simulator.ablation`."""
    seed: int = Field(default=0, ge=0)
    config: str | None = None
    """A configuration (TOML) instead of the settings of a strategy above."""
    numbers: dict[str, float | str] = Field(default_factory=dict)
    """Numbers of the machine by dotted name."""
    config_values: dict[str, Any] = Field(default_factory=dict)
    """Values of the configuration by dotted name, without `config.`."""

    def set_values(self, values: Mapping[str, str]) -> Scenario:
        """The scenario with settings changed, each given as text.

        Raises:
            ConfigError: a name is unknown or a value does not fit.
        """
        raw = self.model_dump()
        for name, text in values.items():
            value = _value(text)
            if name.startswith(_TABLES):
                raw["numbers"][name] = value
            elif name.startswith(_CONFIG):
                raw["config_values"][name.removeprefix(_CONFIG)] = value
            elif name in SETTINGS:
                raw[name] = None if text.lower() in ("none", "") and _may_be_none(name) else _as_field(name, text)
            else:
                raise unknown_name("setting", name, SETTINGS)
        try:
            return Scenario.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"][:1])
            message = f"{place} = {values.get(place, first.get('input'))}: {first['msg']}"
            raise ConfigError(f"{message}; change that setting") from error


SETTINGS = tuple(name for name in Scenario.model_fields if name not in ("numbers", "config_values"))
_TEXT_FIELDS = ("hardware", "gpu", "host", "link", "disk", "weights", "strategy", "prefetch", "ablate", "config")


TRACE_SETTINGS = ("weights", "context", "gamma", "acceptance", "seed", "draft_mib", "ablate")
"""What changes the trace."""
MACHINE_SETTINGS = ("hardware", "gpu", "host", "link", "disk", "vram_gb", "numbers")
"""What changes the machine."""


@dataclass(frozen=True)
class Question:
    """A scenario put together: what `simulate` takes."""

    trace: Trace
    hardware: HardwareProfile
    config: OffloadConfig

    @property
    def cpu_layers(self) -> frozenset[int]:
        """MoE layers that run on the CPU altogether."""
        return self.config.cpu.whole_layers(self.trace.shape.num_moe_layers)


def put_together(trace: Trace, scenario: Scenario) -> Question:
    """Trace, machine and configuration of a scenario.

    Raises:
        ConfigError: the experts do not fit, or a value does not suit the model.
        ProfileError, ModelError, TraceError: a part of the machine, a weight format, or what the trace lacks.
    """
    hardware = machine_of(scenario)
    trace = trace_of(trace, scenario)
    return Question(trace, hardware, strategy_of(scenario, trace, hardware))


def trace_of(trace: Trace, scenario: Scenario) -> Trace:
    """The trace as a scenario replays it: with its weights, context and drafts.

    Raises:
        ModelError, TraceError: a weight format is unknown, or the trace cannot be drafted.
    """
    if scenario.weights is not None:
        shape = trace.shape.with_weights(scenario.weights)
        trace = replace(trace, info=trace.info.model_copy(update={"shape": shape}))
    if scenario.context is not None:
        trace = with_context(trace, scenario.context)
    if scenario.gamma is not None:
        trace = rewindow(trace, scenario.gamma, scenario.acceptance, scenario.seed, round(scenario.draft_mib * MIB))
    return ablated_trace(trace, read_ablations(scenario.ablate))


def strategy_of(scenario: Scenario, trace: Trace, hardware: HardwareProfile) -> OffloadConfig:
    """The configuration of a scenario without the parts that it takes away; `trace` is that of `trace_of`.

    Raises:
        ConfigError: as `config_of`.
    """
    return ablated(config_of(scenario, trace, hardware), read_ablations(scenario.ablate))


def machine_of(scenario: Scenario) -> HardwareProfile:
    """The machine of a scenario.

    Raises:
        ProfileError: a name or a number is unknown or does not fit.
    """
    base = HardwareProfile.load(Path(scenario.hardware))
    profile = compose_profile(scenario.gpu, scenario.host, scenario.link, scenario.disk, base=base)
    if scenario.vram_gb is not None:
        memory = Quantity(value=scenario.vram_gb * GIB, kind="guess", source="set by the question")
        profile = profile.model_copy(update={"device": profile.device.model_copy(update={"memory_bytes": memory})})
    return with_quantities(profile, scenario.numbers, "set by the question") if scenario.numbers else profile


def config_of(scenario: Scenario, trace: Trace, hardware: HardwareProfile) -> OffloadConfig:
    """The configuration of a scenario on a machine.

    Raises:
        ConfigError: the experts do not fit, or a value is wrong.
    """
    if scenario.config is not None:
        table = load_config(Path(scenario.config)).model_dump(exclude_none=True)
    else:
        table = _strategy_table(scenario, trace, hardware)
    for name, value in scenario.config_values.items():
        *path, key = name.split(".")
        place = table
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"config.{name}: {part} is not a table of the configuration")
        place[key] = value
    return parse_config(table, where="what-if")


def _strategy_table(scenario: Scenario, trace: Trace, hardware: HardwareProfile) -> dict[str, Any]:
    cache: dict[str, Any] = {"policy": scenario.strategy, "scope": scenario.scope, "preload": scenario.preload}
    cache["seed"] = scenario.seed
    if scenario.budget_ratio is not None:
        cache["budget_ratio"] = scenario.budget_ratio
    elif scenario.budget_mib is not None:
        cache["budget_bytes"] = round(scenario.budget_mib * MIB)
    else:
        cache["budget_bytes"] = _rest_of_memory(scenario, trace, hardware)
    prefetch = {"source": scenario.prefetch, "mode": scenario.mode, "recall": scenario.recall, "seed": scenario.seed}
    cpu: dict[str, Any] = {"policy": scenario.cpu_experts, "max_tokens": scenario.cpu_max_tokens}
    cpu["threads"] = scenario.cpu_threads
    if scenario.cpu_layers is not None:
        cpu["layers"] = scenario.cpu_layers
    prefill = {"strategy": scenario.prefill, "micro_batch": scenario.micro_batch}
    return {"cache": cache, "prefetch": prefetch, "cpu": cpu, "prefill": prefill}


def _rest_of_memory(scenario: Scenario, trace: Trace, hardware: HardwareProfile) -> int:
    """Bytes of the device that experts may take; never more than all of them need."""
    shape = trace.shape
    have = hardware.device.memory_bytes.value
    if have <= 0:
        raise ConfigError(f"{hardware.name} does not say how much memory its device has; give vram_gb or budget_ratio")
    need = resident_bytes(shape, deepest_context(trace)) + scenario.draft_mib * MIB + scenario.reserve_gb * GIB
    rest = int(have - need)
    if rest <= 0:
        raise ConfigError(
            f"does not fit: {shape.name} needs {need / GIB:.1f} GiB beside its experts and the device has "
            f"{have / GIB:.1f} GiB; shorten the context, take smaller weights or a larger card"
        )
    return min(rest, shape.total_expert_bytes)


def resident_bytes(shape: ModelShape, context: int) -> int:
    """Bytes that must be on the device whatever becomes of the experts: other weights, head, and the cache of
    `context` tokens."""
    return sum(shape.dense_bytes) + shape.head_bytes + shape.cache_bytes(context)


def deepest_context(trace: Trace) -> int:
    """Tokens in the cache when the longest sequence of a trace ends."""
    return int(trace.position.max()) + 1


def with_context(trace: Trace, context: int) -> Trace:
    """The same routing as if `context` tokens were in the cache at each sequence's first generated token.

    Prefill passes stay what they are, so the time to the first token is that of the captured prompt.
    """
    position = trace.position.copy()
    generated = trace.phase != Phase.PREFILL
    for sequence in trace.sequences():
        rows = np.flatnonzero((trace.sequence == sequence) & generated)
        if len(rows):
            position[rows] += context - position[rows[0]]
    return replace(trace, position=position)


def _value(text: str) -> float | int | bool | str:
    """A number or a truth value where the text is one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _as_field(name: str, text: str) -> float | int | bool | str:
    return text if name in _TEXT_FIELDS else _value(text)


def _may_be_none(name: str) -> bool:
    return Scenario.model_fields[name].default is None
