"""Promises of tuned configurations held against runs: one pair more for a validation record."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from simulator.policies.config import OffloadConfig
from simulator.validation.record import Pair, ValidationRecord, make_record
from trace_capture.errors import ConfigError, TraceError
from trace_capture.run import Run


def record_promise(path: Path, config: OffloadConfig, run: Run, command: str) -> ValidationRecord:
    """Append what a configuration promised and what a run measured to a live record; make the file if there is none.

    The promise was made for held-out tokens of the trace that the configuration was tuned on, so the error contains
    what the run's prompts are unlike them.

    Args:
        path: of the record.
        config: as `tune` wrote it.
        run: measured, with that configuration.
        command: for a record that is made.

    Raises:
        ConfigError: the configuration promises nothing, or something about another model.
        TraceError: the file is no live record of this model and hardware, or the run decoded nothing.
    """
    promised = config.provenance
    if promised is None:
        raise ConfigError("--record needs a configuration that promises a time per token; give one that tune wrote")
    if promised.model != run.info.model:
        raise ConfigError(f"the configuration promises a time for {promised.model}, and {run.info.model} was run")
    try:
        pair = Pair.model_validate(
            {
                "id": config.title,
                "family": promised.family,
                "predicted_ms": promised.predicted_tpot_ms,
                "measured_ms": run.metrics.tpot_ms,
                "details": {
                    "kind": "promise",
                    "trace_digest": promised.trace_digest,
                    "decode_tokens": run.metrics.decode_tokens,
                    "predicted_hit_rate": promised.predicted_hit_rate,
                    "measured_hit_rate": run.metrics.decode_hit_rate,
                    "config": run.info.config,
                },
            }
        )
    except ValidationError as error:
        raise TraceError("the run decoded no token, so there is no time to record; raise --max-new-tokens") from error
    about = {"model": promised.model, "hardware": promised.hardware, "hardware_digest": promised.hardware_digest}
    if not path.is_file():
        emulated = {"emulated": run.info.emulated, "versions": run.info.versions}
        record = make_record("live", [pair], command, **about, **emulated)
    else:
        old = ValidationRecord.load(path)
        for name, value in ({"source": "live"} | about).items():
            if getattr(old, name) != value:
                raise TraceError(
                    f"validation record {path} has {name} '{getattr(old, name)}' and this run '{value}'; give each "
                    "machine and model a record of its own"
                )
        record = old.with_pairs([pair])
    record.save(path)
    return record
