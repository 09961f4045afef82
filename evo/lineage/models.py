"""The tables. Portable types only: the same models and migrations serve SQLite and PostgreSQL.

A candidate's key is `run_id * 2**32 + order` (held by a constraint): a parent's key follows from its order
without a look-up, a run's candidates lie together, and no second index is needed for (run, order). In SQL
written by hand, `order`, `check` and `case` are words of the language: put them in double quotes.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ColumnElement,
    Connection,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    and_,
    case,
    event,
    func,
    select,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, aliased, mapped_column

from evo.evaluation import PASSED
from evo.lineage.columns import ORDERS_PER_RUN, PUBLIC_ID_DIGITS, Digest, JsonObject, Key, UtcDateTime

__all__ = [
    "Artefact",
    "Base",
    "Build",
    "Candidate",
    "Check",
    "Environment",
    "Final",
    "Parentage",
    "Run",
    "Task",
    "Timing",
    "last_refusals",
    "leader_key",
    "unrefused",
    "winner_key",
]


_WHERE = "where"
_STORED_SOURCE, _STORED_BINARY = "source_sha IS NOT NULL", "binary_sha IS NOT NULL"


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: UtcDateTime(),
        float: Double(),
        str: Text(),
        JsonObject: JSON(),
    }


@event.listens_for(Base.metadata, "before_create")
def _keep_partial(metadata: MetaData, connection: Connection, **_: object) -> None:
    """To name an option of PostgreSQL in an index is to import all there is for PostgreSQL, which the readers of a file do
    without."""
    if connection.dialect.name == "postgresql":
        for index in (i for table in metadata.tables.values() for i in table.indexes if _WHERE in i.info):
            index.dialect_options["postgresql"]["where"] = text(index.info[_WHERE])


class Environment(Base):
    """What runs were measured on and with; equal environments are one row."""

    __tablename__ = "environment"
    __table_args__ = (UniqueConstraint("digest"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    digest: Mapped[str] = mapped_column(Digest)
    device: Mapped[str]
    arch: Mapped[str]
    driver: Mapped[str]
    cuda: Mapped[str]
    nvrtc: Mapped[str]
    compiler: Mapped[str]
    torch: Mapped[str]
    python: Mapped[str]
    evo: Mapped[str]
    details: Mapped[JsonObject]


class Run(Base):
    """One search: how it was set up, how far it came, why it stopped."""

    __tablename__ = "run"
    __table_args__ = (
        UniqueConstraint("name"),
        UniqueConstraint("uid"),
        CheckConstraint("status IN ('running', 'interrupted', 'finished', 'failed')", name="status"),
        Index(None, "kernel"),
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    uid: Mapped[str]
    name: Mapped[str]
    kernel: Mapped[str]
    kernel_digest: Mapped[str] = mapped_column(Digest)
    target: Mapped[str]
    arch: Mapped[str]
    sampler: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    window: Mapped[int]
    options: Mapped[JsonObject]
    budget: Mapped[JsonObject]
    status: Mapped[str]
    stop_reason: Mapped[str]
    created: Mapped[datetime]
    updated: Mapped[datetime]
    finished: Mapped[datetime | None]
    elapsed_s: Mapped[float]
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))


class Task(Base):
    """One workload of a run, searched for itself. `number` is its place in the run, from 0."""

    __tablename__ = "task"
    # A candidate belongs to a task, and a task names its winner: one of the keys is added afterwards.
    __table_args__ = (
        ForeignKeyConstraint(["winner_id"], ["candidate.id"], use_alter=True, name="fk_task_winner_id_candidate"),
        Index(None, "workload"),
    )

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    workload: Mapped[str]
    dims: Mapped[JsonObject]
    dtype: Mapped[str]
    options: Mapped[JsonObject]
    winner_id: Mapped[int | None] = mapped_column(Key)


class Artefact(Base):
    """Text or code by the sha256 of its bytes, stored once, compressed with zlib. `size` is that before."""

    __tablename__ = "artefact"
    __table_args__ = (CheckConstraint("kind IN ('source', 'binary', 'ptx')", name="kind"),)

    sha256: Mapped[str] = mapped_column(Digest, primary_key=True)
    kind: Mapped[str]
    size: Mapped[int] = mapped_column(BigInteger)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class Candidate(Base):
    """One genome tried on one task. `genome` is canonical JSON, whose sha256 is `genome_digest`.

    `score` is what the search minimises: time over the reference baseline's, NULL where there is no time.
    `seconds`, `gate_seconds` and `timing_seconds` were spent in the device process.
    """

    __tablename__ = "candidate"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "task"], ["task.run_id", "task.number"]),
        UniqueConstraint("public_id"),
        CheckConstraint(f'id = run_id * {ORDERS_PER_RUN} + "order"', name="key"),
        Index(None, "run_id", "status"),
        Index(None, "run_id", "task", "score"),
        # Who refers to an artefact, asked when one is to go.
        Index(None, "source_sha", sqlite_where=text(_STORED_SOURCE), info={_WHERE: _STORED_SOURCE}),
    )

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    run_id: Mapped[int] = mapped_column(BigInteger)
    order: Mapped[int] = mapped_column(BigInteger)
    task: Mapped[int]
    public_id: Mapped[str] = mapped_column(String(PUBLIC_ID_DIGITS))
    genome: Mapped[str]
    genome_digest: Mapped[str] = mapped_column(Digest)
    source_sha: Mapped[str | None] = mapped_column(Digest, ForeignKey("artefact.sha256"))
    operator: Mapped[str]
    status: Mapped[str]
    score: Mapped[float | None]
    log: Mapped[str]
    same_code_as_id: Mapped[int | None] = mapped_column(Key, ForeignKey("candidate.id"))
    seconds: Mapped[float]
    gate_seconds: Mapped[float]
    timing_seconds: Mapped[float]
    elapsed_s: Mapped[float]
    created: Mapped[datetime]


class Parentage(Base):
    """Who a candidate was made from; `position` orders its parents, the first being the main line."""

    __tablename__ = "parentage"
    __table_args__ = (Index(None, "parent_id"), {"sqlite_with_rowid": False})

    child_id: Mapped[int] = mapped_column(Key, ForeignKey("candidate.id"), primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    parent_id: Mapped[int] = mapped_column(Key, ForeignKey("candidate.id"))
    role: Mapped[str]


class Build(Base):
    """The compilation of a candidate. `binary_log` is NULL where the binary's remarks are those in `log`."""

    __tablename__ = "build"
    __table_args__ = (Index(None, "binary_sha", sqlite_where=text(_STORED_BINARY), info={_WHERE: _STORED_BINARY}),)

    candidate_id: Mapped[int] = mapped_column(Key, ForeignKey("candidate.id"), primary_key=True, autoincrement=False)
    arch: Mapped[str]
    compiler: Mapped[str]
    status: Mapped[str]
    seconds: Mapped[float]
    cached: Mapped[bool]
    log: Mapped[str]
    binary_log: Mapped[str | None]
    source_digest: Mapped[str] = mapped_column(Digest)
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    smem_static_bytes: Mapped[int | None]
    smem_dynamic_bytes: Mapped[int | None]
    stack_bytes: Mapped[int | None]
    occupancy: Mapped[float | None]
    code_hash: Mapped[str | None] = mapped_column(Digest)
    binary_sha: Mapped[str | None] = mapped_column(Digest, ForeignKey("artefact.sha256"))


