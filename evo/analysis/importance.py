"""Which parameters matter for being fast (PED-ANOVA, by Optuna, over what a run has measured), and which of their values a
run has hardly tried."""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evo.analysis.failures import TriedValue, read_tried, tried_values
from evo.analysis.times import RelativeTime, search_times
from evo.errors import UsageError
from evo.lineage import LATEST
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.space import Value

__all__ = ["Importance", "read_importance", "undersampled"]

_LEAST_TIMED = 20
"""Timed candidates below which nothing is said: Optuna asks for five in the top tenth; half as many here."""
_MOST_TIMED = 2000
"""Of more, so many are drawn: Optuna takes seconds over ten thousand, and the shares hardly change."""
_MOST_IMPORTANT = 3
_LEAST_SHARE = 0.05
_UNDERSAMPLED = 1 / 3
"""Of the candidates that each value would have had if all had been tried alike."""
_SHOWN_VALUES = 3


@dataclass(frozen=True, kw_only=True)
class Importance:
    """A parameter of one workload's search. importance: its share of all of them, which sum to 1; None where it cannot be
    had, and `note` says why. candidates: those that have the parameter (a conditional one is not in all), of the `timed`
    ones, among which are those whose machine code had been timed already. values: distinct ones among them. tried: every
    value that any candidate had, the least tried first.
    """

    workload: str
    parameter: str
    importance: float | None
    candidates: int
    timed: int
    values: int
    conditional: bool
    note: str
    tried: tuple[TriedValue, ...]


def read_importance(store: Store, run: str = LATEST, *, quantile: float = 0.1) -> list[Importance]:
    """By workload, the most important parameter first.

    How much a parameter's values among the fastest `quantile` of the timed candidates differ from its values among all of
    them (Watanabe et al. 2023, arXiv 2304.10255). It tells what to look at, not what a value gains: `explain` does that. A
    search does not sample evenly; what it soon settled can look unimportant because nothing else was tried. Where a
    parameter is not active it counts as absent, not as some value (arXiv 2601.20800).
    Raises UnknownNameError, or StoreError for an ambiguous prefix.
    """
    if not 0.0 < quantile < 1.0:
        raise UsageError(f"the quantile {quantile:g} is not between 0 and 1; 0.1 asks what the fastest tenth have in common")
    stored = store.run(run)
    with store.reading() as connection:
        rows = read_tried(connection, stored.id)
        times = search_times(connection, stored.id, [row.id for row in rows])
    tasks: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        tasks[row.task].append(row)
    workloads = enumerate(stored.spec.workloads)
    return [i for number, workload in workloads for i in _of_task(workload.key, tasks[number], times, quantile)]


_Points = list[tuple[dict[str, Value], float]]


def _of_task(
    workload: str, rows: Sequence[Any], times: Mapping[int, RelativeTime], quantile: float
) -> list[Importance]:
    timed = [(Genome.from_json(row.genome).parameters, times[row.id].ratio) for row in rows if row.id in times]
    points = random.Random(0).sample(timed, _MOST_TIMED) if len(timed) > _MOST_TIMED else timed
    held: dict[str, list[Value]] = defaultdict(list)
    for parameters, _ in points:
        for name, value in parameters.items():
            held[name].append(value)
    distinct = {name: list({repr(value): value for value in values}.values()) for name, values in held.items()}
    varied = {name: values for name, values in distinct.items() if len(values) > 1}
    known = _ped_anova(points, varied, quantile) if varied and len(points) >= _LEAST_TIMED else {}
    total = sum(known.values())
    tried: dict[str, list[TriedValue]] = defaultdict(list)
    for one in sorted(tried_values(rows, times), key=lambda one: (one.candidates, one.parameter, repr(one.value))):
        tried[one.parameter].append(one)
    found = []
    for name in held:
        share = known[name] / total if name in known and total > 0 else None
        note = ""
        if len(points) < _LEAST_TIMED:
            note = f"only {len(points)} candidates were timed, {_LEAST_TIMED} are needed"
        elif name not in varied:
            note = "one value only"
        elif share is None:
            note = "no difference" if name in known else "not in every candidate"
        found.append(
            Importance(
                workload=workload,
                parameter=name,
                importance=share,
                candidates=len(held[name]),
                timed=len(points),
                values=len(distinct[name]),
                conditional=len(held[name]) < len(points),
                note=note,
                tried=tuple(tried[name]),
            )
        )
    return sorted(found, key=lambda i: (i.importance is None, -(i.importance or 0.0), i.parameter))


def _ped_anova(points: _Points, varied: Mapping[str, Sequence[Value]], quantile: float) -> dict[str, float]:
    """The importance of each parameter in `varied`, as far as this version of Optuna tells. varied: the values of a
    parameter.

    Of an in-memory study with the points as its trials. Every parameter is categorical there: the values of an ordinal one
    are few, and evo's are spaced as factors and not as differences.
    """
    import optuna  # takes longer than most commands
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    class Choices(optuna.distributions.CategoricalDistribution):
        """A parameter's values, which all trials share: equal to itself alone, and never copied. Optuna compares and copies
        the choices of every trial one by one, and spends nearly all of its time on that."""

        __eq__ = object.__eq__
        __hash__ = object.__hash__

        def __deepcopy__(self, known: dict[int, Any]) -> Choices:
            return self

    logging = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few trials and rare values, which the notes tell
            study = optuna.create_study()
            space = {name: Choices(tuple(values)) for name, values in varied.items()}
            study.add_trials(
                [
                    optuna.trial.create_trial(
                        params={n: v for n, v in parameters.items() if n in space},
                        distributions={n: space[n] for n in parameters if n in space},
                        value=score,
                    )
                    for parameters, score in points
                ]
            )
            evaluator = PedAnovaImportanceEvaluator(target_quantile=quantile)
            return dict(get_param_importances(study, evaluator=evaluator, normalize=False))
    finally:
        optuna.logging.set_verbosity(logging)


def undersampled(records: Sequence[Importance]) -> list[TriedValue]:
    """Of one workload: of its most important parameters (three at most, none with less than a twentieth) the values with the
    fewest candidates, three at most of each. The run cannot tell whether these are slow."""
    shares = [r for r in records if r.importance is not None and r.importance >= _LEAST_SHARE]
    found = []
    for record in shares[:_MOST_IMPORTANT]:
        few = [t for t in record.tried if t.candidates < _UNDERSAMPLED * t.of / len(record.tried)]
        found += few[:_SHOWN_VALUES]
    return found
