"""Reading a whole run back, for a search that goes on: a few sorted passes, no query for each candidate."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, select

from evo.errors import EngineError
from evo.evaluation import Candidate, Check, Evaluation, Parent, Proposal, Status, Timing
from evo.lineage import StoredEvaluation, StoredResult, StoredRun
from evo.lineage import models as m
from evo.lineage.columns import ORDERS_PER_RUN, candidate_key, key_range
from evo.lineage.rows import BUILD_COLUMNS, CHECK_COLUMNS, TIMING_COLUMNS, read_build, read_check, read_timing
from evo.problem.genome import Genome

__all__ = ["read_evaluation", "read_evaluations", "read_results"]

_c = m.Candidate
_REF_COLUMNS = (_c.id, _c.task, _c.public_id, _c.genome, _c.operator, _c.elapsed_s)


def read_evaluations(connection: Connection, run: StoredRun) -> list[StoredEvaluation]:
    """Every candidate of the run as it was added, by order, but without source text and binary code."""
    return _read(connection, run, *key_range(run.id))


def read_evaluation(connection: Connection, run: StoredRun, order: int) -> StoredEvaluation:
    """One of them. Raises EngineError if there is no such order."""
    key = candidate_key(run.id, order)
    found = _read(connection, run, key, key)
    if not found:
        raise EngineError(f"run {run.name!r} has no candidate {order}")
    return found[0]


def read_results(connection: Connection, run: StoredRun) -> list[StoredResult]:
    """Every candidate of the run by order, with its outcome and nothing of how it was found."""
    first, last = key_range(run.id)
    with _uncollected():
        parents = _parents(connection, first, last)
        rows = connection.execute(
            select(*_REF_COLUMNS, _c.status, _c.score, _c.same_code_as_id, m.Build.code_hash)
            .join_from(_c, m.Build, m.Build.candidate_id == _c.id, isouter=True)
            .where(_c.id.between(first, last))
            .order_by(_c.id)
        )
        return [
            StoredResult(
                public_id=row[2],
                candidate=_read_ref(run, row, parents),
                status=Status(status),
                score=score,
                same_code_as=None if same is None else same % ORDERS_PER_RUN,
                code_hash=code_hash,
                elapsed_s=row[5],
            )
            for *row, status, score, same, code_hash in rows
        ]


def _read(connection: Connection, run: StoredRun, first: int, last: int) -> list[StoredEvaluation]:
    """The candidates of keys `first` to `last`."""
    with _uncollected():
        parents = _parents(connection, first, last)
        checks, timings = _checks(connection, first, last), _timings(connection, run, first, last)
        rows = connection.execute(
            select(
                *_REF_COLUMNS,
                _c.status,
                _c.log,
                _c.same_code_as_id,
                _c.seconds,
                _c.gate_seconds,
                _c.timing_seconds,
                *BUILD_COLUMNS,
            )
            .join_from(_c, m.Build, m.Build.candidate_id == _c.id, isouter=True)
            .where(_c.id.between(first, last))
            .order_by(_c.id)
        )
        return [
            StoredEvaluation(
                public_id=row[2],
                candidate=_read_ref(run, row, parents),
                evaluation=Evaluation(
                    status=Status(row[6]),
                    build=None if row[12] is None else read_build(row[12:]),
                    checks=tuple(checks.get(row[0], ())),
                    timings=tuple(timings.get(row[0], ())),
                    log=row[7],
                    same_code_as=None if row[8] is None else row[8] % ORDERS_PER_RUN,
                    seconds=row[9],
                    gate_seconds=row[10],
                    timing_seconds=row[11],
                ),
                elapsed_s=row[5],
            )
            for row in rows
        ]


def _read_ref(run: StoredRun, row: Any, parents: dict[int, list[Parent]]) -> Candidate:
    key, task, _, genome, operator = row[:5]
    return Candidate(
        order=key % ORDERS_PER_RUN,
        task=task,
        workload=run.spec.workloads[task],
        proposal=Proposal(genome=Genome.from_json(genome), operator=operator, parents=tuple(parents.get(key, ()))),
    )


def _parents(connection: Connection, first: int, last: int) -> dict[int, list[Parent]]:
    p, found = m.Parentage, defaultdict(list)
    rows = connection.execute(
        select(p.child_id, p.parent_id, p.role).where(p.child_id.between(first, last)).order_by(p.child_id, p.position)
    )
    for child, parent, role in rows:
        found[child].append(Parent(parent % ORDERS_PER_RUN, role))
    return found


def _checks(connection: Connection, first: int, last: int) -> dict[int, list[Check]]:
    k = m.Check
    found: dict[int, list[Check]] = defaultdict(list)
    rows = connection.execute(
        select(k.candidate_id, *CHECK_COLUMNS)
        .where(k.candidate_id.between(first, last), k.round == 0)
        .order_by(k.candidate_id, k.position)
    )
    for key, *row in rows:
        found[key].append(read_check(row))
    return found


def _timings(connection: Connection, run: StoredRun, first: int, last: int) -> dict[int, list[Timing]]:
    t = m.Timing
    found: dict[int, list[Timing]] = defaultdict(list)
    rows = connection.execute(
        select(t.candidate_id, *TIMING_COLUMNS)
        .where(t.run_id == run.id, t.candidate_id.between(first, last), t.round == 0)
        .order_by(t.candidate_id, t.id)
    )
    for key, *row in rows:
        if key is not None:  # never is: such a row is in no range of keys
            found[key].append(read_timing(row))
    return found


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection inside: it walks millions of new objects again and again, half of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
