"""The tables and views, with portable types only: the same models and migrations serve SQLite and PostgreSQL.

A candidate's key is `run_id * 2**32 + order` (a constraint holds it): a parent's key follows from its order without a
look-up, a run's candidates lie together, and (run, order) needs no second index. In SQL written by hand, `order` is a
keyword: put it in double quotes.
"""

import hashlib
from datetime import UTC, datetime
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, aliased, mapped_column

from evo.errors import EngineError
from evo.evaluation import PASSED

ORDERS_PER_RUN = 2**32
PUBLIC_ID_DIGITS = 16
"""Length of public ids, which are so of 64 bits. Two of a million candidates share one with a chance of 3e-8, and are then
refused."""


def candidate_key(run_id: int, order: int) -> int:
    """The primary key of a candidate. Raises EngineError for an order outside 0 to 2**32 - 1."""
    if not 0 <= order < ORDERS_PER_RUN:
        raise EngineError(f"candidate order {order} is outside 0 to {ORDERS_PER_RUN - 1}")
    return run_id * ORDERS_PER_RUN + order


def key_range(run_id: int) -> tuple[int, int]:
    """The first and last primary key that candidates of a run may have."""
    return candidate_key(run_id, 0), candidate_key(run_id, ORDERS_PER_RUN - 1)


def public_id(run_uid: str, order: int) -> str:
    """The hexadecimal name by which people call a candidate; it follows from run and order."""
    return hashlib.sha256(f"{run_uid}:{order}".encode()).hexdigest()[:PUBLIC_ID_DIGITS]


