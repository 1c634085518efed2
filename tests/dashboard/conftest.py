"""A small folder as the demo leaves it, made of real traces, runs and profiles."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dashboard.server import bind_server
from trace_capture.hardware import DeviceProfile, HardwareProfile, LinkProfile, Quantity
from trace_capture.model_shape import ModelShape
from trace_capture.run import Metrics, Run, RunInfo, Span
from trace_capture.trace import Phase, Trace, TraceInfo

LAYERS, EXPERTS, TOP_K = 6, 16, 2
EXPERT_BYTES = 294_912
PREFILL, DECODE = 24, 30


@pytest.fixture(scope="session")
def shape() -> ModelShape:
    return ModelShape(
        name="tiny-moe",
        architecture="qwen3_moe",
        num_layers=LAYERS,
        moe_layer_ids=tuple(range(LAYERS)),
        num_experts=EXPERTS,
        top_k=TOP_K,
        expert_bytes=(EXPERT_BYTES,) * LAYERS,
        dense_bytes=(100_000,) * LAYERS,
    )


@pytest.fixture(scope="session")
def trace(shape: ModelShape) -> Trace:
    """One prefill pass of 24 tokens and 30 decode passes, with a skewed routing that is fixed by its seed."""
    random = np.random.default_rng(7)
    tokens = PREFILL + DECODE
    weight = 1.0 / np.arange(1, EXPERTS + 1)
    experts = np.zeros((tokens, LAYERS, TOP_K), dtype=np.uint16)
    for layer in range(LAYERS):
        order = random.permutation(EXPERTS)
        for token in range(tokens):
            experts[token, layer] = order[random.choice(EXPERTS, TOP_K, replace=False, p=weight / weight.sum())]
    is_prefill = np.arange(tokens) < PREFILL
    return Trace(
        info=TraceInfo(shape=shape, source="synthetic"),
        sequence=np.zeros(tokens, dtype=np.int32),
        pass_id=np.where(is_prefill, 0, np.arange(tokens) - PREFILL + 1).astype(np.int32),
        phase=np.where(is_prefill, int(Phase.PREFILL), int(Phase.DECODE)).astype(np.uint8),
        position=np.arange(tokens, dtype=np.int32),
        token_id=np.arange(tokens, dtype=np.int32),
        accepted=np.ones(tokens, dtype=np.bool_),
        experts=experts,
        weights=np.full(experts.shape, 0.5, dtype=np.float16),
    )


@pytest.fixture(scope="session")
def hardware() -> HardwareProfile:
    def number(value: float) -> Quantity:
        return Quantity(value=value, kind="guess")

    return HardwareProfile(
        name="emulated-2GBps",
        emulated=True,
        link=LinkProfile(
            name="emulated link of 2 GB/s",
            h2d_bytes_per_s=number(2e9),
            latency_ns=number(10_000),
            issue_ns=number(5_000),
            wakeup_ns=number(2_000),
        ),
        device=DeviceProfile(
            name="cpu as device",
            memory_bytes=number(1e9),
            memory_bytes_per_s=number(2e10),
            flops_per_s=number(1e11),
            launch_ns=number(3_000),
        ),
        error_band_ratio=0.1,
    )


MakeRun = Callable[..., Run]


@pytest.fixture(scope="session")
def make_run(trace: Trace) -> MakeRun:
    """A function that makes a run whose spans, terms and TPOT agree with one another.

    Arguments: label, kind, and how many nanoseconds the link takes per copy; `hit_every` says that every n-th
    look-up misses; `emulated` and `band` go into the run's info.
    """

    def make(
        label: str,
        kind: str = "simulated",
        *,
        copy_ns: int = 160_000,
        hit_every: int = 2,
        emulated: bool = True,
        band: float | None = 0.1,
        spans: bool = True,
        scale: float = 1.0,
    ) -> Run:
        timeline, pass_ns, terms, lookups, misses = _play(trace, copy_ns, hit_every, scale)
        tokens = len(pass_ns)
        tpot_ms = sum(pass_ns) / tokens / 1e6
        metrics = Metrics(
            prefill_tokens=PREFILL,
            decode_tokens=tokens,
            tpot_ms=tpot_ms,
            tpot_terms_ms={name: value / tokens / 1e6 for name, value in terms.items()},
            tokens_per_s=1e3 / tpot_ms,
            lookups=lookups,
            hits=lookups - misses,
            decode_hit_rate=1 - misses / lookups,
            hit_rate=1 - misses / lookups,
            loads=misses,
            bytes_loaded=misses * EXPERT_BYTES,
            bytes_per_token=misses * EXPERT_BYTES / tokens,
        )
        info = RunInfo(
            kind=kind,  # type: ignore[arg-type]
            label=label,
            emulated=emulated,
            model=trace.shape.name,
            hardware="emulated-2GBps",
            trace_digest=trace.digest,
            versions={"moe-studio": "0.1.0", "python": "3.11"},
            metrics=metrics,
            error_band_ratio=band if kind == "simulated" else None,
            bounds={"max_ms": tpot_ms * 0.5} if kind == "simulated" else {},
            notes=["fixture of the tests"],
        )
        return Run(info, np.array(pass_ns, dtype=np.int64), tuple(timeline) if spans else ())

    return make


def _play(
    trace: Trace, copy_ns: int, hit_every: int, scale: float
) -> tuple[list[Span], list[int], dict[str, int], int, int]:
    """A serial machine: overhead, then per layer dense work, one copy per miss with a stall, and the experts."""
    now, count, lookups, misses = 0, 0, 0, 0
    spans: list[Span] = []
    pass_ns: list[int] = []
    terms = dict.fromkeys(("dense", "experts", "decide", "stall", "overhead"), 0)
    for item in trace.passes:
        begin, is_decode = now, item.phase == Phase.DECODE

        def spend(track: str, kind: str, duration: int, layer: int = -1, **more: object) -> None:
            nonlocal now
            spans.append(Span(track, kind, now, now + int(duration * scale), item.pass_id, layer, **more))  # noqa: B023
            now += int(duration * scale)
            if is_decode:  # noqa: B023
                terms[kind] += int(duration * scale)

        spend("host", "overhead", 200_000)
        for layer, experts in trace.iter_layers(item):
            spend("device", "dense", 60_000, layer)
            spend("host", "decide", 20_000, layer)
            for expert in experts:
                count += 1
                miss = count % hit_every == 0
                if miss:
                    length = int(copy_ns * scale)
                    reason = "prefetch" if count % 3 == 0 else "demand"
                    spans.append(
                        Span("link", "load", now, now + length, item.pass_id, layer, expert, EXPERT_BYTES, reason)
                    )
                    spend("device", "stall", copy_ns, layer)
                lookups, misses = lookups + is_decode, misses + (miss and is_decode)
            spend("device", "experts", 90_000, layer)
        if is_decode:
            pass_ns.append(now - begin)
    return spans, pass_ns, terms, lookups, misses


@pytest.fixture(scope="session")
def folder(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace, hardware: HardwareProfile, make_run: MakeRun
) -> Path:
    """A folder with three strategies, each predicted and measured, a trace, a profile and a tuned configuration."""
    place = tmp_path_factory.mktemp("demo")
    trace.save(place / "trace.parquet")
    hardware.save(place / "hardware.toml")
    for label, every in (("on-demand", 1), ("LRU, half of the experts", 2), ("tuned", 5)):
        name = label.split(",")[0].lower()
        make_run(label, "simulated", hit_every=every).save(place, f"{name}-predicted")
        make_run(label, "measured", hit_every=every, scale=1.04 if every != 2 else 1.15).save(place, f"{name}-measured")
    (place / "tuned.toml").write_text(
        'label = "tuned"\n\n[cache]\npolicy = "lfu"\nbudget_ratio = 0.5\n', encoding="utf-8"
    )
    return place


FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """One Chromium for all tests."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        reason = "no Chromium found; install it with 'apt-get install chromium'"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    if os.environ.get("CI") != "true":
        pytest.importorskip("playwright.sync_api", reason="playwright is not installed; it is in the extra 'test'")
    from playwright import sync_api as playwright

    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: the folder named by MOE_STUDIO_SCREENSHOTS, else pytest's temporary one."""
    named = os.environ.get("MOE_STUDIO_SCREENSHOTS")
    place = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    place.mkdir(parents=True, exist_ok=True)
    print(f"screenshots: {place}")
    return place


