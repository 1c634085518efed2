"""Where simulations are computed; what a cluster gives is held to what one process gives in test_whatif and below."""

from __future__ import annotations

from collections.abc import Iterator

import joblib
import pytest
from distributed import LocalCluster
from joblib.parallel import ThreadingBackend

from simulator.cluster import Workers, computing
from simulator.tune import TuneOptions, tune
from tests.simulator.builders import make_hardware, make_shape, mixed_trace
from trace_capture.errors import ConfigError


class AllAtOnce(ThreadingBackend):  # type: ignore[misc]
    """A back end of joblib that gives no results as they come, as Ray's."""

    supports_return_generator = False


def square(number: int) -> int:
    return number * number


def test_a_back_end_without_a_stream_of_results_works_in_rounds() -> None:
    """joblib refuses to stream from such a back end; and a sweep keeps what is done before the next round begins."""
    joblib.register_parallel_backend("all-at-once", AllAtOnce)
    taken: list[int] = []

    def tasks() -> Iterator[object]:
        for number in range(19):
            taken.append(number)
            yield joblib.delayed(square)(number)

    with joblib.parallel_config("all-at-once", n_jobs=2):
        results = Workers(2).results(tasks())
        assert next(results) == 0 and len(taken) == 8, "four for each of two workers"
        assert [0, *results] == [number * number for number in range(19)]
        with pytest.raises(ValueError, match="does not support return_as"):
            joblib.Parallel(n_jobs=2, return_as="generator_unordered")(tasks())


def test_tuning_on_a_running_dask_cluster_finds_the_same() -> None:
    trace, hardware = mixed_trace(make_shape(layers=2), seed=8, sequences=2, decode=4), make_hardware(bytes_per_s=1e9)

    def tuned(**options: object) -> object:
        found = tune(trace, hardware, budget_bytes=12_000, options=TuneOptions(trials=2, **options))  # type: ignore[arg-type]
        return found.config, [(one.config, one.figures) for one in found.candidates]

    with LocalCluster(n_workers=2, processes=False, dashboard_address=None) as cluster:
        assert tuned(cluster=f"dask:{cluster.scheduler_address}") == tuned()


def test_other_clusters_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown cluster 'slurm'; give dask"), computing("slurm", 1):
        pass
