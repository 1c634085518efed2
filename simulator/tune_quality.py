"""What speculative execution costs in quality, layer by layer, for the tuner: from a record that `evaluate` wrote.

The record measures the divergence of the model when *every* layer commits to its predictions. What a single layer adds
is not measured. It is taken to be a share of that divergence in proportion to the layer's wrong predictions (1 minus
its recall), and shares are added up. That layers do not amplify or cancel each other's errors, and that a wrong expert
costs as much in every layer, is an approximation. It is exact for all layers and for none, and in between it ranks
layers and keeps a budget by estimate only, so the tuned configuration should be evaluated itself (`evaluate --modes
config`). The upper end of the record's interval is taken where it has one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from simulator.policies.config import OffloadConfig
from trace_capture.errors import ConfigError
from trace_capture.model_shape import ModelShape


class _Estimate(BaseModel):
    value: float
    high: float | None = None


class _LayerRecall(BaseModel):
    layer: int | None
    slot: _Estimate


class _Mode(BaseModel):
    mode: str
    kl_nats: _Estimate
    recall: tuple[_LayerRecall, ...] = ()


class _Record(BaseModel):
    """The fields of `runtime.evaluate.Evaluation` that matter here; others are ignored."""

    model: str
    config: OffloadConfig
    modes: tuple[_Mode, ...]


@dataclass(frozen=True)
class CommitCost:
    """Estimated divergence that each layer adds when it commits to what a source predicts.

    Attributes:
        source: the prefetch source that was evaluated.
        kl_nats: per MoE layer [L], mean over tokens of KL(exact || committed); infinite where nothing was predicted.
    """

    source: str
    kl_nats: tuple[float, ...]

    @property
    def order(self) -> list[int]:
        """Layers that may commit, the cheapest first."""
        known = [layer for layer, cost in enumerate(self.kl_nats) if math.isfinite(cost)]
        return sorted(known, key=lambda layer: (self.kl_nats[layer], layer))

    def cost_nats(self, layers: Sequence[int]) -> float:
        """Of these layers together, by the additive approximation."""
        return math.fsum(self.kl_nats[layer] for layer in layers)

    def most_layers(self, budget_nats: float) -> int:
        """How many layers of `order` stay within a budget."""
        order = self.order
        count = 0
        while count < len(order) and self.cost_nats(order[: count + 1]) <= budget_nats:
            count += 1
        return count


def read_commit_cost(path: Path, shape: ModelShape) -> CommitCost:
    """Read a record of `moe-studio evaluate --json` or `--out`.

    Raises:
        ConfigError: the file is no such record, is about another model, or did not evaluate the mode `commit`.
    """
    try:
        record = _Record.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give what 'moe-studio evaluate' wrote") from error
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"{path} is no record of 'moe-studio evaluate --json'; give one to --quality") from error
    if record.model != shape.name:
        raise ConfigError(f"{path} evaluates {record.model}, and the trace is of {shape.name}; evaluate that model")
    commit = next((mode for mode in record.modes if mode.mode == "commit"), None)
    if commit is None or not commit.recall:
        raise ConfigError(f"{path} says nothing of the mode commit; run 'moe-studio evaluate --modes commit --json'")
    wrong = {item.layer: 1 - item.slot.value for item in commit.recall if item.layer is not None}
    if max(wrong) >= shape.num_moe_layers:
        raise ConfigError(
            f"{path} has more MoE layers than the {shape.num_moe_layers} of the trace; evaluate that model"
        )
    whole_nats = max(commit.kl_nats.value, commit.kl_nats.high or 0.0)
    total = math.fsum(wrong.values())
    costs = [
        (whole_nats * wrong[layer] / total if total else whole_nats / len(wrong)) if layer in wrong else math.inf
        for layer in range(shape.num_moe_layers)
    ]
    return CommitCost(record.config.prefetch.source, tuple(costs))


def parse_quality_budget(text: str) -> float:
    """Nats per token of `kl=0.02`.

    Raises:
        ConfigError: it cannot be read.
    """
    name, _, value = text.partition("=")
    try:
        nats = float(value)
    except ValueError:
        nats = math.nan
    if name.strip() != "kl" or not nats >= 0:
        raise ConfigError(f"--quality-budget {text}: give kl=NATS, such as kl=0.02")
    return nats
