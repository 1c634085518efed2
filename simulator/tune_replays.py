"""Replays for the tuner: each configuration once, over processes, kept by the digest of everything that went in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import joblib

from simulator.cluster import Workers, computing
from simulator.policies.config import OffloadConfig
from simulator.replay import simulate
from simulator.result_store import ResultStore
from simulator.tune_goal import Figures, figures_of
from trace_capture.errors import StudioError
from trace_capture.files import text_digest
from trace_capture.hardware import HardwareProfile
from trace_capture.trace import Trace
from trace_capture.versions import software_versions

Progress = Callable[[int, int], None]
Cancelled = Callable[[], bool]


class TuningStopped(StudioError):
    """Somebody asked to stop. What was simulated is kept where the tuner was given a study."""


class Part(NamedTuple):
    """A trace to replay, with its digest worked out once."""

    trace: Trace
    digest: str


class Steps:
    """Counts simulations for the progress callback, and stops between two of them when asked to.

    Args:
        progress: called with (done, in all).
        cancelled: asked before each; True stops.
    """

    def __init__(self, progress: Progress | None, cancelled: Cancelled | None) -> None:
        self.total = 0
        self._progress = progress
        self._cancelled = cancelled
        self.done = 0

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if self._progress is not None:
            self._progress(self.done, self.total)

    def check(self) -> None:
        """Go on, or not.

        Raises:
            TuningStopped: somebody asked to stop.
        """
        if self._cancelled is not None and self._cancelled():
            raise TuningStopped(
                f"tuning was stopped after {self.done} of {self.total} steps; the same call with the same study goes on"
            )


class Replays:
    """Figures of configurations on parts of a trace.

    Args:
        hardware: the machine.
        store: results known before are taken from it, new ones put there as they come.
        jobs: processes; -1 for one per core.
        cluster: see `simulator.cluster.computing`; one that is named is kept until `close`.
        steps: told of each replay, new or known.
    """

    def __init__(
        self, hardware: HardwareProfile, store: ResultStore | None, jobs: int, cluster: str | None, steps: Steps
    ) -> None:
        self._hardware = hardware
        self._machine = hardware.digest
        self._versions = software_versions("simpy")
        self._store = store
        self._jobs = jobs
        self._cluster = cluster
        self._workers: Workers | None = None
        self._open = ExitStack()
        self._steps = steps
        self._known: dict[str, dict[str, Any]] = {}

    def figures(self, wanted: Sequence[tuple[Part, OffloadConfig]]) -> list[Figures | None]:
        """Those of each, in order; None where a configuration is impossible.

        Raises:
            TuningStopped: see `Steps`.
        """
        keys = [self._key(part, config) for part, config in wanted]
        if self._store is not None:
            self._known |= self._store.find(key for key in keys if key not in self._known)
        missing = {key: item for key, item in zip(keys, wanted, strict=True) if key not in self._known}
        for _ in range(len(wanted) - len(missing)):
            self._steps.step()
        self._steps.check()
        for key, result in self._computed(missing):
            self._known[key] = result
            if self._store is not None:
                self._store.add({key: result})
            self._steps.step()
            self._steps.check()
        found = [self._known[key] for key in keys]
        return [None if "error" in result else Figures(**result) for result in found]

    def remembered(self, name: str, inputs: Any, work: Callable[[], Any]) -> Any:
        """What `work` gives for these inputs, once for all runs with the same store; plain JSON."""
        key = text_digest(json.dumps([name, inputs, self._versions], sort_keys=True))
        known = self._store.find([key]) if self._store is not None else {}
        if key not in known:
            known = {key: work()}
            if self._store is not None:
                self._store.add(known)
        return known[key]

    def _key(self, part: Part, config: OffloadConfig) -> str:
        chosen = config.model_dump(mode="json", exclude={"label", "provenance"})
        inputs = {"tune": 1, "trace": part.digest, "hardware": self._machine, "config": chosen}
        return text_digest(json.dumps(inputs | {"versions": self._versions}, sort_keys=True))

    def _computed(self, missing: Mapping[str, tuple[Part, OffloadConfig]]) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._cluster is None and (self._jobs == 1 or len(missing) < 2):
            for key, (part, config) in missing.items():
                yield _replayed(key, part.trace, self._hardware, config)
            return
        tasks = (
            joblib.delayed(_replayed)(key, part.trace, self._hardware, config)
            for key, (part, config) in missing.items()
        )
        if self._workers is None:
            self._workers = self._open.enter_context(computing(self._cluster, self._jobs))
        yield from self._workers.results(tasks)

    def close(self) -> None:
        """Give processes or cluster back."""
        self._open.close()
        self._workers = None


def _replayed(key: str, trace: Trace, hardware: HardwareProfile, config: OffloadConfig) -> tuple[str, dict[str, Any]]:
    """One replay. That a configuration is impossible is a result, too."""
    try:
        run = simulate(trace, hardware, config, bounds=False)
    except StudioError as error:
        return key, {"error": str(error)}
    return key, figures_of(run, trace.shape).as_json()
