"""Time of making the drafts that a pass verifies."""

from __future__ import annotations

from simulator.costs.rates import positive
from trace_capture.hardware import HardwareProfile
from trace_capture.trace import DraftSettings


def drafting_ns(profile: HardwareProfile, draft: DraftSettings | None, drafts: int) -> int:
    """`drafts` tokens by a draft model on the device, one after the other.

    Each reads the draft model's weights once, as a small dense model in decode does, and costs a launch. Prompt
    look-up and drafts of unknown making have no weights and take no time.

    Raises:
        ProfileError: the device's memory rate is zero.
    """
    if draft is None or not draft.weight_bytes:
        return 0
    device = profile.device
    bytes_per_s = positive(device.memory_bytes_per_s, "device.memory_bytes_per_s", profile)
    return round(drafts * (draft.weight_bytes / bytes_per_s * 1e9 + device.launch_ns.value))