class Final(Base):
    """A finalist's re-timing and its verdict. `round` counts from 1; the last one counts."""

    __tablename__ = "final"

    candidate_id: Mapped[int] = mapped_column(Key, ForeignKey("candidate.id"), primary_key=True, autoincrement=False)
    round: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str]
    log: Mapped[str]
    seconds: Mapped[float]
    gate_seconds: Mapped[float]
    timing_seconds: Mapped[float]
    created: Mapped[datetime]


class Check(Base):
    """One gate case of a candidate. `round` is 0 for the search, else that of the final."""

    __tablename__ = "check"
    __table_args__ = (
        CheckConstraint("stage IN ('search', 'final')", name="stage"),
        {"sqlite_with_rowid": False},
    )

    candidate_id: Mapped[int] = mapped_column(Key, ForeignKey("candidate.id"), primary_key=True, autoincrement=False)
    round: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    stage: Mapped[str]
    case: Mapped[str]
    passed: Mapped[bool]
    error: Mapped[float | None]
    allowed: Mapped[float | None]
    torch_error: Mapped[float | None]
    reason: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)


class Timing(Base):
    """A contender's time for one workload. Baselines timed for themselves have no candidate."""

    __tablename__ = "timing"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "task"], ["task.run_id", "task.number"]),
        CheckConstraint("stage IN ('search', 'final')", name="stage"),
        Index(None, "run_id", "candidate_id"),
    )

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    run_id: Mapped[int]
    task: Mapped[int]
    candidate_id: Mapped[int | None] = mapped_column(Key, ForeignKey("candidate.id"))
    round: Mapped[int]
    stage: Mapped[str]
    contender: Mapped[str]
    workload: Mapped[str]
    protocol: Mapped[str]
    median_us: Mapped[float]
    low_us: Mapped[float]
    high_us: Mapped[float]
    ratio: Mapped[float | None]
    ratio_low: Mapped[float | None]
    ratio_high: Mapped[float | None]
    calls_per_sample: Mapped[int]
    sets: Mapped[int]
    samples_us: Mapped[list[float]] = mapped_column(JSON)
    clocks: Mapped[JsonObject]


def last_refusals() -> ColumnElement[bool]:
    """Of `Final`: it is the last one of its candidate, and refused it."""
    final, last = Final, aliased(Final)
    newest = select(func.max(last.round)).where(last.candidate_id == final.candidate_id).scalar_subquery()
    return and_(final.status.not_in(PASSED), final.round == newest)


def unrefused() -> ColumnElement[bool]:
    """Of `Candidate`: no final has refused it. Asked of one candidate after the other: few finals are looked at where few
    candidates are, and all of them never."""
    refused = select(Final.candidate_id).where(Final.candidate_id == Candidate.id, last_refusals())
    return ~refused.correlate(Candidate).exists()


def winner_key() -> ColumnElement[int | None]:
    """Key of a task's winner. Whom the last of its finals refused is none: an older evo left it standing where finals
    that were held anew confirmed nobody."""
    refused = select(Final.candidate_id).where(Final.candidate_id == Task.winner_id, last_refusals()).correlate(Task)
    return case((~refused.exists(), Task.winner_id))


def leader_key() -> ColumnElement[int | None]:
    """Key of a task's winner, or else of its candidate with the lowest score that no final has refused."""
    lowest = (
        select(Candidate.id)
        .where(Candidate.run_id == Task.run_id, Candidate.task == Task.number, Candidate.score.is_not(None), unrefused())
        .order_by(Candidate.score, Candidate.id)
        .limit(1)
        .correlate(Task)
        .scalar_subquery()
    )
    return func.coalesce(winner_key(), lowest)
