"""Questions to the lineage: all of them can be asked from here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, func, select
from sqlalchemy.orm import aliased

from evo.analysis.ancestry import ancestry
from evo.analysis.candidates import artefact, build, candidate, source
from evo.analysis.failures import failure_reason
from evo.analysis.leaders import best, best_by_run, refused_in_finals
from evo.analysis.races import baselines, disturbed, final_races, noise_floors, noise_floors_of
from evo.analysis.records import Failure, Point, RunSummary, TaskSummary
from evo.analysis.sql import select_sql
from evo.evaluation import PASSED
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.liveness import GONE, gone
from evo.lineage.models import key_range, last_refusals, leader_key
from evo.lineage.read import ENVIRONMENT_COLUMNS, iso, read_environment, resolve_run
from evo.lineage.store import Store
from evo.problem.genome import Genome

__all__ = [
    "ancestry",
    "artefact",
    "baselines",
    "best",
    "best_by_run",
    "build",
    "candidate",
    "counts",
    "disturbed",
    "failures",
    "final_races",
    "has_run",
    "history",
    "noise_floors",
    "noise_floors_of",
    "refused_finalists",
    "refused_in_finals",
    "run",
    "runs",
    "select_sql",
    "source",
    "tried_on",
]

_c, _i = m.Candidate, m.Task


def runs(store: Store) -> tuple[RunSummary, ...]:
    """Every run, the latest first."""
    with store.reading() as connection:
        keys = connection.scalars(select(m.Run.id).order_by(m.Run.id.desc())).all()
        return _summaries(store, connection, keys, every=True)


def run(store: Store, name: str) -> RunSummary:
    """By name, unique prefix of a name, or "latest". Raises UnknownNameError, or StoreError if ambiguous."""
    with store.reading() as connection:
        return _summaries(store, connection, [resolve_run(connection, name)], every=False)[0]


def has_run(store: Store, name: str) -> bool:
    """Whether there is a run of this very name."""
    with store.reading() as connection:
        return connection.scalar(select(m.Run.id).where(m.Run.name == name)) is not None


def _summaries(
    store: Store, connection: Connection, keys: Iterable[int], *, every: bool
) -> tuple[RunSummary, ...]:
    keys = list(keys)
    by_status = _counts(connection, None if every else keys[0])
    tasks = _tasks(connection, None if every else keys[0])
    query = select(*m.Run.__table__.c, *ENVIRONMENT_COLUMNS).join_from(m.Run, m.Environment)
    rows = connection.execute(query if every else query.where(m.Run.id == keys[0]))
    by_key = {row.id: row for row in rows}
    dead = gone(store, connection, {key: row.status for key, row in by_key.items()})
    return tuple(
        _summary(by_key[key], by_status.get(key, {}), tuple(tasks.get(key, ())), dead=key in dead) for key in keys
    )


def _summary(row: Any, by_status: dict[str, int], tasks: tuple[TaskSummary, ...], *, dead: bool) -> RunSummary:
    """dead: recorded as running, and its process has ended."""
    return RunSummary(
        name=row.name,
        kernel=row.kernel,
        kernel_digest=row.kernel_digest,
        target=row.target,
        arch=row.arch,
        device=row.environment_device,
        sampler=row.sampler,
        seed=row.seed,
        max_in_flight=row.max_in_flight,
        options=row.options,
        budget=row.budget,
        status=RunStatus.INTERRUPTED.value if dead else row.status,
        stop_reason=GONE if dead else row.stop_reason,
        created=iso(row.created),
        updated=iso(row.updated),
        finished=iso(row.finished) if row.finished else None,
        elapsed_s=row.elapsed_s,
        evaluations=sum(by_status.values()),
        passed=sum(n for status, n in by_status.items() if status in PASSED),
        counts=by_status,
        tasks=tasks,
        environment=asdict(read_environment(row._mapping)),
    )


def _counts(connection: Connection, run_id: int | None) -> dict[int, dict[str, int]]:
    """Candidates by run and status, the most frequent first."""
    number = func.count()
    query = select(_c.run_id, _c.status, number).group_by(_c.run_id, _c.status).order_by(number.desc(), _c.status)
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for key, status, n in connection.execute(query if run_id is None else query.where(_c.run_id == run_id)):
        found[key][status] = n
    return found


def _tasks(connection: Connection, run_id: int | None) -> dict[int, list[TaskSummary]]:
    leader, winner = aliased(_c), aliased(_c)
    query = (
        select(_i, leader.public_id.label("best"), leader.score.label("score"), winner.public_id.label("winner"))
        .join_from(_i, leader, leader.id == leader_key(), isouter=True)
        .join(winner, winner.id == m.Task.winner_id, isouter=True)
        .order_by(_i.run_id, _i.number)
    )
    found: dict[int, list[TaskSummary]] = defaultdict(list)
    rows: Any = connection.execute(query if run_id is None else query.where(_i.run_id == run_id))
    for row in rows:
        found[row.run_id].append(
            TaskSummary(
                number=row.number,
                workload=row.workload,
                dims=row.dims,
                dtype=row.dtype,
                options=row.options,
                winner=row.winner,
                best=row.best,
                best_score=row.score,
            )
        )
    return found


def tried_on(store: Store, name: str) -> dict[int, int]:
    """Candidates of a run by task. Raises as `run` does."""
    with store.reading() as connection:
        key = resolve_run(connection, name)
        query = select(_c.task, func.count()).where(_c.run_id == key).group_by(_c.task)
        rows: Any = connection.execute(query).all()
        return dict(rows)


def counts(store: Store, run: str) -> dict[str, int]:
    """Candidates of a run by status, the most frequent first."""
    with store.reading() as connection:
        key = resolve_run(connection, run)
        return _counts(connection, key).get(key, {})


def failures(store: Store, run: str, *, limit: int | None = None) -> tuple[Failure, ...]:
    """The candidates of a run that did not pass, by order; the first `limit` of them."""
    k, b = m.Check, m.Build
    refused = (
        select(k.case + ": " + k.reason)
        .where(k.candidate_id == _c.id, k.round == 0, k.passed.is_(False))
        .order_by(k.position)
        .limit(1)
        .correlate(_c)
        .scalar_subquery()
    )
    with store.reading() as connection:
        rows: Any = connection.execute(
            select(
                _c.public_id,
                _c.order,
                _c.task,
                _c.operator,
                _c.status,
                _c.genome,
                _c.log,
                b.log.label("build_log"),
                refused.label("refused"),
            )
            .join_from(_c, b, b.candidate_id == _c.id, isouter=True)
            .where(_c.id.between(*key_range(resolve_run(connection, run))), _c.status.not_in(PASSED))
            .order_by(_c.id)
            .limit(limit)
        )
        return tuple(
            _failure(row, row.refused or failure_reason(row.log) or failure_reason(row.build_log or "")) for row in rows
        )


def refused_finalists(store: Store, run: str) -> tuple[Failure, ...]:
    """The candidates of a run that passed its search and were refused by the last of their finals, by order."""
    f = m.Final
    with store.reading() as connection:
        rows: Any = connection.execute(
            select(_c.public_id, _c.order, _c.task, _c.operator, _c.genome, f.status, f.log)
            .join_from(f, _c, _c.id == f.candidate_id)
            .where(_c.id.between(*key_range(resolve_run(connection, run))), last_refusals())
            .order_by(_c.id)
        )
        return tuple(_failure(row, failure_reason(row.log)) for row in rows)


def _failure(row: Any, reason: str) -> Failure:
    return Failure(
        id=row.public_id,
        order=row.order,
        task=row.task,
        operator=row.operator,
        status=row.status,
        reason=reason,
        parameters=Genome.from_json(row.genome).parameters,
    )


def history(store: Store, run: str) -> tuple[Point, ...]:
    """The course of a run: every candidate by order."""
    with store.reading() as connection:
        rows = connection.execute(
            select(_c.order, _c.public_id, _c.task, _c.operator, _c.status, _c.score, _c.elapsed_s)
            .where(_c.id.between(*key_range(resolve_run(connection, run))))
            .order_by(_c.id)
        )
        return tuple(
            Point(order=a, id=b, task=c, operator=d, status=e, score=f, elapsed_s=g) for a, b, c, d, e, f, g in rows
        )
