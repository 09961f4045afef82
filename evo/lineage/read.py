"""Rows back into records: runs by their names, and a whole run's candidates in a few sorted passes."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Connection, select

from evo.errors import StoreError, UnknownNameError, UsageError
from evo.evaluation import Binary, Build, Candidate, Check, Evaluation, Parent, Proposal, Status, Timing
from evo.lineage import LATEST, Environment, RunSpec, RunStatus, StoredEvaluation, StoredRun
from evo.lineage import models as m
from evo.lineage.database import command_line
from evo.problem.genome import Genome
from evo.problem.kernel import Workload

_AT_ONCE = 400  # SQLite takes 999 variables in a query at least
_OFFERED = 10
_Key = TypeVar("_Key")
_Record = TypeVar("_Record")


def columns_of(table: Any, record: type[Any], *unstored: str) -> tuple[Any, ...]:
    """The columns that hold a record's fields, in the order of the fields. Every field is a column or named as unstored:
    else this raises AttributeError, when evo is imported."""
    return tuple(getattr(table, field.name) for field in fields(record) if field.name not in unstored)


_TIMING_COLUMNS = columns_of(m.Timing, Timing)
_CHECK_COLUMNS = columns_of(m.Check, Check)
_BUILD_COLUMNS = columns_of(m.Build, Build, "source", "binary")
_BINARY_COLUMNS = columns_of(m.Build, Binary, "code", "log", "triggers_dependents")
ENVIRONMENT_COLUMNS = tuple(c.label(f"environment_{c.key}") for c in columns_of(m.Environment, Environment))
"""For `read_environment`; a run has an `arch`, too."""

TIMING_NAMES, CHECK_NAMES, BUILD_NAMES, BINARY_NAMES = (
    tuple(column.key for column in columns)
    for columns in (_TIMING_COLUMNS, _CHECK_COLUMNS, _BUILD_COLUMNS, _BINARY_COLUMNS)
)


def iso(time: datetime) -> str:
    """A time as records carry it: ISO 8601 in UTC."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


def record_of(record: type[_Record], row: Any, **other: Any) -> _Record:
    """From a row that has fields of the record among its columns; a column `genome` becomes the field `parameters`.

    other: what the row does not have, and values instead of the row's.
    """
    names = record.__dataclass_fields__  # type: ignore[attr-defined]
    values = {name: value for name, value in row._mapping.items() if name in names}
    values |= {name: iso(value) for name, value in values.items() if isinstance(value, datetime)}
    if "parameters" in names:
        values["parameters"] = Genome.from_json(row.genome).parameters
    return record(**values | other)


def at_once(keys: Collection[_Key]) -> Iterator[list[_Key]]:
    """The keys in their order, as many at a time as one query may name."""
    left = iter(keys)
    while some := list(islice(left, _AT_ONCE)):
        yield some


def rows_of(connection: Connection, query: Any, keys: Collection[Any], column: Any) -> Iterator[Any]:
    """The rows in which the column is one of the keys."""
    for some in at_once(keys):
        yield from connection.execute(query.where(column.in_(some)))


def resolve_run(connection: Connection, name: str) -> int:
    """The id of the run of this name, or whose name alone begins so, or of the last one created for "latest".

    Raises UnknownNameError, StoreError for a prefix of several names, or UsageError for what is not a text at all.
    """
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is not the name of a run; give names one by one, as texts")
    if name == LATEST:
        last = connection.scalar(select(m.Run.id).order_by(m.Run.id.desc()).limit(1))
        if last is None:
            start = command_line(connection.engine.url, "search", "KERNEL")
            raise StoreError(f"no run has been recorded in this database yet; start one with: {start}")
        return int(last)
    exact = connection.scalar(select(m.Run.id).where(m.Run.name == name))
    if exact is not None:
        return exact
    named = connection.execute(select(m.Run.id, m.Run.name).order_by(m.Run.id.desc())).all()
    found = [(run_id, known) for run_id, known in named if name and known.startswith(name)]
    if not found:
        raise UnknownNameError("run", name, [known for _, known in named][:_OFFERED])
    if len(found) > 1:
        several = ", ".join(known for _, known in found[:4])
        raise StoreError(f"{name!r} begins the names of {len(found)} runs ({several}, ...); write more of it")
    return found[0][0]


