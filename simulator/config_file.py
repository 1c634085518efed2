"""Offload configurations as TOML files that a person can read, edit and hand on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomlkit
import tomlkit.exceptions
from tomlkit.items import Table

from simulator.policies.config import OffloadConfig, parse_config
from trace_capture.errors import ConfigError
from trace_capture.files import write_text_atomic

HEADER = (
    "Offload configuration of MoE Offload Studio.",
    "Run it:      moe-studio run --model <folder> --config {name}",
    "Rehearse it: moe-studio simulate <trace.parquet> --hardware <profile> --config {name}",
    "Units are in the names of the keys. Keys that are left out take their defaults.",
)

KEY_COMMENTS = {
    "label": "how reports and charts call this configuration; empty: a description of the choices",
    "cache": "who stays on the device; exactly one of slots_per_layer, budget_bytes, budget_ratio",
    "cache.policy": "who leaves when room is needed",
    "cache.scope": "layer: every layer has slots of its own; global: one pool for all layers",
    "cache.slots_per_layer": "experts that each MoE layer keeps on the device, in order of execution",
    "cache.budget_bytes": "device memory for experts",
    "cache.budget_ratio": "share of all experts' bytes",
    "cache.hot_experts": "popular experts of each MoE layer, hottest first; static keeps them, preload loads them",
    "cache.preload": "whether experts are on the device before the first pass; by default with static and resident",
    "cache.seed": "of the policy random",
    "prefetch": "what is loaded before the router has spoken",
    "prefetch.mode": "hint: load only; verify: load to the end; commit: run the predicted experts (inexact)",
    "prefetch.hot_experts": "for popularity: experts of each MoE layer to have, hottest first",
    "prefetch.recall": "for oracle (simulator only): share of the true experts that it names",
    "prefetch.seed": "for oracle: of its mistakes",
    "prefill": "how prompts are read",
    "prefill.strategy": "on-demand, or stream: while a layer computes, all experts of the next are copied",
    "prefill.micro_batch": "tokens of a prompt per pass",
    "prefetch.max_experts": "at most so many experts of the next layer",
    "utility": "how useful experts will be to the next pass, and what is loaded by it; with cache.policy utility",
    "utility.signal": "speculative: by the tokens of a pass; autoregressive, recency: ablations",
    "utility.boundaries": "fixed, or following the usual fluctuation or the capacity of layers",
    "utility.loads": "what is loaded ahead: none; drafting: what the balancer plans then; always: also meanwhile",
    "cpu": "which experts the CPU runs from host memory, beside the device",
    "cpu.policy": "none: load what is missing; misses: the CPU runs what is not there; threshold: if few tokens ask",
    "cpu.layers": "MoE layers altogether on the CPU: how many from the first on, which (from 0), or 'all'",
    "cpu.max_tokens": "threshold: experts with more tokens in a pass are loaded",
    "cpu.admissions": "experts that ran on the CPU: at most so many on their way to the device at once; 0: none",
    "cpu.hot_misses": "of balanced: misses run on the CPU, load if hot, or balance: whatever ends the layer sooner",
    "cpu.threads": "cores that run these experts",
    "device": "where the slots are; link numbers are used by the emulated device alone",
    "device.backend": "auto: CUDA where the model is on a CUDA device, else emulated",
    "device.serial": "true: wait for every load where it is issued (for debugging)",
    "provenance": "where this comes from and what was predicted; for information, changes nothing",
    "provenance.predicted_tpot_ms": "time per output token on held-out tokens of the trace",
    "provenance.routing": "of the trace's generated tokens; a run says when its routing is unlike it",
    "provenance.error_band": "where the measured time is expected, as shares of the prediction",
}


def save_config(config: OffloadConfig, path: Path, comments: Sequence[str] = ()) -> None:
    """Write a configuration as TOML, atomically, with a comment at every key that needs one.

    Args:
        config: what to write; `load_config` gives an equal one back.
        path: the file.
        comments: further lines for the head of the file.

    Raises:
        StudioError: the place cannot be written to.
    """
    path = Path(path)
    write_text_atomic(path, config_text(config, path.name, comments))


def config_text(config: OffloadConfig, name: str, comments: Sequence[str] = ()) -> str:
    """The text of a configuration file called `name`; see `save_config`."""
    document = tomlkit.document()
    for line in (*(line.format(name=name) for line in HEADER), *comments):
        for part in line.splitlines() or [""]:
            document.add(tomlkit.comment(part))
    document.add(tomlkit.nl())
    _fill(document, config.model_dump(mode="json", exclude_none=True), "")
    return tomlkit.dumps(document)


def load_config(path: Path) -> OffloadConfig:
    """Read a configuration from a TOML file.

    Raises:
        ConfigError: no such file, not TOML (with the line), another schema version, or the first key that is
            unknown (with the nearest known one), missing or wrong.
    """
    path = Path(path)
    try:
        raw = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
    except OSError as error:
        raise ConfigError(
            f"cannot read configuration {path}: {error.strerror}; make one with 'moe-studio tune --out {path}'"
        ) from error
    except (tomlkit.exceptions.TOMLKitError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not TOML: {error}; mend that line") from error
    return parse_config(raw, where=f"configuration {path}")


def _fill(target: Any, values: dict[str, Any], prefix: str) -> None:
    """Add values to a document or table, tables after plain keys, each with its comment."""
    for name, value in sorted(values.items(), key=lambda item: isinstance(item[1], dict)):
        place = f"{prefix}{name}"
        comment = KEY_COMMENTS.get(place)
        if isinstance(value, dict):
            target.add(name, _table(value, place, comment))
            continue
        item = tomlkit.item(value)
        if comment:
            item.comment(comment)
        target.add(name, item)


def _table(values: dict[str, Any], place: str, comment: str | None) -> Table:
    table = tomlkit.table()
    if comment:
        table.comment(comment)
    _fill(table, values, f"{place}.")
    return table
