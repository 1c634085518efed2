"""What is exported: a configuration with all that is known of the model, the machine and the routing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simulator.policies.capacity import Capacity, plan_capacity
from simulator.policies.config import OffloadConfig
from simulator.policies.popularity import check_hot_experts
from trace_capture.errors import ConfigError, TraceError
from trace_capture.expert_counts import ExpertCounts, popularity
from trace_capture.hardware import HardwareProfile
from trace_capture.model_shape import ModelShape
from trace_capture.rewindow import KIND, rewindow
from trace_capture.statistics import Counts
from trace_capture.trace import DraftSettings, Trace


@dataclass(frozen=True)
class ExportOptions:
    """What a file for another engine says and a configuration does not.

    Attributes:
        model_path: weights on the machine that will run them, a GGUF file or a model folder.
        draft_model: the same of a draft model.
        context: tokens of context to make room for; None: the engine's own default.
    """

    model_path: str | None = None
    draft_model: str | None = None
    context: int | None = None


@dataclass(frozen=True)
class ExportSource:
    """A configuration to export.

    Attributes:
        config: what to say in the target's terms.
        shape: the model, in the format its weights are stored in.
        hardware: the machine, if it is known.
        trace: routing of the workload, if there is one: expert counts come from it, and predictions.
        popular: counts without order, in place of a trace, where there are only those.
        options: paths and sizes to write.
    """

    config: OffloadConfig
    shape: ModelShape
    hardware: HardwareProfile | None = None
    trace: Trace | None = None
    options: ExportOptions = ExportOptions()
    popular: ExpertCounts | None = None

    @cached_property
    def cpu_layers(self) -> frozenset[int]:
        """MoE layers that the configuration runs on the CPU altogether.

        Raises:
            ConfigError: the model has no such layer.
        """
        return self.config.cpu.whole_layers(self.shape.num_moe_layers)

    @cached_property
    def capacity(self) -> Capacity:
        """Device memory for experts.

        Raises:
            ConfigError: the configuration does not fit the model.
        """
        if self.config.cache.hot_experts is not None:
            check_hot_experts(self.config.cache.hot_experts, self.shape)
        return plan_capacity(self.config.cache, self.shape, self.cpu_layers)

    @property
    def budget_bytes(self) -> int:
        """Device memory for experts, in all."""
        return min(self.capacity.total_bytes, self.shape.total_expert_bytes)

    @property
    def is_even(self) -> bool:
        """Whether no layer on the device is given more than one slot above another, or all share one pool."""
        on_device = [count for layer, count in enumerate(self.slots or ()) if layer not in self.cpu_layers]
        return not on_device or max(on_device) - min(on_device) <= 1

    @property
    def slots(self) -> tuple[int, ...] | None:
        """Expert slots per MoE layer [L]; None where all layers share one pool."""
        if self.config.cache.scope == "global":
            return None
        sizes = zip(self.capacity.partition_bytes, self.shape.expert_bytes, strict=True)
        return tuple(partition // each for partition, each in sizes)

    @cached_property
    def counts(self) -> Counts | None:
        """Generated tokens per expert, int64 [L, E] (all tokens where none was generated); None where not known."""
        known = self.trace or self.popular
        return None if known is None else popularity(known)

    @cached_property
    def parts(self) -> tuple[Trace, Trace] | None:
        """What predictions count hot experts on, and what they replay: the training and the held-out part of the
        trace, or twice the whole of one that is too short to be divided; None without a trace."""
        from simulator.tune import split_trace

        if self.trace is None:
            return None
        try:
            return split_trace(self.trace)
        except TraceError:
            return self.trace, self.trace

    @property
    def drafted_parts(self) -> tuple[Trace, Trace] | None:
        """As `parts`, with passes as the tuner made them where it chose drafts; as they were captured else."""
        provenance = self.config.provenance
        if self.parts is None or provenance is None or provenance.gamma is None:
            return self.parts
        if provenance.gamma and provenance.acceptance_ratio is None:
            return self.parts
        gamma, kept = provenance.gamma, provenance.acceptance_ratio or 0.0
        first, second = (rewindow(part, gamma, kept, draft_bytes=provenance.draft_bytes) for part in self.parts)
        return first, second

    @property
    def training_counts(self) -> Counts | None:
        """As `counts`, of the part that predictions do not replay."""
        return None if self.parts is None else popularity(self.parts[0])

    def by_decoder_layer(self, counts: Counts) -> Counts:
        """Counts [L, E] as int64 [decoder layers, E], with zeros where a layer has no experts."""
        rows = np.zeros((self.shape.num_layers, self.shape.num_experts), dtype=np.int64)
        rows[list(self.shape.moe_layer_ids)] = counts
        return rows

    @property
    def threads(self) -> int | None:
        """CPU threads for experts: the configuration's where it uses the CPU, else the machine's cores."""
        if self.config.cpu.used_threads is not None:
            return self.config.cpu.used_threads
        host = None if self.hardware is None else self.hardware.host
        return None if host is None else int((host.threads or host.cores).value)

    @property
    def draft(self) -> DraftSettings | None:
        """How to draft: as many tokens per pass as the tuner found best, else as the trace was drafted, if it was."""
        recorded, provenance = self.recorded_draft, self.config.provenance
        if provenance is None or provenance.gamma is None:
            return recorded
        if not provenance.gamma:
            return None
        return (recorded or DraftSettings(kind=KIND, gamma=1)).model_copy(update={"gamma": provenance.gamma})

    @property
    def recorded_draft(self) -> DraftSettings | None:
        """How the trace was drafted, where it was decoded speculatively."""
        return None if self.trace is None else self.trace.info.draft

    def decoder_layers(self, moe_layers: tuple[int, ...]) -> tuple[int, ...]:
        """Decoder layers of MoE layers."""
        return tuple(self.shape.moe_layer_ids[layer] for layer in moe_layers)

    def check(self) -> None:
        """Refuse routing of another model.

        Raises:
            ConfigError: layers or experts of routing and model differ, or the configuration does not fit the model.
        """
        _ = self.capacity
        known = self.trace or self.popular
        if known is None:
            return
        have, want = known.shape, self.shape
        if (have.moe_layer_ids, have.num_experts) != (want.moe_layer_ids, want.num_experts):
            raise ConfigError(
                f"the routing is of {have.name} ({have.num_moe_layers} MoE layers x {have.num_experts} experts) and "
                f"the model is {want.name} ({want.num_moe_layers} x {want.num_experts}); give one of the same model"
            )
