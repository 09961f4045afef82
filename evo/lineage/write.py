"""Records into rows: gathered for one or many candidates, and inserted table by table."""

import hashlib
import json
import math
import re
import secrets
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from sqlalchemy import Connection, Dialect, Table, insert, select, update
from sqlalchemy.exc import DBAPIError

from evo.errors import EngineError, StoreError
from evo.evaluation import Candidate, Check, Evaluation, Timing
from evo.lineage import LATEST, Environment, RunSpec, RunStatus, Stage, StoredRun
from evo.lineage import models as m
from evo.lineage.database import command_line
from evo.lineage.liveness import write_alone
from evo.lineage.read import BINARY_NAMES, BUILD_NAMES, CHECK_NAMES, TIMING_NAMES, rows_of

Row = dict[str, Any]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COMPRESSION = 6
_TABLES = m.Base.metadata.tables
_CANDIDATE, _PARENTAGE, _BUILD, _CHECK, _TIMING = _INSERTED = tuple(
    _TABLES[name] for name in ("candidate", "parentage", "build", "check", "timing")
)
"""Parents before children: the order in which rows satisfy the foreign keys."""
_RUN, _ARTEFACT = _TABLES["run"], _TABLES["artefact"]


def clean_text(text: str) -> str:
    """`text` as every database takes it: compilers and crashed devices also emit NULs and broken UTF-8."""
    text = str(text)  # not a StrEnum, which drivers may take for something else
    if text.isascii():
        return text.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in text else text
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _stored(value: Any) -> Any:
    """A field's value as a column takes it. NaN becomes None: SQLite has none, and both mean that there is no number."""
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {name: _stored(part) for name, part in value.items()}
    return value


def _fields(record: Any, names: Iterable[str]) -> Row:
    return {name: _stored(getattr(record, name)) for name in names}


def check_rows(candidate_id: int, checks: Sequence[Check], stage: Stage, round_: int) -> list[Row]:
    return [
        {"candidate_id": candidate_id, "round": round_, "position": i, "stage": stage.value, **_fields(check, CHECK_NAMES)}
        for i, check in enumerate(checks)
    ]


def timing_rows(
    run: StoredRun, task: int, candidate_id: int | None, timings: Sequence[Timing], stage: Stage, round_: int
) -> list[Row]:
    place = {"run_id": run.id, "task": task, "candidate_id": candidate_id, "round": round_, "stage": stage.value}
    return [{**place, **_fields(timing, TIMING_NAMES)} for timing in timings]


def final_row(candidate_id: int, measurement: Evaluation, round_: int) -> Row:
    outcome = _fields(measurement, ("status", "log", "seconds", "gate_seconds", "timing_seconds"))
    return {"candidate_id": candidate_id, "round": round_, **outcome, "created": datetime.now(UTC)}