class UtcDateTime(sa.TypeDecorator[datetime]):
    """An aware time, stored as UTC; SQLite, which has no time zones, stores it without one."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Numbers(sa.TypeDecorator[tuple[float, ...]]):
    """Several numbers as a JSON array."""

    impl = sa.JSON
    cache_ok = True

    def process_result_value(self, value: list[float] | None, dialect: sa.Dialect) -> tuple[float, ...] | None:
        return None if value is None else tuple(value)


# SQLite takes a column for its row id, which needs no index of its own, only if its type is INTEGER.
Key = sa.BigInteger().with_variant(sa.Integer, "sqlite")
Digest = sa.String(64)
JsonObject = dict[str, Any]


class Base(DeclarativeBase):
    metadata = sa.MetaData(
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
        float: sa.Double(),
        str: sa.Text(),
        JsonObject: sa.JSON(),
        tuple[float, ...]: Numbers(),
    }


class Environment(Base):
    """The device and versions that runs were measured with; equal environments are one row."""

    __tablename__ = "environment"

    id: Mapped[int] = mapped_column(sa.Integer, primary_key=True)
    digest: Mapped[str] = mapped_column(Digest, unique=True)
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
    """One search: its set-up, its progress, and why it stopped."""

    __tablename__ = "run"
    __table_args__ = (sa.CheckConstraint("status IN ('running', 'interrupted', 'finished', 'failed')", name="status"),)

    id: Mapped[int] = mapped_column(sa.Integer, primary_key=True)
    uid: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str] = mapped_column(unique=True)
    kernel: Mapped[str] = mapped_column(index=True)
    kernel_digest: Mapped[str] = mapped_column(Digest)
    target: Mapped[str]
    arch: Mapped[str]
    sampler: Mapped[str]
    seed: Mapped[int] = mapped_column(sa.BigInteger)
    max_in_flight: Mapped[int]
    options: Mapped[JsonObject]
    budget: Mapped[JsonObject]
    status: Mapped[str]
    stop_reason: Mapped[str]
    created: Mapped[datetime]
    updated: Mapped[datetime]
    finished: Mapped[datetime | None]
    elapsed_s: Mapped[float]
    environment_id: Mapped[int] = mapped_column(sa.ForeignKey("environment.id"))


class Task(Base):
    """One workload of a run, with a search of its own. `number` is its place in the run, from 0.

    `winner_id` is the key of one of its candidates. It is no foreign key, because candidates refer to their task by one.
    """

    __tablename__ = "task"

    run_id: Mapped[int] = mapped_column(sa.ForeignKey("run.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    workload: Mapped[str] = mapped_column(index=True)
    dims: Mapped[JsonObject]
    dtype: Mapped[str]
    options: Mapped[JsonObject]
    winner_id: Mapped[int | None] = mapped_column(Key)


class Artefact(Base):
    """Text or code, stored once by the sha256 of its bytes and compressed with zlib. `size`: bytes before that.

    `base_sha` names the artefact that is its preset dictionary, NULL where there is none. It is no foreign key, which would
    need an index that only pruning would use.
    """

    __tablename__ = "artefact"
    __table_args__ = (sa.CheckConstraint("kind IN ('source', 'binary', 'ptx')", name="kind"),)

    sha256: Mapped[str] = mapped_column(Digest, primary_key=True)
    kind: Mapped[str]
    size: Mapped[int] = mapped_column(sa.BigInteger)
    data: Mapped[bytes] = mapped_column(sa.LargeBinary)
    base_sha: Mapped[str | None] = mapped_column(Digest)


class Candidate(Base):
    """One genome tried on one task. `genome` is canonical JSON.

    `score` is what the search minimises: time over the reference baseline's, NULL where there is no time.
    `seconds`, `gate_seconds` and `timing_seconds` were spent in the device process.
    """

    __tablename__ = "candidate"
    __table_args__ = (
        sa.ForeignKeyConstraint(["run_id", "task"], ["task.run_id", "task.number"]),
        sa.CheckConstraint(f'id = run_id * {ORDERS_PER_RUN} + "order"', name="key"),
        sa.Index(None, "run_id", "status"),
        sa.Index(None, "run_id", "task", "score"),
    )

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    run_id: Mapped[int] = mapped_column(sa.BigInteger)
    order: Mapped[int] = mapped_column(sa.BigInteger)
    task: Mapped[int]
    public_id: Mapped[str] = mapped_column(sa.String(PUBLIC_ID_DIGITS), unique=True)
    genome: Mapped[str]
    # The index finds the candidates that refer to an artefact before it is deleted.
    source_sha: Mapped[str | None] = mapped_column(Digest, sa.ForeignKey("artefact.sha256"), index=True)
    operator: Mapped[str]
    status: Mapped[str]
    score: Mapped[float | None]
    log: Mapped[str]
    same_code_as_id: Mapped[int | None] = mapped_column(Key, sa.ForeignKey("candidate.id"))
    seconds: Mapped[float]
    gate_seconds: Mapped[float]
    timing_seconds: Mapped[float]
    elapsed_s: Mapped[float]
    created: Mapped[datetime]


class Parentage(Base):
    """A parent of a candidate. `position` orders a candidate's parents; the first is the main line."""

    __tablename__ = "parentage"
    __table_args__ = ({"sqlite_with_rowid": False},)

    child_id: Mapped[int] = mapped_column(Key, sa.ForeignKey("candidate.id"), primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    parent_id: Mapped[int] = mapped_column(Key, sa.ForeignKey("candidate.id"), index=True)
    role: Mapped[str]


class Build(Base):
    """The compilation of a candidate. What the compiler said is in its `Detail`."""

    __tablename__ = "build"

    candidate_id: Mapped[int] = mapped_column(Key, sa.ForeignKey("candidate.id"), primary_key=True, autoincrement=False)
    arch: Mapped[str]
    compiler: Mapped[str]
    status: Mapped[str]
    seconds: Mapped[float]
    cached: Mapped[bool]
    source_digest: Mapped[str] = mapped_column(Digest)
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    smem_static_bytes: Mapped[int | None]
    smem_dynamic_bytes: Mapped[int | None]
    stack_bytes: Mapped[int | None]
    occupancy: Mapped[float | None]
    code_hash: Mapped[str | None] = mapped_column(Digest)
    binary_sha: Mapped[str | None] = mapped_column(Digest, sa.ForeignKey("artefact.sha256"), index=True)


class Final(Base):
    """A finalist's re-timing and its verdict. `round` counts from 1; the last one counts."""

    __tablename__ = "final"

    candidate_id: Mapped[int] = mapped_column(Key, sa.ForeignKey("candidate.id"), primary_key=True, autoincrement=False)
    round: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str]
    log: Mapped[str]
    seconds: Mapped[float]
    gate_seconds: Mapped[float]
    timing_seconds: Mapped[float]
    created: Mapped[datetime]


