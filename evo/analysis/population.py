"""All candidates of a run as columns, and what they add up to.

A run may have a million candidates. Everything here is computed on arrays that are read once: new bests, families of
structural choices, pairs of parameters, kinds of failure, and what each operator brought.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from evo.analysis.failures import Failure
from evo.analysis.operators import ComparedCandidate, compare_with_parents, parents_by_child
from evo.analysis.times import read_disturbed, search_times
from evo.evaluation import PASSED
from evo.lineage import models as m
from evo.lineage.models import ORDERS_PER_RUN, key_range, public_id
from evo.lineage.store import Store
from evo.problem.space import Value

__all__ = [
    "Cell",
    "FailureKind",
    "Family",
    "HeatMap",
    "Milestone",
    "OperatorShare",
    "Population",
    "Suspect",
    "TriedParameter",
    "failure_kinds",
    "group_families",
    "map_pairs",
    "read_milestones",
    "read_population",
    "share_credit",
]

Rows = NDArray[np.int64]
"""Indices into the columns."""

ABSENT = -1
"""Index of the value of a parameter that has no part in a genome."""

_c = m.Candidate


@dataclass(frozen=True, kw_only=True)
class Population:
    """The candidates of one task, a row each, by order.

    order, elapsed_s, score (NaN without one), seconds (in the device process). status, operator: indices into `statuses`
    and `operators`. compared: whether it has a timed parent; better: faster than the fastest of these. best, improvement:
    see `evo.analysis.credit.Trial`. values: by parameter, indices into `tried[parameter]`, ABSENT where it has no part.
    passed: whether the search did not refuse it.
    """

    order: NDArray[np.int64]
    elapsed_s: NDArray[np.float64]
    score: NDArray[np.float64]
    seconds: NDArray[np.float64]
    status: NDArray[np.int32]
    operator: NDArray[np.int32]
    compared: NDArray[np.bool_]
    better: NDArray[np.bool_]
    best: NDArray[np.bool_]
    improvement: NDArray[np.float64]
    passed: NDArray[np.bool_]
    statuses: tuple[str, ...]
    operators: tuple[str, ...]
    values: Mapping[str, NDArray[np.int32]]
    tried: Mapping[str, tuple[Value, ...]]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def speedup(self) -> NDArray[np.float64]:
        """Over the reference; NaN where there is no time."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.score > 0, 1.0 / self.score, np.nan)


@dataclass(frozen=True, kw_only=True)
class TriedParameter:
    """values: those that were tried, in their order. structural: selects another algorithm or code shape."""

    name: str
    values: tuple[Value, ...]
    structural: bool
    why: str = ""


def read_population(store: Store, run_id: int) -> dict[int, Population]:
    """By number of the task; tasks without candidates are left out."""
    first, last = key_range(run_id)
    found: dict[int, list[ComparedCandidate]] = defaultdict(list)
    with store.reading() as connection:
        parents, disturbed = parents_by_child(connection, run_id), read_disturbed(connection, run_id)
        rows = connection.execute(
            select(_c.task, _c.id, _c.elapsed_s, _c.score, _c.seconds, _c.status, _c.operator, _c.genome)
            .add_columns(_c.same_code_as_id)
            .where(_c.id.between(first, last))
            .order_by(_c.id)
        ).all()
        for trial in compare_with_parents(rows, parents, disturbed):
            found[trial.row.task].append(trial)
    return {task: _columns(some) for task, some in sorted(found.items())}


def _columns(some: list[ComparedCandidate]) -> Population:
    _, keys, elapsed, score, seconds, status, operator, genomes, _ = zip(*(t.row for t in some), strict=True)
    statuses, operators = list(dict.fromkeys(status)), list(dict.fromkeys(operator))
    values, tried = _parameters(genomes)
    return Population(
        order=np.array(keys, np.int64) % ORDERS_PER_RUN,
        elapsed_s=np.array(elapsed, float),
        score=np.array([np.nan if s is None else s for s in score], float),
        seconds=np.array(seconds, float),
        status=np.array([statuses.index(s) for s in status], np.int32),
        operator=np.array([operators.index(o) for o in operator], np.int32),
        compared=np.array([t.better is not None for t in some]),
        better=np.array([bool(t.better) for t in some]),
        best=np.array([t.best for t in some]),
        improvement=np.array([t.improvement for t in some]),
        passed=np.array([s in PASSED for s in status]),
        statuses=tuple(statuses),
        operators=tuple(operators),
        values=values,
        tried=tried,
    )


def _parameters(genomes: Sequence[str]) -> tuple[dict[str, NDArray[np.int32]], dict[str, tuple[Value, ...]]]:
    values: dict[str, NDArray[np.int32]] = {}
    known: dict[str, dict[tuple[type, Value], int]] = {}
    for row, text in enumerate(genomes):
        for name, value in json.loads(text)["parameters"].items():
            if name not in known:
                known[name], values[name] = {}, np.full(len(genomes), ABSENT, np.int32)
            seen = known[name]
            values[name][row] = seen.setdefault((type(value), value), len(seen))
    return values, {name: tuple(value for _, value in seen) for name, seen in known.items()}


