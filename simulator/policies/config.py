"""What a user chooses: cache, prefetch, device. One schema for simulator, tuner, engine, export and dashboard."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator, model_validator

from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.errors import unknown_name
from simulator.policies.placement import PLACEMENT_POLICIES
from simulator.policies.prefetch import PREFETCH_POLICIES, PrefetchSetting, make_prefetch_policy
from simulator.policies.routing_reference import RoutingReference
from simulator.policies.utility_config import UtilityConfig
from trace_capture.band import ErrorBand, from_old_fields
from trace_capture.errors import ConfigError
from trace_capture.hardware import HardwareProfile

CONFIG_SCHEMA_VERSION: Literal[2] = 2


ExpertId = Annotated[int, Field(ge=0)]
HotExperts = tuple[tuple[ExpertId, ...], ...]


class CacheConfig(BaseModel):
    """Device memory for experts and who leaves it. Give exactly one of the three sizes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    policy: str = "lru"
    scope: Literal["layer", "global"] = "layer"
    """`layer`: every layer has slots of its own; `global`: all layers share one pool."""
    slots_per_layer: tuple[int, ...] | None = None
    """Experts that each MoE layer may keep on the device [L]; only with scope `layer`."""
    budget_bytes: int | None = Field(default=None, gt=0)
    budget_ratio: float | None = Field(default=None, gt=0, le=1)
    """Share of all experts' bytes."""
    hot_experts: HotExperts | None = None
    """Experts of each MoE layer that a profile found popular, hottest first [L][up to E]: policy `static` keeps them,
    and `preload` starts with them."""
    preload: bool | None = None
    """Whether the experts are on the device before the first pass; None: with the policies `resident` and `static`."""
    seed: int = Field(default=0, ge=0)
    """For the policy `random`."""

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        if name not in CACHE_POLICIES:
            raise unknown_name("cache policy", name, CACHE_POLICIES)
        return name

    @model_validator(mode="after")
    def _one_size(self) -> CacheConfig:
        sizes = [self.slots_per_layer, self.budget_bytes, self.budget_ratio]
        given = [size for size in sizes if size is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of slots_per_layer, budget_bytes, budget_ratio")
        if self.slots_per_layer is not None and self.scope == "global":
            raise ValueError("slots_per_layer needs scope = 'layer'; with scope = 'global' give budget_bytes")
        return self


Mode = Literal["hint", "verify", "commit"]
"""What a layer does with a prediction of its experts (Speculating Experts, arXiv 2603.19289).

hint: copies yield to demand and are withdrawn when the router disagrees; lossless. verify: copies go in the order of
need and to their end, and what was missed is loaded after; lossless. commit: the layer runs the predicted experts with
the predicted weights and nothing is loaded again (speculative execution); changes the output.
"""


class PrefetchConfig(BaseModel):
    """What is loaded ahead of the router."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: str = "none"
    max_experts: int | None = Field(default=None, gt=0)
    """At most so many experts of the next layer; None for all that the source names."""

    mode: Mode | tuple[Mode, ...] = "hint"
    """For all layers, or one per MoE layer [L]. The first layer has no prediction and is native whatever it says,
    and so is every layer in a prefill."""

    hot_experts: HotExperts | None = None
    """For the source `popularity`: experts of each MoE layer to have, hottest first [L][up to E]."""
    recall: float = Field(default=1.0, ge=0, le=1)
    """For the source `oracle`: the share of the true experts that it names."""
    seed: int = Field(default=0, ge=0)
    """For the source `oracle`, whose mistakes are drawn."""

    @field_validator("source")
    @classmethod
    def _known_source(cls, name: str) -> str:
        if name not in PREFETCH_POLICIES:
            raise unknown_name("prefetch source", name, PREFETCH_POLICIES)
        return name

    @model_validator(mode="after")
    def _predicts(self) -> PrefetchConfig:
        modes = {self.mode} if isinstance(self.mode, str) else set(self.mode)
        if modes - {"hint"} and make_prefetch_policy(self.source).prediction is None:
            raise ValueError(f"modes verify and commit need a source that predicts, and '{self.source}' does not")
        return self

    @property
    def setting(self) -> PrefetchSetting:
        """What prefetch policies may be told."""
        return PrefetchSetting(self.hot_experts, self.recall, self.seed)

    def modes(self, num_layers: int) -> tuple[Mode, ...]:
        """The mode of each MoE layer [L]; the first is always `hint`, since nothing predicts it.

        Raises:
            ConfigError: a mode per layer was given for another number of layers.
        """
        if isinstance(self.mode, str):
            return ("hint", *[self.mode] * (num_layers - 1))
        if len(self.mode) != num_layers:
            raise ConfigError(
                f"prefetch.mode has {len(self.mode)} entries, the model has {num_layers} MoE layers; give one for each"
            )
        return ("hint", *self.mode[1:])


class CpuConfig(BaseModel):
    """Which experts the CPU runs from host memory, beside the device. By default none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    policy: str = "none"
    """For the layers that are not in `layers`. none: what is missing is loaded. misses: the CPU runs what has not
    landed. threshold: the same, but only experts that at most `max_tokens` tokens of the pass ask for. balanced: what
    has not landed, and of the rest the coldest by utility, so that both sides take equally long."""
    layers: Literal["all"] | NonNegativeInt | tuple[NonNegativeInt, ...] = ()
    """MoE layers that run on the CPU altogether and take no slots: so many from the first on (llama.cpp's
    `--n-cpu-moe`), or these, counted from 0."""
    max_tokens: int = Field(default=1, gt=0)
    admissions: int = Field(default=2, ge=0)
    """At most so many experts that ran on the CPU are on their way to the device at once, behind all other loads.
    0: such experts never enter the cache by themselves."""
    hot_misses: Literal["cpu", "load", "balance"] = "cpu"
    """For `balanced`: whether what has not landed always runs on the CPU, or is loaded and awaited where its utility
    reaches the threshold of `utility.loads`; or, with `balance`, as far as that lets the layer end sooner."""
    threads: int | None = Field(default=None, gt=0)
    """That run these experts, beside the thread that drives the device. None: one in the live engine and on a
    calibrated machine, and as many as a data sheet's host has cores."""

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        if name not in PLACEMENT_POLICIES:
            raise unknown_name("CPU policy", name, PLACEMENT_POLICIES)
        return name

    @property
    def is_used(self) -> bool:
        """Whether the CPU may run an expert."""
        return self.policy != "none" or bool(self.layers)

    @property
    def used_threads(self) -> int | None:
        """`threads`, where the CPU runs anything."""
        return self.threads if self.is_used else None

    @property
    def live_threads(self) -> int:
        """Threads of the live engine's CPU side."""
        return self.threads or 1

    def whole_layers(self, num_layers: int) -> frozenset[int]:
        """MoE layers of a model with `num_layers` of them that run on the CPU altogether.

        Raises:
            ConfigError: there is no such layer.
        """
        if isinstance(self.layers, tuple):
            chosen = frozenset(self.layers)
        else:
            chosen = frozenset(range(num_layers if self.layers == "all" else int(self.layers)))
        if chosen and max(chosen) >= num_layers:
            raise ConfigError(
                f"cpu.layers names MoE layer {max(chosen)}, and the model has {num_layers}, counted from 0; "
                "name fewer, or 'all'"
            )
        return chosen

    @property
    def title(self) -> str:
        """What the CPU does, in a few words; empty when nothing."""
        parts = []
        if isinstance(self.layers, tuple):
            parts += [f"layers {', '.join(map(str, self.layers))}"] if self.layers else []
        elif self.layers:
            parts.append("all layers" if self.layers == "all" else f"{self.layers} layer{'s' * (self.layers > 1)}")
        if self.policy == "misses":
            parts.append("misses")
        elif self.policy == "threshold":
            parts.append(f"misses of up to {self.max_tokens} token{'s' * (self.max_tokens > 1)}")
        elif self.policy != "none":
            parts.append(self.policy)
        return f"CPU: {' and '.join(parts)}" if parts else ""


class PrefillConfig(BaseModel):
    """How prompts are read."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    strategy: Literal["on-demand", "stream"] = "on-demand"
    """`on-demand`: what a layer's router chose is loaded, in waves where it does not fit at once; `stream`: while a
    layer computes, all experts of the next are copied, as far as there is room for them."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Tokens per prefill pass; None: a prompt is one pass."""


class DeviceConfig(BaseModel):
    """Where the slots are. The link's numbers are used by the emulated device alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    backend: Literal["auto", "cuda", "emulated"] = "auto"
    """`auto`: CUDA where the model is on a CUDA device, else emulated."""
    h2d_bytes_per_s: float = Field(default=25.7e9, gt=0)
    latency_ns: int = Field(default=10_000, ge=0)
    serial: bool = False
    """True: every load is waited for where it is issued, so nothing overlaps and decisions cannot depend on
    timing. For debugging and parity checks."""

    cpu_expert_ns: int = Field(default=0, ge=0)
    """With an emulated device: the CPU's part of a layer takes at least this long per expert, so that the CPU is as
    slow beside the link as a real one; 0: as fast as this machine."""

    @staticmethod
    def for_machine(hardware: HardwareProfile) -> DeviceConfig:
        """The device whose emulated link and CPU run at the rates of a profile."""
        link, measured = hardware.link, hardware.measured
        return DeviceConfig(
            h2d_bytes_per_s=link.h2d_bytes_per_s.value,
            latency_ns=round(link.latency_ns.value),
            cpu_expert_ns=round(measured.cpu_paced_ns) if measured else 0,
        )


class Provenance(BaseModel):
    """Where a tuned configuration comes from and what it promises."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str
    trace_digest: str
    hardware: str
    hardware_digest: str
    predicted_tpot_ms: float
    """On held-out tokens of the trace."""
    predicted_hit_rate: float
    family: str = "any"
    """Strategy family, by `simulator.validation.families`."""
    error_band: ErrorBand | None = None
    candidates: int = 0
    """Configurations that were simulated."""
    objective: str = "tpot"
    """What was looked for."""
    gamma: int | None = None
    """Drafts per verify pass that the trace was made to have; None: passes as captured."""
    acceptance_ratio: float | None = None
    """Of single drafts, as the trace was made to have them."""
    draft_bytes: int = 0
    """Weights of the draft model, as assumed then."""
    expected_kl_nats: float = 0.0
    """Estimated divergence of the output per token from the exact model's; 0 for what is lossless."""
    versions: dict[str, str] = Field(default_factory=dict)
    routing: RoutingReference | None = None
    """What the trace's routing was like, so that a run can tell when its own is unlike it."""

    @model_validator(mode="before")
    @classmethod
    def _old_band(cls, values: Any) -> Any:
        return from_old_fields(values)


class OffloadConfig(BaseModel):
    """A complete offload configuration.

    Raises:
        pydantic.ValidationError: from the constructor; `parse_config` turns it into a `ConfigError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[2] = CONFIG_SCHEMA_VERSION
    label: str = ""
    cache: CacheConfig
    prefetch: PrefetchConfig = PrefetchConfig()
    utility: UtilityConfig = UtilityConfig()
    cpu: CpuConfig = CpuConfig()
    prefill: PrefillConfig = PrefillConfig()
    device: DeviceConfig = DeviceConfig()
    provenance: Provenance | None = None

    @staticmethod
    def for_fraction(ratio: float, **device: Any) -> OffloadConfig:
        """A plain LRU configuration that gives about `ratio` of all experts a slot.

        Args:
            ratio: share of the experts' bytes to keep on the device, in (0, 1].
            device: fields of `DeviceConfig`, such as `h2d_bytes_per_s` of an emulated link.
        """
        return parse_config({"cache": {"budget_ratio": ratio}, "device": device})

    @model_validator(mode="before")
    @classmethod
    def _of_version_1(cls, values: Any) -> Any:
        """Files of version 1 say `cpu.threads = 1` whether or not anybody chose it."""
        if not isinstance(values, dict) or values.get("schema_version") != 1:
            return values
        cpu = values.get("cpu")
        if isinstance(cpu, dict) and cpu.get("threads") == 1:
            values = values | {"cpu": {name: value for name, value in cpu.items() if name != "threads"}}
        return values | {"schema_version": CONFIG_SCHEMA_VERSION}

    @model_validator(mode="after")
    def _has_utility(self) -> OffloadConfig:
        wants = "utility.loads" if self.utility.loads != "none" else "cpu.policy = 'balanced'"
        if self.needs_expert_times and not self.needs_utility:
            raise ValueError(f"{wants} goes by the utility of experts; set cache.policy = 'utility'")
        return self

    @property
    def needs_utility(self) -> bool:
        """Whether utilities are kept."""
        return CACHE_POLICIES[self.cache.policy].needs_utility

    @property
    def needs_expert_times(self) -> bool:
        """Whether decisions weigh what an expert costs on device and CPU."""
        return self.utility.loads != "none" or self.cpu.policy == "balanced"

    @property
    def title(self) -> str:
        """The label, or a description of the choices where there is none."""
        if self.label:
            return self.label
        prefetch = "" if self.prefetch.source == "none" else f" + {self.prefetch.source}"
        if self.prefetch.mode != "hint":
            prefetch += f" ({self.prefetch.mode if isinstance(self.prefetch.mode, str) else 'mode per layer'})"
        cpu = f" + {self.cpu.title}" if self.cpu.is_used else ""
        if self.utility.loads != "none":
            prefetch += f" + utility loads ({self.utility.loads})"
        prefill = " + streamed prefill" if self.prefill.strategy == "stream" else ""
        return f"{self.cache.policy}/{self.cache.scope}{prefetch}{prefill}{cpu}"


def parse_config(raw: dict[str, Any], where: str = "configuration") -> OffloadConfig:
    """Check a nested dictionary and make a configuration of it.

    Raises:
        ConfigError: naming the first key that is unknown, missing or wrong.
    """
    version = raw.get("schema_version", CONFIG_SCHEMA_VERSION)
    if version not in (1, CONFIG_SCHEMA_VERSION):
        raise ConfigError(f"{where}: schema_version is {version}, this program reads 1 and {CONFIG_SCHEMA_VERSION}")
    try:
        return OffloadConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_mistake(error)}") from error


def _first_mistake(error: ValidationError) -> str:
    """The first mistake that pydantic found, in one line."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        return str(unknown_name("key", ".".join(path), _keys_of(path[:-1])))
    message = first["msg"].removeprefix("Value error, ")
    return f"{'.'.join(path)}: {message}" if path else message


def _keys_of(path: list[str]) -> list[str]:
    """The keys that the table at `path` may have, each with the path in front."""
    model = TABLES[path[0]] if path else OffloadConfig
    return [".".join([*path, name]) for name in model.model_fields]


TABLES: dict[str, type[BaseModel]] = {
    "cache": CacheConfig,
    "prefetch": PrefetchConfig,
    "utility": UtilityConfig,
    "cpu": CpuConfig,
    "prefill": PrefillConfig,
    "device": DeviceConfig,
    "provenance": Provenance,
}
