"""Checks and small formulas that all terms share."""

from __future__ import annotations

from trace_capture.errors import ProfileError
from trace_capture.hardware import HardwareProfile, Quantity


def positive(quantity: Quantity, name: str, profile: HardwareProfile) -> float:
    """The value of a rate.

    Raises:
        ProfileError: it is zero; the message says which, by `name`.
    """
    if quantity.value <= 0:
        raise ProfileError(f"hardware profile '{profile.name}' has {name} = 0; a rate above 0 is needed there")
    return quantity.value


def value_or(quantity: Quantity | None, default: float) -> float:
    """The value of an optional number of a profile."""
    return default if quantity is None else quantity.value
