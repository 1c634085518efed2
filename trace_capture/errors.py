"""The exception tree: every mistake a user can make ends in one of these.

StudioError
├── TraceError     a trace or run file, or its content
├── ProfileError   a hardware profile
├── ConfigError    an offload or tuned configuration
└── ModelError     a model folder, architecture or prompt

The command line prints the message as one line and exits with 2. A message names the thing, the place and
the mend. Anything else that is raised is a bug and keeps its traceback.
"""

from __future__ import annotations


class StudioError(ValueError):
    """A mistake in the input: a file, a flag, a configuration, a model or a trace."""


class TraceError(StudioError):
    """A trace or run record is missing, damaged, or says something that cannot be."""


class ProfileError(StudioError):
    """A hardware profile is missing, damaged, or lacks a number that is needed."""


class ConfigError(StudioError):
    """A configuration asks for something that does not exist or does not fit."""


class ModelError(StudioError):
    """A model cannot be loaded, captured or offloaded, or a prompt does not fit it."""