# New bests


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """A candidate that was faster than all before it on its task. row: in the columns. evaluated: how many were
    tried there by then, itself included."""

    row: int
    order: int
    id: str
    evaluated: int
    elapsed_s: float
    speedup: float
    low: float
    high: float
    median_us: float | None
    refused: bool
    """By the finals, later."""
    disturbed: bool
    """As all times of the workload were: there is nothing better to show."""


def read_milestones(store: Store, run_id: int, uid: str, some: Population, refused: set[int]) -> tuple[Milestone, ...]:
    """refused: orders of the candidates that the finals refused."""
    rows = [int(r) for r in np.flatnonzero(some.best)]
    first, _ = key_range(run_id)
    with store.reading() as connection:
        figures = search_times(connection, run_id, [first + int(some.order[r]) for r in rows])
    found = []
    for row in rows:
        order, ratio = int(some.order[row]), float(some.score[row])
        timing = figures.get(first + order)
        low, high = (timing.ratio_low or ratio, timing.ratio_high or ratio) if timing else (ratio, ratio)
        found.append(
            Milestone(
                row=row,
                order=order,
                id=public_id(uid, order),
                evaluated=row + 1,
                elapsed_s=float(some.elapsed_s[row]),
                speedup=1 / ratio,
                low=1 / high,
                high=1 / low,
                median_us=timing.median_us if timing else None,
                refused=order in refused,
                disturbed=timing is not None and timing.disturbed,
            )
        )
    return tuple(found)


# Families: what the population was made of as the search went on

_CHOICES = 3
_FAMILIES = 8


@dataclass(frozen=True, kw_only=True)
class Family:
    """Candidates that made the same structural choices. choices: None for a parameter that has no part.

    others: number of the small families that this one stands for, which have no choices in common; 0 for a real one.
    best: the lowest ratio.
    """

    choices: tuple[tuple[str, Value | None], ...]
    rows: Rows
    best: float | None
    others: int = 0


def group_families(
    some: Population, parameters: Sequence[TriedParameter], important: Sequence[str]
) -> list[Family]:
    """The largest families and the rest as one, by number of candidates; that of the fastest is always among them.

    Families share the structural choices that mattered most, at most three. important: names, the first mattered most.
    Empty where no structural choice was varied.
    """
    varied = [p.name for p in parameters if p.structural and len(p.values) > 1]
    names = sorted(varied, key=lambda n: important.index(n) if n in important else len(important))[:_CHOICES]
    if not names:
        return []
    kinds, member = np.unique(np.stack([some.values[n] for n in names], axis=1), axis=0, return_inverse=True)
    member = member.reshape(-1)
    order = np.argsort(-np.bincount(member, minlength=len(kinds)), kind="stable")
    kept = list(order[: _FAMILIES - 1] if len(kinds) > _FAMILIES else order)
    best = int(np.nanargmin(some.score)) if np.isfinite(some.score).any() else None
    if best is not None and member[best] not in kept:
        kept[-1] = member[best]
    found = []
    for kind in kept:
        values = [None if i == ABSENT else some.tried[n][i] for n, i in zip(names, kinds[kind], strict=True)]
        rows = np.flatnonzero(member == kind)
        found.append(Family(choices=tuple(zip(names, values, strict=True)), rows=rows, best=_lowest(some.score[rows])))
    rest = np.flatnonzero(~np.isin(member, kept))
    if len(rest):
        found.append(Family(choices=(), rows=rest, best=_lowest(some.score[rest]), others=len(kinds) - len(kept)))
    return found


def _lowest(scores: NDArray[np.float64]) -> float | None:
    return float(np.nanmin(scores)) if np.isfinite(scores).any() else None


# Pairs: what two values together led to

_PAIRED = 4
_MOST_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Cell:
    """best, median: speed-ups, None where nothing passed."""

    tried: int
    passed: int
    best: float | None
    median: float | None


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """cells[row][column], for the values of `down` and `across`; None among values: has no part in the genome."""

    across: str
    down: str
    columns: tuple[Value | None, ...]
    rows: tuple[Value | None, ...]
    cells: tuple[tuple[Cell, ...], ...]


def map_pairs(some: Population, parameters: Sequence[TriedParameter], important: Sequence[str]) -> list[HeatMap]:
    """One for every pair of the four parameters that mattered most."""
    if not np.isfinite(some.score).any():
        return []
    varied = {p.name: p for p in parameters if 1 < len(p.values) <= _MOST_SHOWN}
    names = [n for n in important if n in varied] or list(varied)
    return [_map(some, varied[a], varied[b]) for a, b in combinations(names[:_PAIRED], 2)]


