"""The search beyond the grid: Optuna's TPE proposes, replays answer, a SQLite study keeps what was answered.

Proposals come in rounds of `ROUND` trials. A round depends on the trials before it, the seed and its place alone: the
sampler is made anew for each with a seed of its own. So the number of processes does not change what is found, and a
search that was broken off goes on as if it had not been: whole rounds are taken from the study, a round that was broken
off is proposed again, the same, and those of its replays that had ended are known to the store of results.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.tune_space import Choices, Space
from trace_capture.errors import ConfigError

if TYPE_CHECKING:
    import optuna

ROUND = 4
"""Trials that are proposed at once, for as many processes."""
_SEED_STEP = 1_000_003

Evaluate = Callable[[Sequence[Choices]], Sequence[float]]


def search(
    space: Space,
    first: Sequence[tuple[Choices, float]],
    evaluate: Evaluate,
    *,
    trials: int,
    seed: int,
    path: Path | None,
    name: str,
) -> list[Choices]:
    """Propose configurations and score them.

    Args:
        space: what may be chosen.
        first: choices whose scores are known, such as the grid's; the study begins with them.
        evaluate: gives the score of each, lower is better.
        trials: proposals beyond `first`.
        seed: of the sampler.
        path: SQLite file that keeps the study; None for none.
        name: of the study in that file. The same name must stand for the same space and `first`.

    Returns:
        what was proposed, in order.

    Raises:
        ConfigError: the file is no study.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    proposed: list[Choices] = []
    with _kept(path, name) as kept:
        known = [] if kept is None else kept.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
        for place, (choices, score) in enumerate(first):
            finished = _fixed(space, choices, score)
            study.add_trial(finished)
            if kept is not None and place >= len(known):
                kept.add_trial(finished)
        while len(proposed) < trials:
            before = len(proposed)
            count = min(ROUND, trials - before)
            past = known[len(first) + before :][:count]
            if len(past) == count:
                study.add_trials(past)
                proposed += [space.choose(optuna.trial.FixedTrial(trial.params)) for trial in past]
                evaluate(proposed[before:])
                continue
            study.sampler = optuna.samplers.TPESampler(seed=(seed * _SEED_STEP + before) % 2**32, constant_liar=True)
            asked = [study.ask() for _ in range(count)]
            proposed += [space.choose(trial) for trial in asked]
            scores = evaluate(proposed[before:])
            for trial, score in zip(asked, scores, strict=True):
                study.tell(trial, score)
            if kept is not None:
                kept.add_trials(study.get_trials(deepcopy=False)[len(first) + before + len(past) :])
    return proposed


def _fixed(space: Space, choices: Choices, score: float) -> optuna.trial.FrozenTrial:
    """A finished trial of known choices."""
    import optuna

    trial = optuna.trial.FixedTrial(choices)
    space.choose(trial)
    return optuna.trial.create_trial(params=trial.params, distributions=trial.distributions, value=score)


@contextmanager
def _kept(path: Path | None, name: str) -> Iterator[optuna.Study | None]:
    """The study in a file, which is closed behind the block."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    if path is None:
        yield None
        return
    try:
        options = {"connect_args": {"timeout": 30}}
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs=options)
        study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
    except (SQLAlchemyError, sqlite3.Error, RuntimeError) as error:
        raise ConfigError(f"{path} is no study of tune ({str(error).splitlines()[0]}); give another file") from error
    try:
        yield study
    finally:
        storage.remove_session()
        storage.engine.dispose()
