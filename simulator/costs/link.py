"""Copies from host to device: rate by kind of host memory, latency and issue per copy, chunks, and a disk behind."""

from __future__ import annotations

from simulator.costs.rates import positive
from trace_capture.errors import ProfileError
from trace_capture.hardware import HardwareProfile, LinkProfile, Quantity
from trace_capture.model_shape import ModelShape

RAM_SHARE_FOR_EXPERTS = 0.9
"""Share of the host's memory that experts may take; the rest is the system's and the engine's (a guess)."""


class LinkCosts:
    """The link's part of a load.

    Where the profile names a disk and the host's memory cannot hold all experts, every expert is taken to be on disk
    with the probability of not fitting, and a load costs that share of a disk read. This is a mean: a page cache that
    keeps hot experts does better, and no load is the same as this one.

    Args:
        profile: link, and host and disk where there are any.
        shape: bytes of all experts, against the host's memory.

    Raises:
        ProfileError: a rate is zero, or the link has no rate for the memory it copies from.
    """

    def __init__(self, profile: HardwareProfile, shape: ModelShape) -> None:
        link = profile.link
        rate, name = _rate(link)
        self.bytes_per_s = positive(rate, name, profile)
        self.issue_ns = round(link.issue_ns.value)
        self._latency_ns = link.latency_ns.value
        self._chunk_bytes = (
            None if link.chunk_bytes is None else positive(link.chunk_bytes, "link.chunk_bytes", profile)
        )
        self.disk_ratio = disk_ratio(profile, shape) if profile.disk is not None else 0.0
        self._disk = profile.disk
        if profile.disk is not None:
            positive(profile.disk.bytes_per_s, "disk.bytes_per_s", profile)

    def copies(self, num_bytes: int) -> int:
        """Copies that so many bytes cross in."""
        return 1 if self._chunk_bytes is None else max(1, -int(-num_bytes // self._chunk_bytes))

    def copy_ns(self, num_bytes: int) -> int:
        """From the start of a load to its landing, memory to itself: latency per copy, bytes over the rate, and the
        share of a disk read."""
        link_ns = self.copies(num_bytes) * self._latency_ns + num_bytes / self.bytes_per_s * 1e9
        return round(link_ns + self.disk_ratio * self.disk_ns(num_bytes))

    def load_issue_ns(self, num_bytes: int) -> int:
        """What submitting a load takes of the host's thread."""
        return self.copies(num_bytes) * self.issue_ns

    def disk_ns(self, num_bytes: int) -> float:
        """Reading so many bytes from disk in one go; 0 without a disk."""
        if self._disk is None:
            return 0.0
        return self._disk.latency_ns.value + num_bytes / self._disk.bytes_per_s.value * 1e9


def disk_ratio(profile: HardwareProfile, shape: ModelShape) -> float:
    """Share of all experts' bytes that the host's memory cannot hold; 0 where the profile knows no host."""
    if profile.host is None:
        return 0.0
    return max(0.0, 1 - RAM_SHARE_FOR_EXPERTS * profile.host.ram_bytes.value / shape.total_expert_bytes)


def _rate(link: LinkProfile) -> tuple[Quantity, str]:
    if link.host_memory == "pinned":
        return link.h2d_bytes_per_s, "link.h2d_bytes_per_s"
    if link.pageable_bytes_per_s is None:
        raise ProfileError(f"link '{link.name}' has no pageable_bytes_per_s; add it, or set host_memory to pinned")
    return link.pageable_bytes_per_s, "link.pageable_bytes_per_s"
