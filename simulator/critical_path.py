"""Where the time per output token goes, and the one sentence about what limits a run."""

from __future__ import annotations

from typing import NamedTuple

from trace_capture.run import Metrics, Run

LINK, DEVICE, CPU, HOST = "link", "device", "CPU", "host"
RESOURCE_OF_TERM = {
    "dense": DEVICE,
    "experts": DEVICE,
    "cpu_experts": CPU,
    "drafting": DEVICE,
    "stall": LINK,
    "decide": HOST,
    "issue": HOST,
    "predict": HOST,
    "overhead": HOST,
    "stall.wakeup": HOST,
}
"""What would have to be faster for a term of TPOT, or for a part that differs from its term, to shrink."""
TEXT_OF_PART = {
    "stall.demand": "waiting for copies on demand",
    "stall.late_prefetch": "waiting for prefetches that came late",
    "stall.other_copies": "waiting behind copies for other layers",
    "stall.wakeup": "waking up after copies",
    "stall": "waiting for copies",
    "dense": "attention and the dense rest",
    "dense.attention": "attention",
    "dense.router": "router",
    "dense.shared": "shared experts, norms and dense layers",
    "dense.dense": "attention and the dense rest",
    "dense.launch": "launching the dense kernels",
    "drafting": "making drafts",
    "experts": "experts on the device",
    "cpu_experts": "experts on the CPU",
    "decide": "bookkeeping",
    "issue": "submitting copies",
    "predict": "predicting experts",
    "overhead": "head, sampling and the rest of a pass",
}


class Share(NamedTuple):
    """One part of TPOT.

    Attributes:
        name: a term of the cost model, or a term and its part, such as `stall.demand`.
        resource: what would have to be faster: link, device, CPU or host.
        ms: time per output token.
        ratio: share of TPOT.
    """

    name: str
    resource: str
    ms: float
    ratio: float

    @property
    def text(self) -> str:
        """The part in words."""
        return TEXT_OF_PART.get(self.name, self.name.replace("_", " "))


def critical_path(metrics: Metrics) -> tuple[Share, ...]:
    """The parts of TPOT on the path that the host and the device take through a token; they add up to it.

    A record whose terms do not explain its TPOT gets a part `unexplained`. Work that is hidden, such as a copy under
    a layer's compute, is not on the path. Parts of no length are left out.
    """
    parts: list[tuple[str, str, float]] = []
    parts_of = {"stall": metrics.stall_parts_ms, "dense": metrics.dense_parts_ms}
    for name, ms in metrics.tpot_terms_ms.items():
        resource = RESOURCE_OF_TERM.get(name, HOST)
        for part, each in parts_of.get(name, {}).items():
            parts.append((f"{name}.{part}", RESOURCE_OF_TERM.get(f"{name}.{part}", resource), each))
        if not parts_of.get(name):
            parts.append((name, resource, ms))
    tpot_ms = metrics.tpot_ms
    rest_ms = tpot_ms - sum(ms for _, _, ms in parts)
    if abs(rest_ms) > 1e-9 * tpot_ms:
        parts.append(("unexplained", HOST, rest_ms))
    return tuple(Share(name, resource, ms, ms / tpot_ms if tpot_ms else 0.0) for name, resource, ms in parts if ms)


def what_limits(run: Run) -> str:
    """One sentence: which resource takes most of the time per token, and what a faster one could save at most.

    The savings are bounds for unchanged decisions. A stall cannot shrink by more than itself, and speeding one
    resource up shortens no path through the run by more than the time it was used.
    """
    metrics = run.metrics
    shares = critical_path(metrics)
    if not shares:
        return "No token was decoded, so nothing limits this run."
    by_resource: dict[str, float] = {}
    for share in shares:
        by_resource[share.resource] = by_resource.get(share.resource, 0.0) + share.ms
    limit = max(by_resource, key=lambda name: by_resource[name])
    ms = by_resource[limit]
    largest = max((share for share in shares if share.resource == limit), key=lambda share: share.ms)
    head = f"The {limit} is the limit: {_percent(ms / metrics.tpot_ms)} of {_ms(metrics.tpot_ms)} per token is "
    if limit == LINK:
        return f"{head}waiting for copies{_copies(metrics)}{_mostly(largest, ms)}; {_faster_link(metrics, ms)}."
    work = {DEVICE: "computing on the device", CPU: "computing on the CPU", HOST: "work of the host"}[limit]
    sentence = f"{head}{work}{_mostly(largest, ms)}; a {limit} twice as fast would save at most {_ms(ms / 2)}"
    waiting_ms = by_resource.get(LINK, 0.0)
    if waiting_ms:
        return f"{sentence}, {_faster_link(metrics, waiting_ms)}."
    return f"{sentence}, a faster link nothing."


def _faster_link(metrics: Metrics, waiting_ms: float) -> str:
    busy_ms = metrics.link_busy_ms
    saved_ms = min(waiting_ms, busy_ms / 2) if busy_ms else waiting_ms
    return f"a link twice as fast would save at most {_ms(saved_ms)}"


def _copies(metrics: Metrics) -> str:
    """How much is copied and how long that takes, as far as it is known."""
    if not metrics.bytes_per_token:
        return ""
    text = f" of {_bytes(metrics.bytes_per_token)}"
    if metrics.link_busy_ms:
        rate = metrics.bytes_per_token / metrics.link_busy_ms * 1e3
        text += f" ({_ms(metrics.link_busy_ms)} at {_bytes(rate)}/s)"
    return text


def _mostly(largest: Share, ms: float) -> str:
    if largest.ms >= 0.999 * ms or largest.name == "stall":
        return ""
    return f", {_ms(largest.ms)} of it {largest.text}"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value >= 10 else f"{value:.3g} ms"


def _bytes(value: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            number = value / size
            return f"{number:.1f} {unit}" if number >= 10 else f"{number:.2f} {unit}"
    return f"{value:.0f} bytes"
