"""Many scenarios at once: over processes of this machine, or a Dask or Ray cluster, with the same results.

Results are kept by the digest of everything that went in, so a stopped sweep goes on where it was. Scenarios that come
to the same simulation, such as cards with more memory than all experts need, are simulated once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import joblib

from simulator.answers import answer_of
from simulator.cluster import computing
from simulator.policies.capacity import plan_capacity
from simulator.replay import simulate
from simulator.result_store import ResultStore
from simulator.scenario import Scenario, put_together
from simulator.sweep_plan import SweepPlan
from trace_capture.errors import ConfigError, StudioError
from trace_capture.trace import Trace

Progress = Callable[[int, int], None]
Answer = dict[str, Any]
_BATCHES_PER_WORKER = 4
"""So that a slow scenario at the end does not hold up all others, and few messages are sent."""
_MAX_BATCH = 64


@dataclass(frozen=True)
class Point:
    """One scenario of a sweep and its answer.

    Attributes:
        values: what was swept, by name, as text.
        answer: see `simulator.answers.answer_of`, or `{"error": why}` where the scenario is impossible.
    """

    values: dict[str, str]
    scenario: Scenario
    answer: Answer

    @property
    def error(self) -> str | None:
        """Why there is no answer."""
        return self.answer.get("error")


def grid(base: Scenario, sweeps: Mapping[str, Sequence[str]]) -> list[tuple[dict[str, str], Scenario]]:
    """All combinations of swept values, the last one fastest; the base alone where nothing is swept.

    Raises:
        ConfigError: a name is unknown, a value does not fit, or there is nothing to sweep over.
    """
    for name, values in sweeps.items():
        if not values:
            raise ConfigError(f"--sweep {name} has no values; give some, such as {name}=1,2,4")
    combinations = product(*sweeps.values())
    named = [dict(zip(sweeps, values, strict=True)) for values in combinations]
    return [(values, base.set_values(values)) for values in named]


def sweep(
    trace: Trace,
    scenarios: Sequence[tuple[dict[str, str], Scenario]],
    *,
    store: ResultStore | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    bounds: bool = True,
    progress: Progress | None = None,
) -> list[Point]:
    """Answer scenarios about one trace.

    Args:
        trace: what all of them replay.
        scenarios: swept values and scenario, as `grid` gives them.
        store: results known before are taken from it, new ones put there as they come.
        jobs: processes of this machine; -1 for one per core. Of a cluster: tasks at a time, -1 for its own choice.
        cluster: None, `dask`, `dask:ADDRESS`, `ray` or `ray:ADDRESS`; without an address one is started here.
        bounds: also work out bounds and regret.
        progress: called with (scenarios done, in all).

    Returns:
        the points in the order of `scenarios`, the same whoever computed them.

    Raises:
        ConfigError: the cluster is not known, or cannot be reached.
    """
    keys, answers = _keys(SweepPlan(trace, bounds), scenarios)
    if store is not None:
        answers |= store.find(keys)
    missing = {key: scenario for key, (_, scenario) in zip(keys, scenarios, strict=True) if key not in answers}
    asked = Counter(keys)
    done = sum(asked[key] for key in answers)
    if progress is not None:
        progress(done, len(scenarios))
    for results in _computed(trace, missing, jobs, cluster, bounds):
        answers |= results
        if store is not None:
            store.add(results)
        done += sum(asked[key] for key in results)
        if progress is not None:
            progress(done, len(scenarios))
    return [Point(values, scenario, answers[key]) for key, (values, scenario) in zip(keys, scenarios, strict=True)]


def _keys(plan: SweepPlan, scenarios: Sequence[tuple[dict[str, str], Scenario]]) -> tuple[list[str], dict[str, Answer]]:
    """Keys of what has to be simulated, one for scenarios that come to the same; and of what is impossible the answer,
    by a key of its own."""
    keys: list[str] = []
    impossible: dict[str, Answer] = {}
    for _, scenario in scenarios:
        try:
            keys.append(plan.key(scenario))
        except StudioError as error:
            keys.append(f"impossible: {error}")
            impossible[keys[-1]] = {"error": str(error)}
    return keys, impossible


def answer(trace: Trace, scenario: Scenario, bounds: bool = True) -> Answer:
    """Simulate one scenario. What is impossible, such as experts that do not fit, is an answer, too."""
    try:
        question = put_together(trace, scenario)
        run = simulate(question.trace, question.hardware, question.config, bounds=bounds)
    except StudioError as error:
        return {"error": str(error)}
    partitions = plan_capacity(question.config.cache, question.trace.shape, question.cpu_layers)
    return answer_of(run, partitions.total_bytes)


def _computed(
    trace: Trace, missing: Mapping[str, Scenario], jobs: int, cluster: str | None, bounds: bool
) -> Iterator[dict[str, Answer]]:
    """Answers in batches, as they come."""
    if not missing:
        return
    if cluster is None and (jobs == 1 or len(missing) == 1):
        for key, scenario in missing.items():
            yield {key: answer(trace, scenario, bounds)}
        return
    with computing(cluster, jobs) as workers:
        size = max(1, min(_MAX_BATCH, len(missing) // (workers.count * _BATCHES_PER_WORKER)))
        tasks = (joblib.delayed(_answers)(trace, batch, bounds) for batch in _batches(missing, size))
        yield from workers.results(tasks)


def _answers(trace: Trace, batch: dict[str, Scenario], bounds: bool) -> dict[str, Answer]:
    return {key: answer(trace, scenario, bounds) for key, scenario in batch.items()}


def _batches(missing: Mapping[str, Scenario], size: int) -> Iterator[dict[str, Scenario]]:
    items = iter(missing.items())
    while batch := dict(islice(items, size)):
        yield batch
