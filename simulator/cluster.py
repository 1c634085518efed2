"""Where simulations are computed: processes of this machine, or a Dask or Ray cluster, through joblib."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import joblib

from trace_capture.errors import ConfigError

_ROUND = 4
"""Tasks per worker that a back end is given at once which gives results only all at once."""


class Workers:
    """What computes within a `computing` block.

    Attributes:
        count: how many tasks run at the same time.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self.count = joblib.effective_n_jobs(jobs)

    def results(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Results of `joblib.delayed` tasks as they come; where the back end cannot (Ray's), round by round."""
        if joblib.parallel.get_active_backend()[0].supports_return_generator:
            yield from joblib.Parallel(n_jobs=self._jobs, return_as="generator_unordered")(tasks)
            return
        waiting = iter(tasks)
        while some := list(islice(waiting, _ROUND * self.count)):
            yield from joblib.Parallel(n_jobs=self._jobs)(some)


@contextmanager
def computing(cluster: str | None, jobs: int) -> Iterator[Workers]:
    """Where joblib computes within the block.

    Args:
        cluster: `dask` or `ray` for one on this machine, `dask:ADDRESS` or `ray:ADDRESS` for a running one; None for
            processes.
        jobs: processes, also of a cluster that is started here; -1 for one per core.

    Raises:
        ConfigError: no such cluster, it cannot be reached, or its package is not installed.
    """
    if cluster is None:
        with joblib.parallel_config("loky"):
            yield Workers(jobs)
        return
    kind, _, address = cluster.partition(":")
    if kind not in ("dask", "ray"):
        raise ConfigError(f"unknown cluster '{cluster}'; give dask, dask:ADDRESS, ray or ray:ADDRESS")
    try:
        with _dask(address, jobs) if kind == "dask" else _ray(address, jobs):
            yield Workers(-1)
    except ImportError as error:
        raise ConfigError(f"--cluster {kind} needs {error.name}: pip install 'moe-studio[cluster]'") from error


@contextmanager
def _dask(address: str, jobs: int) -> Iterator[None]:
    from dask.distributed import Client

    workers = None if jobs == -1 else jobs
    try:
        local = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None}
        client = Client(address) if address else Client(**local)
    except OSError as error:
        raise ConfigError(
            f"there is no Dask scheduler at {address} ({error}); start one, or leave ADDRESS out"
        ) from error
    with client, joblib.parallel_config("dask"):
        yield


@contextmanager
def _ray(address: str, jobs: int) -> Iterator[None]:
    import ray
    from ray.util.joblib import register_ray

    try:
        ray.init(address=address or None, num_cpus=None if address or jobs == -1 else jobs, include_dashboard=False)
    except ConnectionError as error:
        raise _unreachable("Ray cluster", address, error) from error
    register_ray()
    try:
        with joblib.parallel_config("ray"):
            yield
    finally:
        ray.shutdown()


def _unreachable(what: str, address: str, error: Exception) -> ConfigError:
    return ConfigError(f"there is no {what} at {address} ({error}); start one, or leave the address out")