@contextmanager
def _serving(folder: Path) -> Iterator[str]:
    server = bind_server(folder, port=0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def serving() -> Callable[[Path], object]:
    """A context manager that serves a folder and gives the address, without a slash at its end."""
    return _serving


@pytest.fixture(scope="session")
def address(folder: Path) -> Iterator[str]:
    """The folder of all tests, served once."""
    with _serving(folder) as place:
        yield place


@pytest.fixture(scope="session")
def visit(browser: object) -> Iterator[Callable[..., object]]:
    """A context manager that opens an address and gives the Playwright page. When left well, it asserts that the
    console stayed quiet, no request failed, and nothing came from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})  # type: ignore[attr-defined]

    @contextmanager
    def open_page(place: str, wait_for: str, *, width: int = 1280, scheme: str = "light") -> Iterator[object]:
        page = context.new_page()
        page.set_default_timeout(90_000)  # shared machines are slow at times
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        complaints: list[str] = []
        home = "/".join(place.split("/")[:3])
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("response", lambda r: complaints.append(f"{r.status} {r.url}") if r.status >= 400 else None)
        page.on(
            "request",
            lambda r: None if r.url.startswith((home, "data:", "blob:", "file:")) else complaints.append(r.url),
        )
        try:
            page.goto(place)
            page.wait_for_selector(wait_for, state="attached", timeout=90_000)
            yield page
        finally:
            page.evaluate("window.localStorage.clear()")
            page.close()
        assert complaints == []

    yield open_page
    context.close()
