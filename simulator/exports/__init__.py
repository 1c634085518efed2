"""A configuration in the words of other engines: `export` gives files as text, and says what they cannot say."""

from __future__ import annotations

from dataclasses import replace

from simulator.exports.commands import ABOUT
from simulator.exports.prediction import Prediction, no_prediction, predict_configured, predict_target
from simulator.exports.registry import TARGETS, Target
from simulator.exports.result import Export, ExportedFile, Mapping
from simulator.exports.source import ExportOptions, ExportSource
from simulator.policies.config import OffloadConfig
from simulator.policies.errors import unknown_name
from trace_capture.expert_counts import ExpertCounts
from trace_capture.hardware import HardwareProfile
from trace_capture.model_shape import ModelShape
from trace_capture.trace import Trace
from trace_capture.versions import software_versions

__all__ = ["TARGETS", "Export", "ExportOptions", "ExportedFile", "export"]


def export(
    config: OffloadConfig,
    target: str,
    shape: ModelShape,
    *,
    hardware: HardwareProfile | None = None,
    trace: Trace | None = None,
    options: ExportOptions = ExportOptions(),  # noqa: B008 - frozen
    popular: ExpertCounts | None = None,
) -> Export:
    """A configuration in a target's formats; writes nothing.

    Args:
        config: normally tuned.
        target: a name of `TARGETS`.
        shape: the model, in the format its weights are stored in.
        hardware: the machine: threads and memory come from it, and predictions need it.
        trace: routing: expert counts come from it, and predictions need it.
        options: paths and sizes that the files are to say.
        popular: expert counts without order, where there is no trace.

    Raises:
        ConfigError: no such target, the configuration does not fit the model, or the target cannot do anything like
            it; the message says what.
    """
    if target not in TARGETS:
        raise unknown_name("target", target, TARGETS)
    chosen = TARGETS[target]
    source = ExportSource(config, shape, hardware, trace, options, popular)
    source.check()
    mapping = chosen.mapping(source)
    configured = predict_configured(source)
    predicted = configured if target == "native" else _predicted(source, chosen, mapping)
    about = _about(source, chosen, mapping, configured, predicted)
    return Export(
        target=target,
        title=chosen.title,
        engine=chosen.engine,
        files=tuple(_with_about(mapping.files, about, chosen, target)),
        about=tuple(about),
        command=mapping.command,
        flags=mapping.flags,
        lost=mapping.lost,
        notes=mapping.notes,
        configured=configured,
        predicted=predicted,
    )


def _predicted(source: ExportSource, target: Target, mapping: Mapping) -> Prediction:
    if mapping.mapped is None:
        return no_prediction(mapping.not_predicted)
    parts = source.drafted_parts if mapping.with_drafts else source.parts
    return predict_target(source, parts, mapping.mapped, target.family, mapping.family)


def _about(
    source: ExportSource, target: Target, mapping: Mapping, configured: Prediction, predicted: Prediction
) -> list[str]:
    """What a reader of the files should know, a line each."""
    config, provenance = source.config, source.config.provenance
    machine = provenance.hardware if provenance else source.hardware.name if source.hardware else "no machine given"
    digest = source.trace.digest if source.trace else provenance.trace_digest if provenance else "no trace given"
    version = software_versions().get("moe-studio", "")
    lines = [
        f"Exported by MoE Offload Studio {version}: {config.title}, for {source.shape.name} on {machine}",
        f"Written for: {target.engine}",
        f"Trace: {digest}",
    ]
    if provenance and source.trace and provenance.trace_digest != source.trace.digest:
        lines.append(f"The configuration was tuned on another trace: {provenance.trace_digest}")
    if provenance and source.hardware and provenance.hardware_digest != source.hardware.digest:
        lines.append(f"The configuration was tuned for another machine than {source.hardware.name}")
    lines.append(f"In MoE Offload Studio: {configured.text}")
    if target.mapping is not TARGETS["native"].mapping:
        lines.append(f"With these files: {predicted.text}")
    lines += _room(source)
    lines += [f"Not expressed: {sentence}" for sentence in mapping.lost]
    lines += [f"Note: {sentence}" for sentence in mapping.notes]
    return [" ".join(line.split()) for line in lines]  # one line each, whatever a label or a name holds


def _room(source: ExportSource) -> list[str]:
    """A warning where experts, the other weights and the cache do not fit the device."""
    if source.hardware is None:
        return []
    shape, device = source.shape, source.hardware.device
    needed = source.budget_bytes + sum(shape.dense_bytes) + shape.head_bytes
    needed += shape.cache_bytes(source.options.context or 0)
    if not 0 < device.memory_bytes.value < needed:
        return []
    return [
        f"Too much: experts, other weights and cache take {needed / 2**30:.2f} GiB, and {device.name} has "
        f"{device.memory_bytes.value / 2**30:.2f} GiB"
    ]


def _with_about(files: tuple[ExportedFile, ...], about: list[str], target: Target, name: str) -> list[ExportedFile]:
    """The files with the head comment, and it as a file of its own where none of them can have comments."""
    comments = "\n".join(f"{target.comment} {line}" for line in about)
    done = [replace(file, text=file.text.replace(ABOUT, comments, 1)) for file in files]
    if not any(file.has_about for file in files):
        done.append(ExportedFile(f"{name}.about.txt", "\n".join(about) + "\n", has_about=True))
    return done
