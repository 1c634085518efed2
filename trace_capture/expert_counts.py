"""How often each expert was used, without the order: what formats hold that only count, and what caches that keep
popular experts need. Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from trace_capture.errors import TraceError
from trace_capture.files import text_digest, write_text_atomic
from trace_capture.model_shape import ModelShape
from trace_capture.statistics import GENERATING, Counts, expert_load
from trace_capture.trace import Trace

COUNTS_SCHEMA_VERSION = 1
COUNTS_SUFFIX = ".json"


class _CountsFile(BaseModel):
    """What the JSON file says, in this order."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["expert counts"] = "expert counts"
    schema_version: int = COUNTS_SCHEMA_VERSION
    source: str
    order: Literal["not recorded"] = "not recorded"
    options: dict[str, Any]
    shape: ModelShape
    counts: list[list[int]]


@dataclass(frozen=True)
class ExpertCounts:
    """Tokens that each expert got, over a whole recording.

    Nothing is known of which token came after which, so hit rates of caches that evict, prefetch and time cannot be
    told from it.

    Attributes:
        shape: the model.
        counts: int64 [L, E].
        source: `import:<format>`.
        options: where it came from, and under `notes` what a reader should know.
    """

    shape: ModelShape
    counts: Counts
    source: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = (self.shape.num_moe_layers, self.shape.num_experts)
        if self.counts.shape != wanted:
            raise TraceError(
                f"expert counts of {self.counts.shape[0]} layers x {self.counts.shape[-1]} experts do not fit "
                f"{self.shape.name} with {wanted[0]} MoE layers x {wanted[1]} experts; give the right --model"
            )
        if (self.counts < 0).any() or not self.counts.any():
            raise TraceError("expert counts are negative or all zero; record them again")

    @property
    def digest(self) -> str:
        """SHA-256 over shape and counts, as `sha256:<hex>`."""
        return text_digest(self.shape.model_dump_json() + json.dumps(self.counts.tolist()))

    def save(self, path: Path) -> None:
        """Write the counts as JSON, atomically.

        Raises:
            TraceError: the name does not end in `.json`, by which counts are told from a trace.
            StudioError: the place cannot be written to.
        """
        path = Path(path)
        if path.suffix != COUNTS_SUFFIX:
            raise TraceError(f"{path}: these are counts of experts without their order; give --out a name in .json")
        content = _CountsFile(source=self.source, options=self.options, shape=self.shape, counts=self.counts.tolist())
        head = json.dumps(content.model_dump(mode="json", exclude={"counts"}), indent=1).removesuffix("\n}")
        rows = ",\n  ".join(json.dumps(row) for row in content.counts)
        write_text_atomic(path, f'{head},\n "counts": [\n  {rows}\n ]\n}}\n')

    @staticmethod
    def load(path: Path) -> ExpertCounts:
        """Read and check a file of counts.

        Raises:
            TraceError: missing, not JSON, of another schema version, or its counts do not fit its shape.
        """
        path = Path(path)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TraceError(f"cannot read expert counts {path}: {error.strerror}") from error
        except ValueError as error:
            raise TraceError(f"{path} is not JSON ({error}); import the counts again") from error
        if not isinstance(raw, dict) or raw.get("kind") != "expert counts":
            raise TraceError(f"{path} is no file of expert counts; make one with 'moe-studio import {path} --out ...'")
        if raw.get("schema_version") != COUNTS_SCHEMA_VERSION:
            raise TraceError(
                f"{path} has schema version {raw.get('schema_version')}, this program reads {COUNTS_SCHEMA_VERSION}; "
                "import the counts again"
            )
        try:
            content = _CountsFile.model_validate(raw)
            counts = np.array(content.counts, dtype=np.int64).reshape(len(content.counts), -1)
        except (ValidationError, ValueError) as error:
            what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise TraceError(f"{path}: {what}; import the counts again") from error
        return ExpertCounts(content.shape, counts, content.source, content.options)


def load_popularity(path: Path) -> Trace | ExpertCounts:
    """A file that tells which experts are popular: counts (`.json`), or a trace to count in.

    Raises:
        TraceError: it cannot be read, or is neither.
    """
    return ExpertCounts.load(path) if Path(path).suffix == COUNTS_SUFFIX else Trace.load(path)


def popularity(source: Trace | ExpertCounts) -> Counts:
    """Tokens that each expert got, int64 [L, E]: of a trace its generated tokens, or all where none was generated."""
    if isinstance(source, ExpertCounts):
        return source.counts
    counts = expert_load(source, GENERATING)
    return counts if counts.any() else expert_load(source)