class Batch:
    """Candidates that are gathered, and inserted together by `flush`."""

    def __init__(self) -> None:
        self._rows: dict[Table, list[Row]] = defaultdict(list)
        self._artefacts: dict[str, tuple[str, bytes]] = {}
        self._progress: dict[int, tuple[float, datetime]] = {}

    def __len__(self) -> int:
        """Candidates gathered."""
        return len(self._rows[_CANDIDATE])

    def add(self, run: StoredRun, candidate: Candidate, evaluation: Evaluation, *, elapsed_s: float) -> None:
        """Raises EngineError for a candidate that contradicts its run."""
        now = datetime.now(UTC)
        row, parentage = _candidate_row(run, candidate, evaluation), _parentage_rows(run, candidate)
        row |= {"source_sha": None, "elapsed_s": elapsed_s, "created": now}
        key = row["id"]
        if (build := evaluation.build) is not None:
            built = {"candidate_id": key, **_fields(build, BUILD_NAMES)}
            built |= {"binary_log": None, **{name: getattr(build.binary, name, None) for name in BINARY_NAMES}}
            built["binary_sha"] = None
            if build.source:
                row["source_sha"] = self._keep("source", build.source.encode("utf-8", "surrogatepass"))
            if (binary := build.binary) is not None:
                remarks = clean_text(binary.log)
                built["binary_log"] = None if remarks == built["log"] else remarks
                if binary.code:
                    kind = "ptx" if build.arch.startswith("compute_") else "binary"
                    built["binary_sha"] = self._keep(kind, binary.code)
            self._rows[_BUILD].append(built)
        self._rows[_CANDIDATE].append(row)
        self._rows[_PARENTAGE] += parentage
        self._rows[_CHECK] += check_rows(key, evaluation.checks, Stage.SEARCH, 0)
        self._rows[_TIMING] += timing_rows(run, candidate.task, key, evaluation.timings, Stage.SEARCH, 0)
        self._progress[run.id] = (elapsed_s, now)

    def _keep(self, kind: str, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        self._artefacts[digest] = (kind, content)
        return digest

    def flush(self, connection: Connection) -> None:
        """Inserts everything and forgets it. What the tables refuse is an IntegrityError."""
        if not self._rows[_CANDIDATE]:
            return
        if self._artefacts:
            write_alone(connection)
            known = known_artefacts(connection, self._artefacts)
            rows = [
                {"sha256": digest, "kind": kind, "size": len(content), "data": zlib.compress(content, _COMPRESSION)}
                for digest, (kind, content) in self._artefacts.items()
                if digest not in known
            ]
            insert_rows(connection, _ARTEFACT, rows)
        for table in _INSERTED:
            insert_rows(connection, table, self._rows[table])
        for run_id, (elapsed_s, now) in self._progress.items():
            connection.execute(update(_RUN).where(_RUN.c.id == run_id), {"elapsed_s": elapsed_s, "updated": now})
        self._rows.clear()
        self._artefacts.clear()
        self._progress.clear()


def _candidate_row(run: StoredRun, candidate: Candidate, evaluation: Evaluation) -> Row:
    """Raises EngineError for an order or a task that cannot be."""
    if not 0 <= candidate.task < len(run.spec.workloads):
        raise EngineError(f"run {run.name!r} has no task {candidate.task}")
    genome, same = candidate.proposal.genome.to_json(), evaluation.same_code_as
    return {
        "id": m.candidate_key(run.id, candidate.order),
        "run_id": run.id,
        "order": candidate.order,
        "task": candidate.task,
        "public_id": m.public_id(run.uid, candidate.order),
        "genome": genome,
        "genome_digest": hashlib.sha256(genome.encode()).hexdigest(),
        "operator": candidate.proposal.operator,
        "same_code_as_id": None if same is None else m.candidate_key(run.id, same),
        **_fields(evaluation, ("status", "score", "log", "seconds", "gate_seconds", "timing_seconds")),
    }


def _parentage_rows(run: StoredRun, candidate: Candidate) -> list[Row]:
    """Raises EngineError for a parent that is not earlier than its child."""
    child = m.candidate_key(run.id, candidate.order)
    for parent in candidate.proposal.parents:
        if parent.order >= candidate.order:
            raise EngineError(f"candidate {candidate.order} of run {run.name!r} cannot come from the later {parent.order}")
    return [
        {"child_id": child, "position": i, "parent_id": m.candidate_key(run.id, p.order), "role": p.role}
        for i, p in enumerate(candidate.proposal.parents)
    ]


def known_artefacts(connection: Connection, digests: Collection[str]) -> set[str]:
    """Those that are stored."""
    query = select(_ARTEFACT.c.sha256)
    return {row.sha256 for row in rows_of(connection, query, digests, _ARTEFACT.c.sha256)}


def insert_rows(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Inserts rows that all have the same keys in the same order, past the statement compiler: several times faster than
    an ordinary insert. What a table refuses is an IntegrityError."""
    if not rows:
        return
    columns = tuple(rows[0])
    values = [tuple(row.values()) for row in rows]
    _convert(values, table, columns, connection.dialect)
    quote = connection.dialect.identifier_preparer.quote
    place, names = quote(table.name), ", ".join(quote(c) for c in columns)
    if connection.dialect.name == "postgresql":
        _copy(connection, f"COPY {place} ({names}) FROM STDIN", values)
    else:
        marks = ", ".join("?" * len(columns))
        connection.exec_driver_sql(f"INSERT INTO {place} ({names}) VALUES ({marks})", values)


def _convert(values: list[tuple[Any, ...]], table: Table, columns: tuple[str, ...], dialect: Dialect) -> None:
    """Turns the values of those columns that need it, such as JSON, into what the driver takes."""
    processors = [table.c[name].type.dialect_impl(dialect).bind_processor(dialect) for name in columns]
    active = [(i, process) for i, process in enumerate(processors) if process is not None]
    if not active:
        return
    for number, row in enumerate(values):
        changed = list(row)
        for i, process in active:
            changed[i] = process(row[i])
        values[number] = tuple(changed)


def _copy(connection: Connection, statement: str, values: Sequence[tuple[Any, ...]]) -> None:
    """PostgreSQL's COPY, which SQLAlchemy has no word for; its errors are raised as SQLAlchemy's own."""
    driver: Any = connection.connection.driver_connection
    dbapi: Any = connection.dialect.loaded_dbapi
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            for row in values:
                copy.write_row(row)
    except dbapi.Error as error:
        raise DBAPIError.instance(statement, None, error, dbapi.Error, dialect=connection.dialect) from error


def insert_run(connection: Connection, spec: RunSpec, environment: Environment) -> int:
    """The id of a new run. Raises StoreError for a name that is taken or not legal."""
    if not -(2**63) <= spec.seed < 2**63:
        raise StoreError(f"the seed {spec.seed} is too large to be stored; choose one below 2**63")
    if not spec.workloads:
        raise StoreError("a run without workloads has nothing to search; name at least one")
    write_alone(connection)  # two runs must not find the same name free
    if spec.name is not None:
        _check_name(connection, spec.name)
    now = datetime.now(UTC)
    row = {
        **vars(spec),
        "name": spec.name or _free_name(connection, spec.kernel),
        "uid": secrets.token_hex(8),
        "options": dict(spec.options),
        "budget": dict(spec.budget),
        "status": RunStatus.RUNNING.value,
        "stop_reason": "",
        "created": now,
        "updated": now,
        "finished": None,
        "elapsed_s": 0.0,
        "environment_id": _environment_id(connection, environment),
    }
    del row["workloads"]
    run_id = connection.scalar(insert(m.Run).returning(m.Run.id), row)
    assert isinstance(run_id, int)
    tasks = [
        {
            "run_id": run_id, "number": i, "workload": w.key, "dims": dict(w.dims), "dtype": w.dtype,
            "options": dict(w.options),
        }
        for i, w in enumerate(spec.workloads)
    ]  # fmt: skip
    connection.execute(insert(m.Task), tasks)
    return run_id


def _check_name(connection: Connection, name: str) -> None:
    if not _NAME.fullmatch(name) or name == LATEST:
        raise StoreError(
            f"{name!r} is not a name for a run; use 1 to 64 letters, digits, '.', '_' or '-', beginning with"
            f" a letter or digit, and not {LATEST!r}"
        )
    if connection.scalar(select(m.Run.id).where(m.Run.name == name)) is not None:
        raise StoreError(
            f"there is a run {name!r} already; choose another name, or continue it with:"
            f" {command_line(connection.engine.url, 'resume', name)}"
        )


def _free_name(connection: Connection, kernel: str) -> str:
    """<kernel>-<date>-<n>, the first n that is free."""
    kind = re.sub(r"[^A-Za-z0-9]+", "-", PurePath(kernel).name).strip("-")[:40] or "run"
    stem = f"{kind}-{datetime.now(UTC):%Y%m%d}-"
    taken = connection.scalars(select(m.Run.name).where(m.Run.name.startswith(stem, autoescape=True)))
    numbers = [int(name[len(stem) :]) for name in taken if name[len(stem) :].isdecimal()]
    return f"{stem}{max(numbers, default=0) + 1}"


def _environment_id(connection: Connection, environment: Environment) -> int:
    record = {**asdict(environment), "details": dict(environment.details)}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    known = connection.scalar(select(m.Environment.id).where(m.Environment.digest == digest))
    if known is None:
        known = connection.scalar(insert(m.Environment).returning(m.Environment.id), {**record, "digest": digest})
    assert known is not None
    return known