class Detail(Base):
    """A candidate's gate cases and what the compiler said. They are read with it and never searched for: `data` is JSON
    compressed with zlib, a case in it the fields of `evo.evaluation.Check`. `round` is 0 for the search, else that of the
    final.

    The candidates of a task say nearly the same. So the JSON of another one, `base_id`, of the same round is the preset
    dictionary; that one's row has no base.
    """

    __tablename__ = "detail"
    __table_args__ = ({"sqlite_with_rowid": False},)

    candidate_id: Mapped[int] = mapped_column(Key, sa.ForeignKey("candidate.id"), primary_key=True, autoincrement=False)
    round: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    base_id: Mapped[int | None] = mapped_column(Key)
    data: Mapped[bytes] = mapped_column(sa.LargeBinary)


class Timing(Base):
    """A contender's time for one workload. A baseline that was timed beside no candidate has none."""

    __tablename__ = "timing"
    __table_args__ = (
        sa.ForeignKeyConstraint(["run_id", "task"], ["task.run_id", "task.number"]),
        sa.CheckConstraint("stage IN ('search', 'final')", name="stage"),
        sa.Index(None, "run_id", "candidate_id"),
    )

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    run_id: Mapped[int]
    task: Mapped[int]
    candidate_id: Mapped[int | None] = mapped_column(Key, sa.ForeignKey("candidate.id"))
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
    samples_us: Mapped[tuple[float, ...]]
    clocks: Mapped[JsonObject]


def last_refusals(key: Any = Final.candidate_id) -> sa.ColumnElement[bool]:
    """Condition that a `Final` is the last one of its candidate, and refused it. key: the column of the candidate's key."""
    last = aliased(Final)
    newest = sa.select(sa.func.max(last.round)).where(last.candidate_id == key).correlate_except(last).scalar_subquery()
    return sa.and_(Final.status.not_in(PASSED), Final.round == newest)


def unrefused() -> sa.ColumnElement[bool]:
    """Condition that no final has refused a `Candidate`. It looks at the finals of each candidate by itself, and never at
    all finals."""
    refused = sa.select(Final.candidate_id).where(Final.candidate_id == Candidate.id, last_refusals(Candidate.id))
    return ~refused.correlate(Candidate).exists()


def leader_key() -> sa.ColumnElement[int | None]:
    """Key of a task's winner, or else of the candidate with the lowest score that no final has refused."""
    lowest = (
        sa.select(Candidate.id)
        .where(Candidate.run_id == Task.run_id, Candidate.task == Task.number, Candidate.score.is_not(None), unrefused())
        .order_by(Candidate.score, Candidate.id)
        .limit(1)
        .correlate(Task)
        .scalar_subquery()
    )
    return sa.func.coalesce(Task.winner_id, lowest)


# The views are what other programs read of a database (docs/database.md). Their names and columns are stable: columns may
# be added at the end, and none is renamed or removed. They are made anew with every version of the schema, so a change here
# needs a new version, if one without statements. SQLite, PostgreSQL and DuckDB understand the SQL alike.

_LED = sa.select(Task.__table__, leader_key().label("leader_id")).compile(compile_kwargs={"literal_binds": True})

