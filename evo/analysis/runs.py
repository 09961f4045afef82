"""Runs: all of them at a glance, one with its finals, the course of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, func, select
from sqlalchemy.orm import aliased

from evo.analysis.best import Best, leaders, refusals
from evo.analysis.finals import RefusedFinalist, WorkloadFinals, read_finals, refused_finalists
from evo.evaluation import PASSED
from evo.lineage import LATEST, RunStatus
from evo.lineage import models as m
from evo.lineage.liveness import GONE, gone
from evo.lineage.models import key_range, leader_key
from evo.lineage.read import ENVIRONMENT_COLUMNS, iso, read_environment, resolve_run
from evo.lineage.store import Store
from evo.problem.space import Value

__all__ = [
    "ListedRun", "Point", "RunFinals", "RunSummary", "TaskSummary", "find_run", "list_runs", "read_history",
    "read_run_finals",
]  # fmt: skip

_c, _i, _r = m.Candidate, m.Task, m.Run


@dataclass(frozen=True, kw_only=True)
class TaskSummary:
    """A workload of a run, with the number of its candidates. best: the winner if one is named, else the candidate of the
    lowest score."""

    number: int
    workload: str
    dims: dict[str, int]
    dtype: str
    options: dict[str, Value]
    winner: str | None
    best: str | None
    best_score: float | None
    candidates: int


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run at a glance. counts: candidates by status, the most frequent first. Times are ISO 8601 in UTC."""

    name: str
    kernel: str
    kernel_digest: str
    target: str
    arch: str
    device: str
    sampler: str
    seed: int
    max_in_flight: int
    options: dict[str, Any]
    budget: dict[str, Any]
    status: str
    stop_reason: str
    created: str
    updated: str
    finished: str | None
    elapsed_s: float
    evaluations: int
    passed: int
    counts: dict[str, int]
    tasks: tuple[TaskSummary, ...]
    environment: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ListedRun(RunSummary):
    """refused_in_finals: number of candidates that the last of their finals refused. best: by workload, the highest
    speed-up first."""

    refused_in_finals: int
    best: tuple[Best, ...]


@dataclass(frozen=True, kw_only=True)
class RunFinals(RunSummary):
    """A run, its finals by workload, and the candidates that they refused."""

    finals: tuple[WorkloadFinals, ...]
    refused_in_finals: tuple[RefusedFinalist, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One candidate in the course of a run. elapsed_s: seconds of searching until it was recorded."""

    order: int
    id: str
    task: int
    operator: str
    status: str
    score: float | None
    elapsed_s: float


def list_runs(store: Store) -> tuple[ListedRun, ...]:
    """Every run, the latest first."""
    with store.reading() as connection:
        best: dict[str, list[Best]] = defaultdict(list)
        for leader in leaders(connection):
            best[leader.run].append(leader)
        summaries = _summaries(store, connection, None)
        refused: dict[int, int] = defaultdict(int)
        for (key, _), number in refusals(connection, summaries).items():
            refused[key] += number
        return tuple(
            ListedRun(**vars(run), refused_in_finals=refused[key], best=tuple(best[run.name]))
            for key, run in summaries.items()
        )


def find_run(store: Store, name: str) -> RunSummary:
    """By name, unique prefix of a name, or "latest". Raises UnknownNameError, or StoreError if ambiguous."""
    with store.reading() as connection:
        key = resolve_run(connection, name)
        return _summaries(store, connection, key)[key]


def read_run_finals(store: Store, name: str = LATEST, ceilings: Collection[str] = ("copy",)) -> RunFinals:
    """ceilings: see `read_finals`. Raises as `find_run` does."""
    run = find_run(store, name)
    finals, refused = read_finals(store, run.name, ceilings), refused_finalists(store, run.name)
    return RunFinals(**vars(run), finals=finals, refused_in_finals=refused)


def read_history(store: Store, run: str = LATEST) -> tuple[Point, ...]:
    """The course of a run: every candidate by order."""
    with store.reading() as connection:
        rows = connection.execute(
            select(_c.order, _c.public_id.label("id"), _c.task, _c.operator, _c.status, _c.score, _c.elapsed_s)
            .where(_c.id.between(*key_range(resolve_run(connection, run))))
            .order_by(_c.id)
        )
        return tuple(Point(**row._mapping) for row in rows)


def _summaries(store: Store, connection: Connection, run_id: int | None) -> dict[int, RunSummary]:
    """By key, the latest run first; of all runs if none is given."""
    by_status = _counts(connection, run_id)
    tasks = _tasks(connection, run_id)
    query = select(*_r.__table__.c, *ENVIRONMENT_COLUMNS).join_from(_r, m.Environment)
    rows: Any = connection.execute(query.order_by(_r.id.desc()) if run_id is None else query.where(_r.id == run_id)).all()
    dead = gone(store, connection, {row.id: row.status for row in rows})
    found = {}
    for row in rows:
        counts = by_status.get(row.id, {})
        fields = {k: v for k, v in row._mapping.items() if k in RunSummary.__dataclass_fields__} | {
            "device": row.environment_device,
            "status": RunStatus.INTERRUPTED.value if row.id in dead else row.status,
            "stop_reason": GONE if row.id in dead else row.stop_reason,
            "created": iso(row.created),
            "updated": iso(row.updated),
            "finished": iso(row.finished) if row.finished else None,
            "evaluations": sum(counts.values()),
            "passed": sum(n for status, n in counts.items() if status in PASSED),
            "counts": counts,
            "tasks": tuple(tasks.get(row.id, ())),
            "environment": asdict(read_environment(row._mapping)),
        }
        found[row.id] = RunSummary(**fields)
    return found


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
    number = select(func.count()).where(_c.run_id == _i.run_id, _c.task == _i.number).correlate(_i).scalar_subquery()
    query = (
        select(_i.run_id, _i.number, _i.workload, _i.dims, _i.dtype, _i.options)
        .add_columns(leader.public_id.label("best"), leader.score.label("best_score"), winner.public_id.label("winner"))
        .add_columns(number.label("candidates"))
        .join_from(_i, leader, leader.id == leader_key(), isouter=True)
        .join(winner, winner.id == m.Task.winner_id, isouter=True)
        .order_by(_i.run_id, _i.number)
    )
    found: dict[int, list[TaskSummary]] = defaultdict(list)
    for row in connection.execute(query if run_id is None else query.where(_i.run_id == run_id)):
        values = dict(row._mapping)
        found[values.pop("run_id")].append(TaskSummary(**values))
    return found
