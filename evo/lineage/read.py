"""Reading rows as records: runs by their names, and a whole run's candidates in a few sorted passes."""

import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Connection, select

from evo.errors import EngineError, EvoError, StoreError, UnknownNameError, UsageError
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
    """The names of a record's fields that columns of the same names hold. unstored: the other fields."""
    return tuple(field.name for field in fields(record) if field.name not in unstored)


TIMING_NAMES, CHECK_NAMES = names_of(Timing), names_of(Check)
BUILD_NAMES = names_of(Build, "source", "binary", "log")
BINARY_NAMES = names_of(Binary, "code", "log", "triggers_dependents", "launch")


def record_of(record: type[_Record], row: Any, **other: Any) -> _Record:
    """A record made of a row that has the record's fields among its columns. Times become ISO 8601 in UTC, and a column
    `genome` the field `parameters`. other: fields that the row lacks, and values in place of the row's."""
    names = record.__dataclass_fields__  # type: ignore[attr-defined]
    values = {name: value for name, value in row._mapping.items() if name in names}
    for name, value in values.items():
        if isinstance(value, datetime):
            values[name] = value.astimezone(UTC).isoformat(timespec="milliseconds")
    if "parameters" in names:
        values["parameters"] = Genome.from_json(row.genome).parameters
    return record(**values | other)


def at_once(keys: Collection[_Key]) -> Iterator[list[_Key]]:
    """The keys in their order, in lists as long as one query may name."""
    left = iter(keys)
    while some := list(islice(left, _AT_ONCE)):
        yield some


def rows_of(connection: Connection, query: Any, keys: Collection[Any], column: Any) -> Iterator[Any]:
    """The rows in which the column is one of the keys."""
    for some in at_once(keys):
        yield from connection.execute(query.where(column.in_(some))).all()  # row by row takes twice as long


def resolve_run(connection: Connection, name: str) -> int:
    """The id of the run of this name, of the only run whose name begins so, or of the run created last for "latest".

    Raises UnknownNameError, StoreError for a prefix of several names, or UsageError for a name that is not a text.
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


def unpack(data: bytes, base: bytes | None = None) -> bytes:
    """The text that was compressed with this preset dictionary. Raises EngineError for data that cannot be read."""
    try:
        reader = zlib.decompressobj() if base is None else zlib.decompressobj(zdict=base)
        return reader.decompress(data) + reader.flush()
    except zlib.error as error:
        raise EngineError(f"a stored text cannot be decompressed: {error}") from error


def read_artefacts(connection: Connection, digests: Collection[str]) -> dict[str, bytes]:
    """The stored sources and code with these digests, by digest; one that the database does not have is left out. Raises
    EngineError for data that cannot be read."""
    a = m.Artefact
    rows = list(rows_of(connection, select(a.sha256, a.base_sha, a.data), digests, a.sha256))
    needed = {row.base_sha for row in rows if row.base_sha is not None}
    bases = read_artefacts(connection, needed) if needed else {}
    return {row.sha256: unpack(row.data, bases.get(row.base_sha)) for row in rows}


@dataclass(frozen=True, kw_only=True)
class Detail:
    """The content of a row of `models.Detail`. cases: the gate's cases, each with the fields of `Check` in their order. log:
    the build's log; remarks: the compiler's words about the binary; launch: what the build says of its launch."""

    candidate_id: int
    round: int
    cases: list[list[Any]]
    log: str = ""
    remarks: str = ""
    launch: Mapping[str, int | str | bool] = field(default_factory=dict)

    @property
    def checks(self) -> tuple[Check, ...]:
        try:
            return tuple(Check(**dict(zip(CHECK_NAMES, case, strict=True))) for case in self.cases)
        except (ValueError, TypeError) as error:
            order = self.candidate_id % m.ORDERS_PER_RUN
            raise EngineError(f"the checks of candidate {order} are not as evo records them: {error}") from error


def read_details(connection: Connection, *where: Any) -> Iterator[Detail]:
    """Details, sorted by candidate and round. where: conditions on `models.Detail`. Raises EngineError for data that cannot
    be read."""
    d = m.Detail
    query = select(d.candidate_id, d.round, d.base_id, d.data).where(*where).order_by(d.candidate_id, d.round)
    rows = connection.execute(query).all()
    needed = {row.base_id for row in rows if row.base_id is not None}
    whole = select(d.candidate_id, d.round, d.data).where(d.base_id.is_(None))
    bases = {(key, round_): unpack(data) for key, round_, data in rows_of(connection, whole, needed, d.candidate_id)}
    for key, round_, base, data in rows:
        try:
            yield Detail(candidate_id=key, round=round_, **json.loads(unpack(data, bases.get((base, round_)))))
        except (EngineError, ValueError, TypeError) as error:
            raise EngineError(f"the checks of candidate {key % m.ORDERS_PER_RUN} cannot be read: {error}") from error


def _build(row: Any, detail: Detail) -> Build:
    """The build of a row, without source text and code, which are artefacts."""
    status, binary = Status(row.status), None
    if status is Status.OK:
        binary = record_of(Binary, row, code=b"", log=detail.remarks, launch=dict(detail.launch))
    return record_of(Build, row, status=status, binary=binary, log=detail.log)


def read_evaluations(connection: Connection, run: StoredRun) -> list[StoredEvaluation]:
    """Every candidate of the run by order, as it was added but without source text and binary code."""
    c, p, b = m.Candidate, m.Parentage, m.Build
    first, last = m.key_range(run.id)
    parents: dict[int, list[Parent]] = defaultdict(list)
    edges = select(p.child_id, p.parent_id, p.role).where(p.child_id.between(first, last))
    for child, parent, role in connection.execute(edges.order_by(p.child_id, p.position)):
        parents[child].append(Parent(parent % m.ORDERS_PER_RUN, role))
    d, t = m.Detail, m.Timing
    of_search = read_details(connection, d.candidate_id.between(first, last), d.round == 0)
    details = {told.candidate_id: told for told in of_search}
    query = select(*(getattr(t, name) for name in TIMING_NAMES), t.candidate_id)
    query = query.where(t.run_id == run.id, t.candidate_id.between(first, last), t.round == 0)
    timings: dict[int, list[Timing]] = defaultdict(list)
    for row in connection.execute(query.order_by(t.candidate_id, t.id)):
        timings[row.candidate_id].append(Timing(**dict(zip(TIMING_NAMES, row, strict=False))))
    rows = connection.execute(select(b.__table__).where(b.candidate_id.between(first, last)))
    builds = {row.candidate_id: _build(row, details[row.candidate_id]) for row in rows}
    found = []
    for row in connection.execute(select(c.__table__).where(c.id.between(first, last)).order_by(c.id)):
        made_from = tuple(parents.get(row.id, ()))
        try:
            proposal = Proposal(genome=Genome.from_json(row.genome), operator=row.operator, parents=made_from)
            evaluation = record_of(
                Evaluation,
                row,
                status=Status(row.status),
                build=builds.get(row.id),
                checks=details[row.id].checks if row.id in details else (),
                timings=tuple(timings.get(row.id, ())),
                same_code_as=None if row.same_code_as_id is None else row.same_code_as_id % m.ORDERS_PER_RUN,
            )
        except (EvoError, ValueError) as error:
            raise EngineError(f"candidate {row.order} of run {run.name!r} is not as evo records one: {error}") from error
        candidate = Candidate(order=row.order, task=row.task, proposal=proposal)
        found.append(record_of(StoredEvaluation, row, candidate=candidate, evaluation=evaluation))
    return found