# Whether a timing was disturbed, as `is_disturbed` says: SQL has no way to read JSON that all databases understand.
_NOT_ZERO = "REPLACE(CAST(t.clocks AS TEXT), '\"disturbed\":0', '')"
_DISTURBED = f"CASE WHEN REPLACE({_NOT_ZERO}, '\"disturbed\":', '') = {_NOT_ZERO} THEN 0 ELSE 1 END"

VIEWS = {}
"""The statement that makes each view, by the view's name."""

# CROSS JOIN makes SQLite keep to this order; else it may begin with every timing there is.
VIEWS["v_best"] = f"""
CREATE VIEW v_best AS
SELECT
    kernel, target, device, arch, workload, dtype, run, candidate, "order", operator, is_winner, stage, protocol,
    median_us, low_us, high_us, speedup, speedup_low, speedup_high, score, genome, created, disturbed
FROM (
    SELECT
        measured.*,
        ROW_NUMBER() OVER (
            PARTITION BY kernel, target, device, workload ORDER BY disturbed, ratio, "order", candidate
        ) AS place
    FROM (
        SELECT
            r.kernel, r.target, e.device, r.arch, i.workload, i.dtype, r.name AS run, c.public_id AS candidate,
            c."order", c.operator, CASE WHEN i.winner_id = c.id THEN 1 ELSE 0 END AS is_winner,
            t.stage, t.protocol, t.median_us, t.low_us, t.high_us, COALESCE(t.ratio, c.score) AS ratio,
            1.0 / NULLIF(COALESCE(t.ratio, c.score), 0) AS speedup,
            1.0 / NULLIF(t.ratio_high, 0) AS speedup_low,
            1.0 / NULLIF(t.ratio_low, 0) AS speedup_high,
            c.score, c.genome, c.created, {_DISTURBED} AS disturbed,
            ROW_NUMBER() OVER (
                PARTITION BY c.id
                ORDER BY t.round DESC, CASE t.protocol WHEN 'final' THEN 2 WHEN 'cold' THEN 1 ELSE 0 END DESC, t.id
            ) AS recency
        FROM ({_LED}) i
        CROSS JOIN candidate c
        CROSS JOIN timing t
        CROSS JOIN run r
        CROSS JOIN environment e
        WHERE c.id = i.leader_id AND t.run_id = i.run_id AND t.candidate_id = c.id
            AND t.contender = 'candidate' AND t.workload = i.workload
            AND r.id = i.run_id AND e.id = r.environment_id
    ) measured
    WHERE recency = 1
) ranked
WHERE place = 1
"""

VIEWS["v_lineage"] = """
CREATE VIEW v_lineage AS
SELECT
    r.name AS run, r.kernel, i.workload, c.public_id AS child, c."order" AS child_order, c.operator, p.position, p.role,
    o.public_id AS parent, o."order" AS parent_order, c.status AS child_status, c.score AS child_score,
    o.score AS parent_score, o.score / NULLIF(c.score, 0) AS gain, c.genome AS child_genome, o.genome AS parent_genome
FROM candidate c
JOIN run r ON r.id = c.run_id
JOIN task i ON i.run_id = c.run_id AND i.number = c.task
LEFT JOIN parentage p ON p.child_id = c.id
LEFT JOIN candidate o ON o.id = p.parent_id
"""

VIEWS["v_timings"] = """
CREATE VIEW v_timings AS
SELECT
    r.name AS run, r.kernel, r.target, r.arch, e.device, t.workload, c.public_id AS candidate, c."order",
    t.contender, t.stage, t.round, t.protocol, t.median_us, t.low_us, t.high_us, t.ratio, t.ratio_low, t.ratio_high,
    t.calls_per_sample, t.sets, t.samples_us, t.clocks
FROM timing t
JOIN run r ON r.id = t.run_id
JOIN environment e ON e.id = r.environment_id
LEFT JOIN candidate c ON c.id = t.candidate_id
"""

for _statement in VIEWS.values():
    sa.event.listen(Base.metadata, "after_create", sa.DDL(_statement))  # type: ignore[no-untyped-call]
