"""Set-ups of the what-if page: what its controls mean, as text in the address and as a scenario.

Only names that are offered are taken from an address: a hardware part or profile is never a path that came with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboard.data import Snapshot
from simulator.policies.cache import CACHE_POLICIES
from simulator.policies.prefetch import PREFETCH_POLICIES, make_prefetch_policy
from simulator.scenario import Scenario
from trace_capture.machine_parts import part_names, profile_names
from trace_capture.trace import Trace

AS_IT_IS = "as it is"
"""The choice that leaves a setting to the machine or the trace."""
DEFAULT_HARDWARE = "rtx4090-pcie4x16"
MAX_SETUPS = 4
FORMATS = ("bf16", "fp8", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "q2_k", "mxfp4", "nvfp4", "int4")
CPU_CHOICES = ("none", "misses")
VRAM_LIMIT_GB = 96
CONTEXT_CHOICES = ("0", "1024", "4096", "16384", "65536", "131072")


@dataclass(frozen=True)
class Choice:
    """One picker: the setting it sets, what it is called, what it offers."""

    setting: str
    label: str
    options: tuple[str, ...]
    default: str = AS_IT_IS


def choices(snapshot: Snapshot, trace: Trace | None) -> tuple[Choice, ...]:
    """The pickers for a folder and a trace."""
    own = tuple(f"{item.name} (this folder)" for item in snapshot.profiles)
    hardware = Choice("hardware", "Machine", (*own, *profile_names()), own[0] if own else DEFAULT_HARDWARE)
    sources = tuple(
        name
        for name in PREFETCH_POLICIES
        if (need := make_prefetch_policy(name).prediction) is None or trace is None or need in trace.predicted
    )
    has_sizes = trace is not None and trace.shape.weights_per_expert is not None
    return (
        hardware,
        Choice("gpu", "GPU", (AS_IT_IS, *part_names("gpu"))),
        Choice("link", "Link", (AS_IT_IS, *part_names("link"))),
        Choice("host", "CPU and RAM", (AS_IT_IS, *part_names("host"))),
        Choice("weights", "Weights", (AS_IT_IS, *FORMATS) if has_sizes else (AS_IT_IS,)),
        Choice("context", "Context (tokens)", (AS_IT_IS, *CONTEXT_CHOICES)),
        Choice("strategy", "Cache policy", tuple(CACHE_POLICIES), "lru"),
        Choice("prefetch", "Prefetch", sources, "none"),
        Choice("cpu_experts", "Experts on the CPU", CPU_CHOICES, "none"),
    )


SLIDERS = ("vram_gb", "gamma", "acceptance")
"""Settings of sliders; 0 leaves the first two to the card and the trace."""
SLIDER_DEFAULTS: dict[str, float] = {"vram_gb": 0, "gamma": 0, "acceptance": 0.7}


def setup_text(values: Mapping[str, str]) -> str:
    """A set-up for the address: what differs from the defaults, as `gpu=rtx3060;vram_gb=12`."""
    return ";".join(f"{name}={value}" for name, value in values.items())


def parse_setup(text: str, offered: Sequence[Choice]) -> dict[str, str]:
    """The set-up of a text; whatever is not offered is left out."""
    found: dict[str, str] = {}
    options = {choice.setting: choice.options for choice in offered}
    for piece in text.split(";"):
        name, _, value = piece.partition("=")
        is_set = name in SLIDERS and _is_number(value) and float(value) != SLIDER_DEFAULTS[name]
        if is_set or value in options.get(name, ()):
            found[name] = value
    return found


def parse_setups(text: str | None, offered: Sequence[Choice]) -> list[dict[str, str]]:
    """The pinned set-ups of an address, at most all but one of `MAX_SETUPS`."""
    return [parse_setup(one, offered) for one in (text or "").split("~") if one][: MAX_SETUPS - 1]


def setups_text(setups: Sequence[Mapping[str, str]]) -> str:
    """Pinned set-ups for the address."""
    return "~".join(setup_text(one) or "gamma=0" for one in setups)


def chosen(values: Mapping[str, str | float | None], offered: Sequence[Choice]) -> dict[str, str]:
    """What controls are set to, without what is left at its default."""
    defaults = {choice.setting: choice.default for choice in offered}
    picked = {name: value for name, value in values.items() if value is not None}
    result = {name: str(value) for name, value in picked.items() if name in defaults and value != defaults[name]}
    for name in SLIDERS:
        value = picked.get(name)
        if value is not None and float(value) != SLIDER_DEFAULTS[name]:
            result[name] = f"{float(value):g}"
    if "gamma" not in result:
        result.pop("acceptance", None)
    return result


def title(values: Mapping[str, str]) -> str:
    """A set-up in a few words."""
    return ", ".join(f"{name.removesuffix('_gb')} {value}" for name, value in values.items()) or "as it is"


def scenario_of(values: Mapping[str, str], offered: Sequence[Choice], snapshot: Snapshot) -> Scenario:
    """The scenario of a set-up. With a profile that was calibrated on an emulated device, and where a card's memory is
    not known, half of the experts get a place.

    Raises:
        ConfigError: a value does not fit.
    """
    defaults = {choice.setting: choice.default for choice in offered}
    settings = {name: value for name, value in (defaults | dict(values)).items() if value != AS_IT_IS}
    own = {f"{item.name} (this folder)": item for item in snapshot.profiles}
    profile = own.get(settings["hardware"])
    if profile is not None:
        settings["hardware"] = str(snapshot.folder / profile.name)
        if profile.profile.emulated and not {"gpu", "vram_gb"} & settings.keys():
            settings["budget_ratio"] = "0.5"
    return Scenario().set_values(settings)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and len(text) < 8
