"""Importance of parameters for being fast (PED-ANOVA over a run's times), and which of their values were hardly tried."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evo.analysis.failures import TriedValue, read_tried, tried_values
from evo.analysis.times import RelativeTime, search_times
from evo.errors import UsageError
from evo.lineage import LATEST
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.space import Point

_LEAST_TIMED = 20
"""Least number of timed candidates for a statement. Optuna asks for five in the top tenth; this is two."""
_MOST_IMPORTANT = 3
_LEAST_SHARE = 0.05
_UNDERSAMPLED = 1 / 3
"""Share of the candidates that a value would have if all were tried alike; a value with fewer is undersampled."""
_SHOWN_VALUES = 3


@dataclass(frozen=True, kw_only=True)
class Importance:
    """A parameter of one workload's search. importance: its share, all of which sum to 1; None where it is not known, and
    `note` says why. timed: candidates with a time, also a known one of the same machine code. candidates: those among them
    that have the parameter, which may be conditional; values: their distinct values. tried: every value of any candidate,
    the least tried first.
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
    """The importance of each workload's parameters, the most important first.

    It is how much a parameter's values among the fastest `quantile` of the timed candidates differ from its values among all
    of them (Watanabe et al. 2023, arXiv 2304.10255), with the figures that Optuna 5 has for categorical parameters, because
    ordinal ones have few values, spaced as factors. It tells what to look at; `explain` tells what a value gains. A search
    does not sample evenly: a parameter that it soon settled can look unimportant because nothing else was tried. An inactive
    parameter counts as absent, not as some value (arXiv 2601.20800).
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


def _of_task(
    workload: str, rows: Sequence[Any], times: Mapping[int, RelativeTime], quantile: float
) -> list[Importance]:
    points = [(times[row.id].ratio, Genome.from_json(row.genome).parameters) for row in rows if row.id in times]
    slowest = sorted(ratio for ratio, _ in points)[math.ceil(quantile * len(points)) - 1] if points else 0.0
    fast = [point for ratio, point in points if ratio <= slowest]
    every, best = _count_values(point for _, point in points), _count_values(fast)
    weights = {
        name: (best[name].total() / len(fast)) ** 2 / (own.total() / len(points)) * _divergence(best[name], own)
        for name, own in every.items()
    }
    total = sum(weights.values())
    tried: dict[str, list[TriedValue]] = defaultdict(list)
    for one in sorted(tried_values(rows, times), key=lambda one: (one.candidates, one.parameter, repr(one.value))):
        tried[one.parameter].append(one)
    found = []
    for name, own in every.items():
        note = ""
        if len(points) < _LEAST_TIMED:
            note = f"only {len(points)} candidates were timed, {_LEAST_TIMED} are needed"
        elif len(own) == 1:
            note = "one value only"
        elif not total:
            note = "no difference"
        found.append(
            Importance(
                workload=workload,
                parameter=name,
                importance=None if note else weights[name] / total,
                candidates=own.total(),
                timed=len(points),
                values=len(own),
                conditional=own.total() < len(points),
                note=note,
                tried=tuple(tried[name]),
            )
        )
    return sorted(found, key=lambda i: (i.importance is None, -(i.importance or 0.0), i.parameter))


def _count_values(points: Iterable[Point]) -> dict[str, Counter[str]]:
    """The number of points that have each value of a parameter, by parameter."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for point in points:
        for name, value in point.items():
            found[name][repr(value)] += 1
    return found


def _divergence(fast: Counter[str], every: Counter[str]) -> float:
    """Pearson's divergence between the shares of the values among the fast candidates and among all of them."""
    shares = zip(_smoothed(fast, every), _smoothed(every, every), strict=True)
    return sum(share * (among_fast / share - 1) ** 2 for among_fast, share in shares)


def _smoothed(counts: Counter[str], values: Collection[str]) -> list[float]:
    """The share of each value, estimated like a categorical parameter's in Optuna 5: a kernel around each value that occurs,
    spread over all values, and a uniform prior with the weight of one candidate."""
    number, n, kernels = counts.total(), len(values), len(counts) + 1
    return [((counts[v] + number / kernels) / (1 + n / kernels) + 1 / n) / (number + 1) for v in values]


def undersampled(records: Sequence[Importance]) -> list[TriedValue]:
    """Values that a run has tried too rarely to tell whether they are slow: up to three of each important parameter (three
    at most, each with a share of a twentieth or more). records: those of one workload."""
    shares = [r for r in records if r.importance is not None and r.importance >= _LEAST_SHARE]
    found = []
    for record in shares[:_MOST_IMPORTANT]:
        few = [t for t in record.tried if t.candidates < _UNDERSAMPLED * t.of / len(record.tried)]
        found += few[:_SHOWN_VALUES]
    return found
