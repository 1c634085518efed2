"""The emulated link: pacing, priority, cancellation, failure."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from runtime.link import CopyJob, EmulatedLink, LinkError

BYTES = 40_000


def job(expert: int, priority: int = 0) -> CopyJob:
    source = torch.full((BYTES // 4,), float(expert))
    return CopyJob((0, expert), BYTES, "demand", priority, [(torch.zeros(BYTES // 4), source)])


def let_begin(first: CopyJob) -> None:
    """Wait until the link's thread has taken a copy up."""
    stop_s = time.monotonic() + 10
    while not first.start_ns:
        assert time.monotonic() < stop_s, "the link does not begin"
        time.sleep(0.0005)


@pytest.fixture
def link() -> Iterator[EmulatedLink]:
    """4 MB/s and 1 ms per copy: 11 ms for each of the test's copies."""
    made = EmulatedLink(4e6, 1_000_000)
    yield made
    made.close()


def test_copies_take_latency_plus_bytes_over_rate_one_after_the_other(link: EmulatedLink) -> None:
    link.spans = []
    jobs = [job(expert) for expert in range(3)]
    link.submit(jobs)
    link.wait([one.key for one in jobs])
    assert link.drain() == [(0, 0), (0, 1), (0, 2)]
    for before, after in zip(link.spans, link.spans[1:], strict=False):
        assert after.start_ns >= before.end_ns
    assert all(span.end_ns - span.start_ns >= 11_000_000 for span in link.spans)
    assert all(torch.equal(*one.pairs[0]) for one in jobs)


def test_nothing_is_reported_before_its_time(link: EmulatedLink) -> None:
    start_ns = time.perf_counter_ns()
    link.submit([job(1)])
    assert link.drain() == []
    link.wait([(0, 1)])
    assert time.perf_counter_ns() - start_ns >= 11_000_000
    assert link.drain() == [(0, 1)]
    assert link.drain() == []


def test_demand_overtakes_queued_prefetches_but_not_the_copy_that_has_begun(link: EmulatedLink) -> None:
    jobs = [job(expert, priority=1) for expert in range(3)]
    link.submit(jobs)
    let_begin(jobs[0])
    link.submit([job(9, priority=0)])
    link.wait([(0, expert) for expert in (0, 1, 2, 9)])
    assert link.drain() == [(0, 0), (0, 9), (0, 1), (0, 2)]


def test_a_queued_copy_can_be_withdrawn_and_a_begun_one_cannot(link: EmulatedLink) -> None:
    jobs = [job(0), job(1)]
    link.submit(jobs)
    let_begin(jobs[0])
    assert link.cancel((0, 1))
    assert not link.cancel((0, 0))
    link.wait([(0, 0), (0, 1)])
    time.sleep(0.02)
    assert link.drain() == [(0, 0)]
    assert not jobs[1].pairs[0][0].any(), "a withdrawn copy was made"


def test_a_key_can_be_submitted_again_after_it_was_withdrawn(link: EmulatedLink) -> None:
    jobs = [job(0), job(1)]
    link.submit(jobs)
    let_begin(jobs[0])
    link.cancel((0, 1))
    again = job(1)
    link.submit([again])
    link.wait([(0, 1)])
    assert link.drain() == [(0, 0), (0, 1)]
    assert again.pairs[0][0].any()


def test_a_failing_copy_reaches_the_thread_that_waits(link: EmulatedLink) -> None:
    broken = CopyJob((2, 5), BYTES, "demand", 0, [(torch.zeros(3), torch.zeros(4))])
    link.submit([broken])
    with pytest.raises(LinkError, match="expert 5 of MoE layer 2"):
        link.wait([(2, 5)])
    link.submit([job(1)])
    with pytest.raises(LinkError):
        link.drain()


def test_a_link_that_fails_between_copies_tells_whoever_waits_next(
    link: EmulatedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: CopyJob) -> None:
        raise RuntimeError("the bus is gone")

    monkeypatch.setattr(link, "_rest", fail)
    link.submit([job(0), job(1)])
    with pytest.raises(LinkError, match="the bus is gone"):
        link.wait([(0, 0), (0, 1)])
        link.drain()
    link.abandon()
    monkeypatch.undo()
    link.submit([job(2)])
    link.wait([(0, 2)])
    assert link.drain() == [(0, 2)]


def test_a_queued_demand_is_seen_until_it_is_withdrawn(link: EmulatedLink) -> None:
    jobs = [job(0, priority=1), job(1, priority=1)]
    link.submit(jobs)
    let_begin(jobs[0])
    assert not link._has_demand()
    link.submit([job(2, priority=0)])
    assert link._has_demand()
    assert link.cancel((0, 2))
    assert not link._has_demand(), "a prefetch is no demand"


def test_closing_ends_the_thread() -> None:
    link = EmulatedLink(1e9, 0)
    thread = link._thread
    link.close()
    assert not thread.is_alive()
