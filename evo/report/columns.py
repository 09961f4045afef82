"""The candidates of a run as columns: a run may have a million of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from evo.analysis.credit import Trial, read_disturbed, read_parents, trials
from evo.evaluation import PASSED
from evo.lineage import models as m
from evo.lineage.columns import ORDERS_PER_RUN, key_range
from evo.lineage.store import Store
from evo.problem.space import Value

__all__ = ["Candidates", "read_candidates"]

_NONE = -1
_c = m.Candidate


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Those of one task, a row each, by order.

    order, elapsed_s, score (NaN without one), seconds (in the device process). status, operator: indices into `statuses`
    and `operators`. compared: whether it has a timed parent; better: faster than the fastest of these. best, improvement:
    see `evo.analysis.credit.Trial`. values: by parameter, indices into `tried[parameter]`, -1 where it has no part. passed:
    whether the search did not refuse it.
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


def read_candidates(store: Store, run_id: int) -> dict[int, Candidates]:
    """By number of the task; tasks without candidates are left out."""
    first, last = key_range(run_id)
    found: dict[int, list[Trial]] = defaultdict(list)
    with store.reading() as connection:
        parents, disturbed = read_parents(connection, run_id), read_disturbed(connection, run_id)
        rows = connection.execute(
            select(_c.task, _c.id, _c.elapsed_s, _c.score, _c.seconds, _c.status, _c.operator, _c.genome)
            .add_columns(_c.same_code_as_id)
            .where(_c.id.between(first, last))
            .order_by(_c.id)
        ).all()
        for trial in trials(rows, parents, disturbed):
            found[trial.row.task].append(trial)
    return {task: _columns(some) for task, some in sorted(found.items())}


def _columns(some: list[Trial]) -> Candidates:
    _, keys, elapsed, score, seconds, status, operator, genomes, _ = zip(*(t.row for t in some), strict=True)
    statuses, operators = _Numbered(), _Numbered()
    values, tried = _parameters(genomes)
    return Candidates(
        order=np.array(keys, np.int64) % ORDERS_PER_RUN,
        elapsed_s=np.array(elapsed, float),
        score=np.array([np.nan if s is None else s for s in score], float),
        seconds=np.array(seconds, float),
        status=np.array([statuses[s] for s in status], np.int32),
        operator=np.array([operators[o] for o in operator], np.int32),
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


def _parameters(genomes: tuple[str, ...]) -> tuple[dict[str, NDArray[np.int32]], dict[str, tuple[Value, ...]]]:
    values: dict[str, NDArray[np.int32]] = {}
    known: dict[str, dict[tuple[type, Value], int]] = {}
    for row, text in enumerate(genomes):
        for name, value in json.loads(text)["parameters"].items():
            if name not in known:
                known[name], values[name] = {}, np.full(len(genomes), _NONE, np.int32)
            seen = known[name]
            values[name][row] = seen.setdefault((type(value), value), len(seen))
    return values, {name: tuple(value for _, value in seen) for name, seen in known.items()}


class _Numbered(dict[str, int]):
    """Words by the order in which they are first asked for."""

    def __missing__(self, word: str) -> int:
        self[word] = len(self)
        return self[word]
