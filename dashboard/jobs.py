"""Long work in the background, with progress and a way to stop it.

A job runs in a process of its own, so that the page answers while it works. Locally its progress and result travel
through a `diskcache` in a temporary folder that only this user can open and that goes when the process ends. The
cache holds JSON: nothing is pickled into it, and a pickle found in it is refused, so no file planted there is run.

With several users or machines, take Celery instead (https://dash.plotly.com/background-callbacks): give the Dash of
`create_app` a `dash.CeleryManager(Celery(__name__, broker=..., backend=...))` in place of `local_manager()`, start
workers with `celery -A your_module:celery worker`, and let all of them see the same folder under the same path. Pages
need no change, since they use Dash's background callbacks alone.

A page puts `progress_panel("tune")` in its layout and connects its work with `background(app, "tune", ...)`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import dash_mantine_components as dmc
import psutil
from dash import Dash, DiskcacheManager, Input, Output, State, html
from multiprocess import Process

from dashboard.job_cache import JobCache

Report = Callable[[int, int, str], None]
"""Progress: (steps done, steps in all, what is being done)."""

ABANDONED_S = 180.0
"""A job ends when no page has asked for it for so long. Browsers let a hidden page ask once a minute."""
_WATCH_S = 1.0


class LocalManager(DiskcacheManager):  # type: ignore[misc]
    """A manager of one application's jobs. Dash tells every manager of a process of every job, known by its source
    text and its outputs; with two applications in one process, one would run the jobs of the other. And Dash names a
    result by the values that the job was given; of two jobs with equal values, started by two quick changes or in two
    windows, the first to ask would take away the result that the other waits for. Last, Dash leaves a job alone whose
    page was closed, and waits for it when the server ends; these jobs end with their server and with their page."""

    def __init__(self, cache: JobCache) -> None:
        super().__init__(cache)
        self._asked: dict[str, float] = {}

    def call_job_fn(self, key: str, job_fn: Callable[..., None], args: Any, context: Any) -> int:
        """Start a job; gives its process id."""
        values = (key, self._make_progress_key(key), args, context)
        self._note_asked(key)
        waits = os.getpid(), self.handle, _asked_key(key)
        process = Process(target=_watched, args=(job_fn, values, waits), daemon=True)
        process.start()
        return int(process.pid)

    def get_progress(self, key: str) -> Any:
        """How far a job is, for a page that asks; that it asked is noted."""
        if time.monotonic() - self._asked.get(key, 0.0) > ABANDONED_S / 30:
            self._note_asked(key)
        return super().get_progress(key)

    def clear_cache_entry(self, key: str) -> None:
        """Forget a value, and who asked for it."""
        super().clear_cache_entry(key)
        if self._asked.pop(key, None) is not None:
            self.handle.delete(_asked_key(key))

    def _note_asked(self, key: str) -> None:
        self._asked[key] = time.monotonic()
        self.handle.set(_asked_key(key), time.time())

    def build_cache_key(self, fn: Any, args: Any, cache_args_to_ignore: Any, triggered: Any) -> str:
        """A name for the result of one start of a job."""
        return f"{super().build_cache_key(fn, args, cache_args_to_ignore, triggered)}-{uuid4().hex}"

    def register(self, key: str, fn: Any, progress: Any) -> None:
        """Take a job that was made for this manager."""
        if getattr(fn, "manager", self) is self:
            super().register(key, fn, progress)


def local_manager() -> DiskcacheManager:
    """Where the application's background callbacks run: processes of this machine. The folder of its cache is made
    here, for this user alone, and removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="moe-studio-jobs-")
    cache = JobCache(folder)
    atexit.register(_remove, cache, folder)
    return LocalManager(cache)


def progress_panel(page: str) -> Any:
    """A bar, a line of text and a button to stop, hidden while nothing runs; `page` is the prefix of the ids."""
    bar = dmc.Progress(id=f"{page}-progress", value=0, size="lg", **{"aria-label": "Progress"})
    stop = dmc.Button("Stop", id=f"{page}-stop", variant="default", size="xs", disabled=True)
    text = html.Div(id=f"{page}-progress-text", className="note", role="status")
    return html.Div(
        [dmc.Group([html.Div(bar, className="progress-bar"), stop]), text],
        id=f"{page}-job",
        className="job",
        hidden=True,
    )


def background(
    app: Dash,
    page: str,
    outputs: Sequence[Output],
    inputs: Sequence[Input | State],
    work: Callable[..., Any],
    *,
    disabled_while_running: Sequence[str] = (),
    run_on_load: bool = False,
    stops_on_leaving: bool = False,
) -> None:
    """Connect work that takes long.

    Args:
        app: the application.
        page: prefix of the ids, as given to `progress_panel`.
        outputs: what the work gives, as for a callback; figures and components are allowed.
        inputs: what starts it, and what it is given besides.
        work: called as `work(report, *values)` in a process of its own. Errors reach the page's error line.
        disabled_while_running: ids of components, such as the start button, that are disabled meanwhile.
        run_on_load: whether opening the page starts the work, too.
        stops_on_leaving: whether opening another page stops the work, which nobody would see any more.
    """

    def run(set_progress: Callable[[tuple[float, str]], None], *values: Any) -> Any:
        def report(done: int, total: int, text: str = "") -> None:
            set_progress((100.0 * done / max(1, total), text or f"{done:,} of {total:,}"))

        return work(report, *values)

    run.manager = app._background_manager  # type: ignore[attr-defined]
    bar, text, stop = f"{page}-progress", f"{page}-progress-text", f"{page}-stop"
    stops = [Input(stop, "n_clicks"), *([Input("location", "pathname")] if stops_on_leaving else [])]
    running = [(Output(f"{page}-job", "hidden"), False, True), (Output(stop, "disabled"), False, True)]
    running += [(Output(name, "disabled"), True, False) for name in disabled_while_running]
    app.callback(
        list(outputs),
        list(inputs),
        background=True,
        interval=200,
        running=running,
        progress=[Output(bar, "value"), Output(text, "children")],
        progress_default=[0, "starting"],
        cancel=stops,
        prevent_initial_call=not run_on_load,
    )(run)


def _asked_key(key: str) -> str:
    return f"{key}-asked"


def _watched(job_fn: Callable[..., None], values: Sequence[Any], waits: Sequence[Any]) -> None:
    """Run a job in this process, until nobody waits for it."""
    threading.Thread(target=_watch, args=waits, daemon=True).start()
    job_fn(*values)


def _watch(server: int, cache: JobCache, asked: str) -> None:
    """End this process and those it started when its server is gone or no page asks for the job any more."""
    with suppress(OSError, sqlite3.Error):  # the cache went with its server
        while os.getppid() == server and time.time() - cache.get(asked, time.time()) < ABANDONED_S:
            time.sleep(_WATCH_S)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)


def _remove(cache: JobCache, folder: str) -> None:
    cache.close()
    shutil.rmtree(folder, ignore_errors=True)
