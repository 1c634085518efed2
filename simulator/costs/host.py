"""Routed experts on the CPU, and what cores and copies do to each other in the host's memory."""

from __future__ import annotations

from typing import NamedTuple

from simulator.costs.rates import positive, value_or
from trace_capture.errors import ProfileError
from trace_capture.hardware import HardwareProfile, HostProfile


class Contention(NamedTuple):
    """How many times longer work takes while experts run on the CPU and copies leave its memory, each at least 1."""

    cpu_ratio: float
    copy_ratio: float


ALONE = Contention(1.0, 1.0)


class HostCosts:
    """The CPU part of a layer's experts.

    The cores read weights at the lowest of what memory gives, what they read and what they work through, less for
    small experts;
    with many rows per expert the operations take longer than the reading. Beside that every expert costs a dispatch
    and every layer a hand-over from the device and back.

    Args:
        profile: a machine with a host.
        cpu_threads: cores that run experts; None: `host.threads`, else all. Rates of one core count so many times, up
            to what memory gives.

    Raises:
        ProfileError: the profile has no host or not so many cores, or a rate in it is zero.
    """

    def __init__(self, profile: HardwareProfile, cpu_threads: int | None = None) -> None:
        host = require_host(profile)
        threads = float(cpu_threads or value_or(host.threads, host.cores.value))
        if cpu_threads is not None and cpu_threads > most_threads(host):
            raise ProfileError(
                f"cpu.threads is {cpu_threads} and {host.name} has {most_threads(host)} cores; take fewer, or correct "
                "host.cores"
            )
        self._ram_bytes_per_s = positive(host.ram_bytes_per_s, "host.ram_bytes_per_s", profile)
        stream = value_or(host.core_bytes_per_s, float("inf"))
        self._peak_bytes_per_s = min(self._ram_bytes_per_s * value_or(host.read_ratio, 1.0), threads * stream)
        self._weights_per_s = threads * positive(host.core_weights_per_s, "host.core_weights_per_s", profile)
        self._flops_per_s = threads * positive(host.core_flops_per_s, "host.core_flops_per_s", profile)
        self._shared_bytes_per_s = self._ram_bytes_per_s * positive(
            host.contended_ratio, "host.contended_ratio", profile
        )
        self._half_rate_bytes = host.half_rate_bytes.value
        self._expert_dispatch_ns = host.expert_dispatch_ns.value
        self._layer_dispatch_ns = host.layer_dispatch_ns.value
        if threads <= 0 or self._peak_bytes_per_s <= 0:
            raise ProfileError(
                f"hardware profile '{profile.name}' has no cores in host.cores or host.threads, or no rate for them"
            )

    def bytes_per_s(self, expert_bytes: float, weight_bytes: float) -> float:
        """Rate at which experts of a size are worked through, one row each, at `weight_bytes` bytes per weight."""
        peak = min(self._peak_bytes_per_s, self._weights_per_s * weight_bytes)
        return peak * expert_bytes / (expert_bytes + self._half_rate_bytes)

    def experts_ns(self, experts: int, expert_bytes: int, rows_per_expert: float, weight_bytes: float) -> int:
        """`experts` of one layer.

        Args:
            experts: how many; 0 takes no time.
            expert_bytes: size of one.
            rows_per_expert: tokens that each of them serves.
            weight_bytes: bytes per weight, scales included.
        """
        if not experts:
            return 0
        flops = 2.0 * rows_per_expert * expert_bytes / weight_bytes
        each_s = max(expert_bytes / self.bytes_per_s(expert_bytes, weight_bytes), flops / self._flops_per_s)
        return round(self._layer_dispatch_ns + experts * (self._expert_dispatch_ns + each_s * 1e9))

    def contention(self, expert_bytes: int, weight_bytes: float, copy_bytes_per_s: float) -> Contention:
        """Slowdowns while cores work through experts of a size and copies leave memory at a rate.

        Both ask for what they would take alone, and share what memory gives to both in that proportion. Published
        pairs (GB/s of CPU, copies; alone, then together): 30.0, 13.1 -> 21.9, 8.4 (FreeToken issue 436);
        63.8, 24.9 -> 54.0, 23.9 (FreeToken pull request 232); 65.8, 25.1 -> 43.4, 21.6 (FreeToken issue 281).
        """
        asked = self.bytes_per_s(expert_bytes, weight_bytes) + copy_bytes_per_s
        ratio = max(1.0, asked / self._shared_bytes_per_s)
        return Contention(ratio, ratio)


def most_threads(host: HostProfile) -> int:
    """Threads that can run experts without sharing a core."""
    return int(max(host.cores.value, value_or(host.threads, 0.0)))


def thread_counts(most: int) -> tuple[int, ...]:
    """Numbers of threads worth a try: powers of two up to `most`, and that many; rising."""
    return tuple(sorted({most, *(1 << power for power in range(most.bit_length()))}))


def require_host(profile: HardwareProfile) -> HostProfile:
    """The host of a profile.

    Raises:
        ProfileError: it has none.
    """
    if profile.host is None:
        raise ProfileError(
            f"hardware profile '{profile.name}' says nothing of the host's cores and memory, which experts on the "
            "CPU need; name a host with --host, or add a [host] table"
        )
    return profile.host
