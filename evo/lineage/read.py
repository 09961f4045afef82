"""Rows back into records: runs by their names, and a whole run's candidates in a few sorted passes."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
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


def names_of(record: type[Any], *unstored: str) -> tuple[str, ...]:
    """The fields of a record that columns of the same names hold."""
    return tuple(field.name for field in fields(record) if field.name not in unstored)


TIMING_NAMES, CHECK_NAMES = names_of(Timing), names_of(Check)
BUILD_NAMES = names_of(Build, "source", "binary")
BINARY_NAMES = names_of(Binary, "code", "log", "triggers_dependents")


def record_of(record: type[_Record], row: Any, **other: Any) -> _Record:
    """From a row that has fields of the record among its columns. Times become ISO 8601 in UTC, and a column `genome` the
    field `parameters`.

    other: what the row does not have, and values instead of the row's.
    """
    names = record.__dataclass_fields__  # type: ignore[attr-defined]
    values = {name: value for name, value in row._mapping.items() if name in names}
    for name, value in values.items():
        if isinstance(value, datetime):
            values[name] = value.astimezone(UTC).isoformat(timespec="milliseconds")
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
        yield from connection.execute(query.where(column.in_(some))).all()  # row by row takes twice as long


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
    row = connection.execute(select(m.Run.__table__).where(m.Run.id == run_id)).one()
    query = select(m.Environment.__table__).where(m.Environment.id == row.environment_id)
    task = m.Task
    tasks = connection.execute(
        select(task.dims, task.dtype, task.options).where(task.run_id == run_id).order_by(task.number)
    )
    workloads = tuple(Workload.of(dims, dtype, options) for dims, dtype, options in tasks)
    return record_of(
        StoredRun,
        row,
        spec=record_of(RunSpec, row, workloads=workloads),
        environment=record_of(Environment, connection.execute(query).one()),
        status=RunStatus(row.status),
    )


def _build(row: Any) -> Build:
    """Without source text and code, which are artefacts."""
    status, binary = Status(row.status), None
    if status is Status.OK:
        binary = record_of(Binary, row, code=b"", log=row.log if row.binary_log is None else row.binary_log)
    return record_of(Build, row, status=status, binary=binary)


def read_evaluations(connection: Connection, run: StoredRun) -> list[StoredEvaluation]:
    """Every candidate of the run as it was added, by order, but without source text and binary code."""
    c, p, b = m.Candidate, m.Parentage, m.Build
    first, last = m.key_range(run.id)
    parents: dict[int, list[Parent]] = defaultdict(list)
    edges = select(p.child_id, p.parent_id, p.role).where(p.child_id.between(first, last))
    for child, parent, role in connection.execute(edges.order_by(p.child_id, p.position)):
        parents[child].append(Parent(parent % m.ORDERS_PER_RUN, role))
    k, t = m.Check, m.Timing
    query = select(*(getattr(k, name) for name in CHECK_NAMES), k.candidate_id)
    query = query.where(k.candidate_id.between(first, last), k.round == 0)
    checks = _by_candidate(connection, query.order_by(k.candidate_id, k.position), Check, CHECK_NAMES)
    query = select(*(getattr(t, name) for name in TIMING_NAMES), t.candidate_id)
    query = query.where(t.run_id == run.id, t.candidate_id.between(first, last), t.round == 0)
    timings = _by_candidate(connection, query.order_by(t.candidate_id, t.id), Timing, TIMING_NAMES)
    rows = connection.execute(select(b.__table__).where(b.candidate_id.between(first, last)))
    builds = {row.candidate_id: _build(row) for row in rows}
    found = []
    for row in connection.execute(select(c.__table__).where(c.id.between(first, last)).order_by(c.id)):
        made_from = tuple(parents.get(row.id, ()))
        proposal = Proposal(genome=Genome.from_json(row.genome), operator=row.operator, parents=made_from)
        evaluation = record_of(
            Evaluation,
            row,
            status=Status(row.status),
            build=builds.get(row.id),
            checks=tuple(checks.get(row.id, ())),
            timings=tuple(timings.get(row.id, ())),
            same_code_as=None if row.same_code_as_id is None else row.same_code_as_id % m.ORDERS_PER_RUN,
        )
        candidate = Candidate(order=row.order, task=row.task, proposal=proposal)
        found.append(record_of(StoredEvaluation, row, candidate=candidate, evaluation=evaluation))
    return found


def _by_candidate(
    connection: Connection, query: Any, record: type[_Record], names: Sequence[str]
) -> dict[int, list[_Record]]:
    """Records by key of their candidate, which is the last column of the query's rows."""
    found: dict[int, list[_Record]] = defaultdict(list)
    for row in connection.execute(query):
        found[row[-1]].append(record(**dict(zip(names, row, strict=False))))
    return found
