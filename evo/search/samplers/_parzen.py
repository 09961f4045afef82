"""Optuna's tree-structured Parzen estimator over a `Space`, with a bounded history and nothing printed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import Trial, TrialState, create_trial

from evo.problem.space import Ordinal, Parameter, Point, Space

__all__ = ["ParzenModel"]


@dataclass(kw_only=True)
class _Record:
    """A point and what became of it; `score` is None while it runs, and where it failed."""

    point: Point
    state: TrialState = TrialState.RUNNING
    score: float | None = None
    trial: int = -1
    """Its number in the present study."""


class ParzenModel:
    """Suggests points like the good ones and unlike the rest (Bergstra et al. 2011; Watanabe 2023).

    The cost of a suggestion grows with the history, so the study is begun anew, from the best and the latest
    points, whenever it has outgrown `history` by half. Deterministic in `seed` and the sequence of calls.
    """

    def __init__(self, space: Space, seed: int, history: int) -> None:
        self._space, self._seed, self._history = space, seed, history
        self._records: list[_Record] = []
        # Positions, not values: an estimator tells 1 and True apart no better than Python does.
        self._positions = {p.name: {(type(v), v): i for i, v in enumerate(p.values)} for p in space.parameters}
        self._distributions = {p.name: _distribution(p) for p in space.parameters}
        self._generation = 0
        self._begin([])

    def suggest(self) -> Point:
        """A point that respects conditions, not necessarily constraints, and may have been suggested before."""
        trial = self._study.ask()
        point: Point = {}
        for p in self._space.parameters:
            if self._space.is_active(p, point):
                point[p.name] = p.values[_suggest(trial, p)]
        # What is evaluated may be another point, so trials are added by `expect`, not kept from here.
        self._study.tell(trial, state=TrialState.FAIL)
        self._trials += 1
        return point

    def expect(self, point: Point) -> int:
        """Says that `point` is being evaluated; returns its ticket for `learn`. Points nearby are avoided."""
        record = _Record(point=point)
        self._records.append(record)
        self._add(record)
        return len(self._records) - 1

    def learn(self, ticket: int, score: float | None) -> None:
        """The result of an expected point; None if it failed, which ranks below every score."""
        record = self._records[ticket]
        record.score = score
        record.state = TrialState.PRUNED if score is None else TrialState.COMPLETE
        self._study.tell(record.trial, score, state=record.state)
        if self._live > self._history + self._history // 2:
            self._begin(self._worth_keeping())

    def _worth_keeping(self) -> list[_Record]:
        """Those that run, the best quarter of the history, the latest three quarters; in their order."""
        done = [r for r in self._records if r.state is not TrialState.RUNNING]
        ranked = sorted((r.score, i) for i, r in enumerate(done) if r.score is not None)
        quarter = self._history // 4
        kept = {i for _, i in ranked[:quarter]} | set(range(max(0, len(done) - 3 * quarter), len(done)))
        running = [r for r in self._records if r.state is TrialState.RUNNING]
        return [done[i] for i in sorted(kept)] + running

    def _begin(self, records: list[_Record]) -> None:
        self._trials = self._live = 0
        with _quiet():
            sampler = optuna.samplers.TPESampler(
                multivariate=True,
                group=True,
                constant_liar=True,
                n_startup_trials=0,
                seed=(self._seed + self._generation) % 2**32,
            )
            self._study = optuna.create_study(sampler=sampler, storage=optuna.storages.InMemoryStorage())
        self._generation += 1
        for record in records:
            self._add(record)

    def _add(self, record: _Record) -> None:
        params = {name: self._positions[name][type(value), value] for name, value in record.point.items()}
        self._study.add_trial(
            create_trial(
                state=record.state,
                params=params,
                distributions={name: self._distributions[name] for name in params},
                value=record.score,
            )
        )
        record.trial = self._trials
        self._trials += 1
        self._live += 1


def _distribution(parameter: Parameter) -> BaseDistribution:
    if isinstance(parameter, Ordinal):
        return IntDistribution(0, len(parameter.values) - 1)
    return CategoricalDistribution(range(len(parameter.values)))


def _suggest(trial: Trial, parameter: Parameter) -> int:
    if isinstance(parameter, Ordinal):
        return trial.suggest_int(parameter.name, 0, len(parameter.values) - 1)
    return trial.suggest_categorical(parameter.name, range(len(parameter.values)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna's notes on experimental features and new studies, held back for the moment."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