def _map(some: Population, one: TriedParameter, other: TriedParameter) -> HeatMap:
    across, down = (one, other) if len(one.values) <= len(other.values) else (other, one)
    columns, column_of = _axis(some, across)
    rows, row_of = _axis(some, down)
    cells = [
        tuple(_cell(some, (row_of == r) & (column_of == c)) for c in range(len(columns))) for r in range(len(rows))
    ]
    return HeatMap(across=across.name, down=down.name, columns=columns, rows=rows, cells=tuple(cells))


def _axis(some: Population, parameter: TriedParameter) -> tuple[tuple[Value | None, ...], Rows]:
    """The values in their order, and the place among them of each candidate's."""
    tried, indices = some.tried[parameter.name], some.values[parameter.name]
    place = {(type(v), v): i for i, v in enumerate(parameter.values)}
    table = np.array([place[type(v), v] for v in tried] + [len(place)])  # the last stands for ABSENT
    values = (*parameter.values, None) if (indices == ABSENT).any() else parameter.values
    return values, table[indices]


def _cell(some: Population, members: NDArray[np.bool_]) -> Cell:
    ups = some.speedup[members]
    known = ups[np.isfinite(ups)]
    return Cell(
        tried=int(members.sum()),
        passed=int(some.passed[members].sum()),
        best=float(known.max()) if len(known) else None,
        median=float(np.median(known)) if len(known) else None,
    )


# Failures by kind

_REASONS = 3
_MOST_VALUES = 64
_LEAST = 3
"""Candidates that a value must have, to be held responsible for anything."""
_EXCESS = 3.0
"""Standard deviations of a binomial share above which a value is suspect."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """The value with which a failure is the most frequent, beyond what chance explains: `failed` of `number` candidates
    with it. rest: share of the others that failed so."""

    parameter: str
    value: Value
    failed: int
    number: int
    rest: float


@dataclass(frozen=True, kw_only=True)
class FailureKind:
    """reasons: the most frequent, each with how often and one candidate. share: of all candidates."""

    status: str
    number: int
    share: float
    reasons: tuple[tuple[str, int, str], ...]
    suspect: Suspect | None

    @property
    def name(self) -> str:
        return self.status.replace("_", " ")


def failure_kinds(
    some: Population, parameters: Sequence[TriedParameter], failures: Sequence[Failure]
) -> list[FailureKind]:
    """The most frequent first. failures: those whose reasons were read, perhaps not all."""
    found = []
    for code, status in enumerate(some.statuses):
        members = (some.status == code) & ~some.passed
        if members.any():
            known = [f for f in failures if f.status == status]
            examples = {f.reason: f.id for f in reversed(known)}
            common = Counter(f.reason for f in known).most_common(_REASONS)
            found.append(
                FailureKind(
                    status=status,
                    number=int(members.sum()),
                    share=float(members.mean()),
                    reasons=tuple((reason, n, examples[reason]) for reason, n in common),
                    suspect=_suspect(some, parameters, members),
                )
            )
    return sorted(found, key=lambda k: (-k.number, k.status))


def _suspect(
    some: Population, parameters: Sequence[TriedParameter], members: NDArray[np.bool_]
) -> Suspect | None:
    overall, worst, found = float(members.mean()), _EXCESS, None
    for p in parameters if members.sum() >= _LEAST else ():
        if len(p.values) > _MOST_VALUES:
            continue
        for i, value in enumerate(some.tried[p.name]):
            with_it = some.values[p.name] == i
            number, failed = int(with_it.sum()), int(members[with_it].sum())
            if number == len(members) or failed < _LEAST:
                continue
            excess = (failed / number - overall) / np.sqrt(max(overall * (1 - overall), 1e-9) / number)
            if excess > worst:
                worst, rest = float(excess), float(members[~with_it].mean())
                found = Suspect(parameter=p.name, value=value, failed=failed, number=number, rest=rest)
    return found


# Operators


@dataclass(frozen=True, kw_only=True)
class OperatorShare:
    """What an operator did on one task.

    children: candidates it made of parents that have a time; better: those of them that were faster than the fastest of
    their parents; firsts: rows that were faster than everything before them, as `evo operators` counts both. credit: its
    share of all that these gained, in logarithms. seconds: in the device process.
    """

    name: str
    rows: Rows
    passed: int
    children: int
    better: Rows
    firsts: tuple[int, ...]
    credit: float | None
    seconds: float

    @property
    def tried(self) -> int:
        return len(self.rows)


def share_credit(some: Population) -> list[OperatorShare]:
    """The most tried operator first."""
    total = float(some.improvement.sum())
    found = []
    for code, name in enumerate(some.operators):
        rows = np.flatnonzero(some.operator == code)
        found.append(
            OperatorShare(
                name=name,
                rows=rows,
                passed=int(some.passed[rows].sum()),
                children=int(some.compared[rows].sum()),
                better=rows[some.better[rows]],
                firsts=tuple(int(row) for row in rows[some.improvement[rows] > 0]),
                credit=float(some.improvement[rows].sum()) / total if total > 0 else None,
                seconds=float(some.seconds[rows].sum()),
            )
        )
    return sorted(found, key=lambda c: (-c.tried, c.name))
