"""What an export takes from its configuration where nothing else is given."""

from __future__ import annotations

from simulator.policies.config import OffloadConfig
from trace_capture.errors import ConfigError, ModelError
from trace_capture.known_shapes import known_shape
from trace_capture.model_shape import ModelShape


def tuned_format(config: OffloadConfig, shape: ModelShape) -> str | None:
    """The weight format that a configuration was tuned with, where that was for the same model in another format."""
    model, _, wanted = (config.provenance.model if config.provenance else "").partition(":")
    name, _, present = shape.name.partition(":")
    return wanted if wanted and model == name and present != wanted else None


def tuned_shape(config: OffloadConfig) -> ModelShape:
    """The model that a configuration was tuned for, where that is a built-in one.

    Raises:
        ConfigError: it is not, or the configuration does not name one.
    """
    name = config.provenance.model if config.provenance else ""
    try:
        return known_shape(name)
    except ModelError as error:
        what = f"'{name}', the configuration's model, has no built-in shape" if name else "the model is not known"
        raise ConfigError(f"{what}: give --trace t.parquet, or --model with a config.json") from error
