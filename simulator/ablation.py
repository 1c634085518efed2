"""MoE-SpAc with a part taken away (arXiv 2603.09983): what each ablation changes, in simulator and engine alike.

Named as in the paper's ablation: the utility estimator, and the workload balancer. Ours: what stands in for a part that
is gone, and the other three. Everything else of a configuration stays, its memory included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from simulator.policies.errors import unknown_name
from trace_capture.errors import ConfigError

if TYPE_CHECKING:  # the help of commands lists the names and needs nothing else
    from simulator.policies.config import OffloadConfig
    from trace_capture.trace import Trace

NO_DRAFTS = "drafts"


class Ablation(NamedTuple):
    """A part taken away: what that means, and the keys of the configuration that it sets, by table."""

    meaning: str
    changes: Mapping[str, Mapping[str, Any]]


ABLATIONS: dict[str, Ablation] = {
    "estimator": Ablation(
        "utility is 1 for what the latest token used, else 0, and the least recently used of equals leaves",
        {"utility": {"signal": "autoregressive", "boundaries": "fixed"}},
    ),
    "balancer": Ablation(
        "tau stays 1: whatever has any utility belongs on the device, and misses on the CPU, whatever that takes",
        {"utility": {"tau": 1}},
    ),
    "thresholds": Ablation(
        "the fluctuations that move a state stay what they are at first", {"utility": {"boundaries": "fixed"}}
    ),
    NO_DRAFTS: Ablation("one token per pass", {"utility": {"gamma": 0, "up": None, "down": None}}),
    "cpu": Ablation("what is missing is loaded and awaited", {"cpu": {"policy": "none", "layers": ()}}),
}
"""By name. The release's threshold is 1, too, and never changes."""


def read_ablations(text: str | None) -> tuple[str, ...]:
    """Names in a text such as `estimator,cpu` or `estimator+cpu`; none in None, `none` and an empty text.

    Raises:
        ConfigError: a name is unknown.
    """
    names = [part.strip() for part in (text or "").replace("+", ",").split(",")]
    names = [name for name in names if name not in ("", "none")]
    for name in names:
        if name not in ABLATIONS:
            raise unknown_name("ablation", name, ABLATIONS)
    return tuple(dict.fromkeys(names))


def ablated(config: OffloadConfig, names: Iterable[str]) -> OffloadConfig:
    """The configuration without the named parts, its label saying so.

    Of `drafts` this is one half: the other is what is run, see `ablated_trace`.

    Raises:
        ConfigError: a name is unknown, or the configuration has no such part.
    """
    from simulator.policies.config import parse_config

    raw = config.model_dump(exclude_none=True)
    for name in names:
        if name not in ABLATIONS:
            raise unknown_name("ablation", name, ABLATIONS)
        before = parse_config(raw)
        for table, values in ABLATIONS[name].changes.items():
            raw[table] = {key: value for key, value in (raw[table] | values).items() if value is not None}
        if name != NO_DRAFTS and _same_decisions(parse_config(raw), before):
            raise ConfigError(f"--ablate {name}: the configuration has no such part ({before.title}); leave it away")
        raw["label"] = f"{before.title}, no {name}"
        raw.pop("provenance", None)  # promised of the whole
    return parse_config(raw)


def ablated_trace(trace: Trace, names: Iterable[str]) -> Trace:
    """The same output tokens, without `drafts` decoded one by one; rejected drafts are left out.

    Raises:
        ConfigError: the trace has no drafts that could be left out.
    """
    from trace_capture.rewindow import rewindow
    from trace_capture.trace import Phase

    if NO_DRAFTS not in names:
        return trace
    if not (trace.phase == Phase.VERIFY).any():
        raise ConfigError("--ablate drafts: the trace has no verify passes; capture with --draft, or give --drafts")
    return rewindow(trace, 0, 0.0)


def draft_left(draft: str | None, names: Iterable[str]) -> str | None:
    """The draft model of a live run, or None without `drafts`.

    Raises:
        ConfigError: there is none that could be left out.
    """
    if NO_DRAFTS not in names:
        return draft
    if draft is None:
        raise ConfigError("--ablate drafts: nothing is drafted; give --draft, or leave this ablation away")
    return None


def _same_decisions(config: OffloadConfig, before: OffloadConfig) -> bool:
    """Whether two configurations decide alike: utility settings change nothing where no utility is kept."""
    if not before.needs_utility:
        config = config.model_copy(update={"utility": before.utility})
    elif config.utility.signal != "speculative" and config.utility.signal == before.utility.signal:
        config = config.model_copy(update={"utility": before.utility})
    return config == before