def read_run(connection: Connection, run_id: int) -> StoredRun:
    query = select(*m.Run.__table__.c, *ENVIRONMENT_COLUMNS).join_from(m.Run, m.Environment).where(m.Run.id == run_id)
    row = connection.execute(query).one()
    task = m.Task
    tasks = connection.execute(
        select(task.dims, task.dtype, task.options).where(task.run_id == run_id).order_by(task.number)
    )
    workloads = tuple(Workload.of(dims, dtype, options) for dims, dtype, options in tasks)
    return record_of(
        StoredRun,
        row,
        spec=record_of(RunSpec, row, workloads=workloads),
        environment=read_environment(row),
        status=RunStatus(row.status),
    )


def read_environment(row: Any) -> Environment:
    """From a row that has ENVIRONMENT_COLUMNS."""
    return Environment(**{c.key.removeprefix("environment_"): getattr(row, c.key) for c in ENVIRONMENT_COLUMNS})


def _build(row: Sequence[Any]) -> Build:
    """Without source text and code, which are artefacts."""
    built = dict(zip(BUILD_NAMES, row, strict=False))
    status, (binary_log, *figures) = Status(built.pop("status")), row[len(BUILD_NAMES) :]
    binary = None
    if status is Status.OK:
        log = built["log"] if binary_log is None else binary_log
        binary = Binary(code=b"", log=log, **dict(zip(BINARY_NAMES, figures, strict=True)))
    return Build(status=status, binary=binary, **built)


def read_evaluations(connection: Connection, run: StoredRun) -> list[StoredEvaluation]:
    """Every candidate of the run as it was added, by order, but without source text and binary code."""
    c, p = m.Candidate, m.Parentage
    first, last = m.key_range(run.id)
    with _uncollected():
        parents: dict[int, list[Parent]] = defaultdict(list)
        edges = select(p.child_id, p.parent_id, p.role).where(p.child_id.between(first, last))
        for child, parent, role in connection.execute(edges.order_by(p.child_id, p.position)):
            parents[child].append(Parent(parent % m.ORDERS_PER_RUN, role))
        k, t = m.Check, m.Timing
        query = select(*_CHECK_COLUMNS, k.candidate_id).where(k.candidate_id.between(first, last), k.round == 0)
        checks = _by_candidate(connection, query.order_by(k.candidate_id, k.position), Check, CHECK_NAMES)
        query = select(*_TIMING_COLUMNS, t.candidate_id)
        query = query.where(t.run_id == run.id, t.candidate_id.between(first, last), t.round == 0)
        timings = _by_candidate(connection, query.order_by(t.candidate_id, t.id), Timing, TIMING_NAMES)
        rows = connection.execute(
            select(c.id, c.task, c.public_id, c.genome, c.operator, c.elapsed_s, c.status, c.log, c.same_code_as_id)
            .add_columns(c.seconds, c.gate_seconds, c.timing_seconds, *_BUILD_COLUMNS, m.Build.binary_log, *_BINARY_COLUMNS)
            .join_from(c, m.Build, m.Build.candidate_id == c.id, isouter=True)
            .where(c.id.between(first, last))
            .order_by(c.id)
        )
        found = []
        for row in rows:
            key, task, name, genome, operator, elapsed_s, status, log, same, seconds, gate_s, timing_s, *built = row
            made_from = tuple(parents.get(key, ()))
            candidate = Candidate(
                order=key % m.ORDERS_PER_RUN,
                task=task,
                proposal=Proposal(genome=Genome.from_json(genome), operator=operator, parents=made_from),
            )
            evaluation = Evaluation(
                status=Status(status),
                build=None if built[0] is None else _build(built),
                checks=tuple(checks.get(key, ())),
                timings=tuple(timings.get(key, ())),
                log=log,
                same_code_as=None if same is None else same % m.ORDERS_PER_RUN,
                seconds=seconds,
                gate_seconds=gate_s,
                timing_seconds=timing_s,
            )
            found.append(StoredEvaluation(public_id=name, candidate=candidate, evaluation=evaluation, elapsed_s=elapsed_s))
        return found


def _by_candidate(
    connection: Connection, query: Any, record: type[_Record], names: Sequence[str]
) -> dict[int, list[_Record]]:
    """Records by key of their candidate, which is the last column of the query's rows."""
    found: dict[int, list[_Record]] = defaultdict(list)
    for row in connection.execute(query):
        found[row[-1]].append(record(**dict(zip(names, row, strict=False))))
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
