"""The candidates of a run as columns: new bests, families of structural choices, pairs of parameters.

A run may have a million candidates. Everything here is computed on arrays that are read once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from evo.analysis.operators import ComparedCandidate, compare_with_parents, parents_by_child
from evo.analysis.times import RelativeTime, read_disturbed, search_times
from evo.evaluation import PASSED
from evo.lineage import StoredRun
from evo.lineage import models as m
from evo.lineage.models import ORDERS_PER_RUN, key_range, public_id
from evo.lineage.store import Store
from evo.problem.space import Space, Value

__all__ = [
    "Cell", "Family", "HeatMap", "Milestone", "Population", "TriedParameter", "group_families", "map_pairs",
    "read_population",
]  # fmt: skip

Rows = NDArray[np.int64]
"""Indices into the columns."""

ABSENT = -1
"""Place of the value of a parameter that has no part in a genome."""
_CHOICES, _FAMILIES = 3, 8
_PAIRED, _MOST_SHOWN = 4, 12

_c = m.Candidate


@dataclass(frozen=True, kw_only=True)
class TriedParameter:
    """values: those that were tried, in the order in which the kernel declares them. places: for each candidate, the index
    of its value among them, or ABSENT. structural: selects another algorithm or code shape."""

    name: str
    values: tuple[Value, ...]
    places: NDArray[np.int32]
    structural: bool
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Milestone(RelativeTime):
    """A candidate that was faster than all before it on its task. evaluated: how many were tried there by then, itself
    included. refused: by the finals, later. Disturbed only where all times of the task were."""

    order: int
    id: str
    evaluated: int
    elapsed_s: float
    refused: bool

    @property
    def low(self) -> float:
        """Limit of the speed-up, like `high`; the speed-up itself without an interval."""
        return self.speedup_low or self.speedup

    @property
    def high(self) -> float:
        return self.speedup_high or self.speedup


@dataclass(frozen=True, kw_only=True)
class Population:
    """The candidates of one task, a row each, by order.

    order, elapsed_s, score (NaN without one), operator (an index into `operators`). passed: the search did not refuse it.
    better, improvement: see `evo.analysis.operators.ComparedCandidate`. milestones: the new bests.
    """

    order: NDArray[np.int64]
    elapsed_s: NDArray[np.float64]
    score: NDArray[np.float64]
    operator: NDArray[np.int32]
    passed: NDArray[np.bool_]
    better: NDArray[np.bool_]
    improvement: NDArray[np.float64]
    operators: tuple[str, ...]
    parameters: tuple[TriedParameter, ...]
    milestones: tuple[Milestone, ...]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def speedup(self) -> NDArray[np.float64]:
        """Over the reference; NaN where there is no time."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.score > 0, 1.0 / self.score, np.nan)


def read_population(
    store: Store, run: StoredRun, spaces: Mapping[int, Space], refused: Collection[str]
) -> dict[int, Population]:
    """By number of the task; tasks without candidates are left out.

    spaces: the kernel's, by number of the task, as far as they are known. refused: ids of those that the finals refused.
    """
    found: dict[int, list[ComparedCandidate]] = defaultdict(list)
    with store.reading() as connection:
        parents, disturbed = parents_by_child(connection, run.id), read_disturbed(connection, run.id)
        rows = connection.execute(
            select(_c.task, _c.id, _c.elapsed_s, _c.score, _c.status, _c.operator, _c.genome, _c.same_code_as_id)
            .where(_c.id.between(*key_range(run.id)))
            .order_by(_c.id)
        ).all()
        for one in compare_with_parents(rows, parents, disturbed):
            found[one.row.task].append(one)
        bests = [one.row.id for some in found.values() for one in some if one.best]
        times = search_times(connection, run.id, bests)
    return {
        task: _columns(
            some,
            _tried_parameters([one.row.genome for one in some], spaces.get(task)),
            tuple(_milestones(run.uid, some, times, refused)),
        )
        for task, some in sorted(found.items())
    }


def _columns(
    some: list[ComparedCandidate], parameters: tuple[TriedParameter, ...], milestones: tuple[Milestone, ...]
) -> Population:
    operators = {name: number for number, name in enumerate(dict.fromkeys(one.row.operator for one in some))}
    return Population(
        order=np.array([one.row.id for one in some], np.int64) % ORDERS_PER_RUN,
        elapsed_s=np.array([one.row.elapsed_s for one in some], float),
        score=np.array([one.row.score for one in some], float),  # None becomes NaN
        operator=np.array([operators[one.row.operator] for one in some], np.int32),
        passed=np.array([one.row.status in PASSED for one in some]),
        better=np.array([bool(one.better) for one in some]),
        improvement=np.array([one.improvement for one in some]),
        operators=tuple(operators),
        parameters=parameters,
        milestones=milestones,
    )


