"""Background jobs: nothing is pickled, progress and result arrive, a stop stops."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import dash_mantine_components as dmc
import plotly.graph_objects as go
import psutil
import pytest
from dash import Dash, Input, Output, State, dcc, html, no_update
from diskcache.core import MODE_PICKLE
from werkzeug.serving import make_server

from dashboard import jobs
from dashboard.job_cache import JobCache
from trace_capture.errors import StudioError


def test_the_cache_holds_json_and_refuses_pickles(tmp_path: Path) -> None:
    with JobCache(str(tmp_path)) as cache:
        figure = go.Figure(go.Bar(x=[1], y=[2]))
        cache["figure"] = [figure, html.P("x"), no_update]
        shown = cache["figure"]
        assert shown[0]["data"][0]["x"] == [1] and shown[1]["props"]["children"] == "x"
        assert shown[2] == {"_dash_no_update": "_dash_no_update"}
        cache["secret"] = b"\x00\xff"
        assert cache["secret"] == b"\x00\xff"
        assert cache._sql("SELECT COUNT(*) FROM Cache WHERE mode = ?", (MODE_PICKLE,)).fetchall() == [(0,)]
        cache._sql("UPDATE Cache SET mode = ?", (MODE_PICKLE,))
        with pytest.raises(StudioError, match="was not read"):
            cache["figure"]


def test_two_starts_with_equal_values_have_results_of_their_own() -> None:
    manager = jobs.local_manager()
    first, second = (manager.build_cache_key(jobs.background, [1, "a"], [], None) for _ in range(2))
    assert first != second
    manager.handle.set(first, "one")
    assert manager.get_result(second, None) is manager.UNDEFINED and manager.get_result(first, None) == "one"


def test_a_job_is_not_forked_while_a_thread_is_within_sqlite() -> None:
    manager = jobs.local_manager()
    started = threading.Event()

    def start() -> None:
        manager.call_job_fn("key", lambda key, *_: manager.handle.set(key, "done"), [], {})
        started.set()

    with manager.handle.transact():
        thread = threading.Thread(target=start)
        thread.start()
        assert not started.wait(0.3)
    thread.join(60)
    assert started.is_set() and getattr(manager.handle._local, "con", None) is None
    _wait_for(lambda: manager.get_result("key", None) == "done")


def test_jobs_end_whatever_other_threads_do_in_the_cache() -> None:
    manager, stop = jobs.local_manager(), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            manager.handle.set("asked", 1)
            manager.get_progress("asked")

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        keys = [f"job {number}" for number in range(8)]
        for key in keys:
            manager.call_job_fn(key, lambda key, *_: manager.handle.set(key, os.getpid()), [], {})
        for key in keys:
            _wait_for(lambda key=key: manager.result_ready(key))
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert len({manager.get_result(key, None) for key in keys} - {os.getpid()}) == len(keys)


def _wait_for(true: Callable[[], bool]) -> None:
    """Wait a minute at most, which is patient enough for a slow machine."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_folder_is_for_this_user_alone_and_goes_with_the_process() -> None:
    folder = Path(jobs.local_manager().handle.directory)
    assert folder.stat().st_mode & 0o077 == 0
    code = "from dashboard import jobs; print(jobs.local_manager().handle.directory)"
    root = Path(jobs.__file__).parent.parent
    left = subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True, text=True).stdout
    assert "moe-studio-jobs-" in left and not Path(left.strip()).exists()


@pytest.fixture
def job_app(tmp_path: Path):
    """A page with one job that counts to 20, and leaves its process id and how far it came."""

    def count(report: jobs.Report, steps: int) -> str:
        (tmp_path / "pid").write_text(str(os.getpid()))
        for step in range(steps):
            report(step, steps, f"step {step}")
            (tmp_path / "new").write_text(str(step))
            (tmp_path / "new").replace(tmp_path / "step")  # a stop may come in the midst of writing
            time.sleep(0.1)
        return f"counted to {steps}"

    app = Dash(__name__, background_callback_manager=jobs.local_manager(), serve_locally=True)
    start = html.Button("Start", id="start")
    steps = dcc.Input(id="steps", value=12, type="number")
    app.layout = dmc.MantineProvider([start, steps, jobs.progress_panel("demo"), html.P(id="result")])
    jobs.background(
        app, "demo", [Output("result", "children")], [Input("start", "n_clicks"), State("steps", "value")],
        lambda report, _, steps: [count(report, steps)], disabled_while_running=["start"],
    )  # fmt: skip
    server = make_server("127.0.0.1", 0, app.server, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.browser
def test_a_job_reports_finishes_and_can_be_stopped(visit: Callable[..., object], job_app: str, tmp_path: Path) -> None:
    with visit(job_app, "#start") as page:
        assert page.locator("#demo-job").is_hidden()
        page.locator("#start").click()
        page.wait_for_function("document.querySelector('#demo-progress-text').innerText.startsWith('step')")
        assert page.locator("#start").is_disabled()
        page.wait_for_selector("#result:has-text('counted to 12')")
        page.locator("#demo-job").wait_for(state="hidden")
        assert int((tmp_path / "pid").read_text()) != os.getpid()
        page.locator("#steps").fill("600")
        page.locator("#start").click()
        page.wait_for_function("document.querySelector('#demo-progress-text').innerText.startsWith('step')")
        page.get_by_role("button", name="Stop").click()
        page.locator("#demo-job").wait_for(state="hidden")
        reached = (tmp_path / "step").read_text()
        page.wait_for_timeout(500)
        assert (tmp_path / "step").read_text() == reached and int(reached) < 500
        assert page.locator("#result").inner_text() == "counted to 12"


def test_a_job_ends_when_no_page_asks_for_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ABANDONED_S", 10.0)
    manager = jobs.local_manager()
    job = psutil.Process(manager.call_job_fn("key", lambda *_: time.sleep(600), [], {}))
    asked = manager.handle.get("key-asked")
    time.sleep(1)
    manager.get_progress("key")
    assert manager.handle.get("key-asked") >= asked + 1, "a page that asks keeps its job"
    assert job.status() != psutil.STATUS_ZOMBIE
    gone, _ = psutil.wait_procs([job], timeout=300)
    assert gone


def test_a_job_ends_when_its_server_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, time; from dashboard import jobs\n"
        "manager = jobs.local_manager()\n"
        "work = lambda *values: time.sleep(600)\n"
        "print(manager.call_job_fn('key', work, [], {}), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    root = Path(jobs.__file__).parent.parent
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    left = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, stdout=subprocess.PIPE, text=True, timeout=600
    )
    _, alive = psutil.wait_procs([psutil.Process(int(left.stdout))] if psutil.pid_exists(int(left.stdout)) else [], 60)
    assert all(one.status() == psutil.STATUS_ZOMBIE for one in alive)