def _milestones(
    uid: str, some: list[ComparedCandidate], times: Mapping[int, RelativeTime], refused: Collection[str]
) -> list[Milestone]:
    found = []
    for row, one in enumerate(some):
        if one.best:
            order = one.row.id % ORDERS_PER_RUN
            name = public_id(uid, order)
            found.append(
                Milestone(
                    **times[one.row.id].figures(),
                    order=order,
                    id=name,
                    evaluated=row + 1,
                    elapsed_s=one.row.elapsed_s,
                    refused=name in refused,
                )
            )
    return found


def _tried_parameters(genomes: Sequence[str], space: Space | None) -> tuple[TriedParameter, ...]:
    """In the order in which the kernel declares them, then those that it does not have any more. Where the kernel does not
    tell, a parameter of words alone is taken for structural."""
    tried: dict[str, dict[str, Value]] = defaultdict(dict)
    points = [json.loads(text)["parameters"] for text in genomes]
    for point in points:
        for name, value in point.items():
            tried[name].setdefault(repr(value), value)
    declared = space.by_name if space else {}
    found = []
    for name in [n for n in declared if n in tried] + sorted(n for n in tried if n not in declared):
        known = declared.get(name)
        order = [repr(value) for value in known.values] if known else []
        keys = sorted(tried[name], key=lambda k: (order.index(k) if k in order else len(order), _rank(tried[name][k])))
        place = {key: i for i, key in enumerate(keys)}
        found.append(
            TriedParameter(
                name=name,
                values=tuple(tried[name][key] for key in keys),
                places=np.array([place[repr(p[name])] if name in p else ABSENT for p in points], np.int32),
                structural=known.structural if known else all(isinstance(v, str) for v in tried[name].values()),
                why=known.why if known else "",
            )
        )
    return tuple(found)


def _rank(value: Value) -> tuple[float, str]:
    """Numbers by size before words by letter."""
    return (float("inf"), value) if isinstance(value, str) else (float(value), "")


# Families: what the population was made of as the search went on


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


def group_families(some: Population, important: Sequence[str]) -> list[Family]:
    """The largest families and the rest as one, by number of candidates; that of the fastest is always among them.

    Families share the structural choices that mattered most, at most three. important: names, the first mattered most.
    Empty where no structural choice was varied.
    """
    varied = [p for p in some.parameters if p.structural and len(p.values) > 1]
    varied.sort(key=lambda p: important.index(p.name) if p.name in important else len(important))
    chosen = varied[:_CHOICES]
    if not chosen:
        return []
    kinds, member = np.unique(np.stack([p.places for p in chosen], axis=1), axis=0, return_inverse=True)
    member = member.reshape(-1)
    order = np.argsort(-np.bincount(member, minlength=len(kinds)), kind="stable")
    kept = list(order[: _FAMILIES - 1] if len(kinds) > _FAMILIES else order)
    best = int(np.nanargmin(some.score)) if np.isfinite(some.score).any() else None
    if best is not None and member[best] not in kept:
        kept[-1] = member[best]
    found = []
    for kind in kept:
        places = zip(chosen, kinds[kind], strict=True)
        choices = tuple((p.name, None if place == ABSENT else p.values[place]) for p, place in places)
        rows = np.flatnonzero(member == kind)
        found.append(Family(choices=choices, rows=rows, best=_lowest(some.score[rows])))
    rest = np.flatnonzero(~np.isin(member, kept))
    if len(rest):
        found.append(Family(choices=(), rows=rest, best=_lowest(some.score[rest]), others=len(kinds) - len(kept)))
    return found


def _lowest(scores: NDArray[np.float64]) -> float | None:
    return float(np.nanmin(scores)) if np.isfinite(scores).any() else None


# Pairs: what two values together led to


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


def map_pairs(some: Population, important: Sequence[str]) -> list[HeatMap]:
    """One for every pair of the four parameters that mattered most."""
    if not np.isfinite(some.score).any():
        return []
    varied = {p.name: p for p in some.parameters if 1 < len(p.values) <= _MOST_SHOWN}
    names = [n for n in important if n in varied] or list(varied)
    return [_map(some, varied[a], varied[b]) for a, b in combinations(names[:_PAIRED], 2)]


def _map(some: Population, one: TriedParameter, other: TriedParameter) -> HeatMap:
    across, down = (one, other) if len(one.values) <= len(other.values) else (other, one)
    columns, rows = _axis(across), _axis(down)
    cells = [
        tuple(_cell(some, (down.places == row) & (across.places == column)) for column in columns) for row in rows
    ]
    return HeatMap(
        across=across.name, down=down.name, columns=tuple(columns.values()), rows=tuple(rows.values()), cells=tuple(cells)
    )


def _axis(parameter: TriedParameter) -> dict[int, Value | None]:
    """Values by their place."""
    absent = {ABSENT: None} if (parameter.places == ABSENT).any() else {}
    return {**dict(enumerate(parameter.values)), **absent}


def _cell(some: Population, members: NDArray[np.bool_]) -> Cell:
    ups = some.speedup[members]
    known = ups[np.isfinite(ups)]
    return Cell(
        tried=int(members.sum()),
        passed=int(some.passed[members].sum()),
        best=float(known.max()) if len(known) else None,
        median=float(np.median(known)) if len(known) else None,
    )
