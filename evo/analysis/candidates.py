"""The whole record of one candidate, with its build and its source."""

import hashlib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sqlalchemy import Connection, Select, and_, func, select
from sqlalchemy.orm import aliased

from evo.analysis.times import held_races, noise_floors
from evo.errors import StoreError, UnknownNameError, UsageError, error_line
from evo.evaluation import PASSED, Check, Status, Timing
from evo.lineage import Stage, gate_seeds
from evo.lineage import models as m
from evo.lineage.models import ORDERS_PER_RUN
from evo.lineage.read import read_artefacts, read_details, record_of, rows_of
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.space import Value

_c, _i, _p, _r, _t = m.Candidate, m.Task, m.Parentage, m.Run, m.Timing


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The candidate that a record is about."""

    id: str
    order: int
    run: str
    kernel: str
    kernel_digest: str
    target: str
    arch: str
    device: str
    workload: str
    dtype: str


def select_candidates(*columns: Any) -> Select[Any]:
    """A query of the fields of `Subject` and more columns, over candidates with their tasks, runs and environments."""
    e = m.Environment
    subject: tuple[Any, ...] = (_c.public_id.label("id"), _c.order, _r.name.label("run"), _r.kernel, _r.kernel_digest)
    return (
        select(*subject, _r.target, _r.arch, e.device, _i.workload, _i.dtype, *columns)
        .join_from(_c, _i, and_(_i.run_id == _c.run_id, _i.number == _c.task))
        .join(_r, _r.id == _i.run_id)
        .join(e, e.id == _r.environment_id)
    )


@dataclass(frozen=True, kw_only=True)
class TimingRecord(Timing):
    """A contender's recorded time. stage: "search" or "final"; round: 0 for the search, else the final's number."""

    PRINTED: ClassVar = ("disturbed",)
    task: int
    stage: str
    round: int


@dataclass(frozen=True, kw_only=True)
class FinalRace:
    """The baselines and the winner's second copy, as one of a candidate's finals timed them. round: the final's number.

    beside: whether the candidate ran in that very race. Where a final confirmed a winner, only the winner did: the race of
    all finalists is recorded without baselines.
    """

    round: int
    beside: bool
    timings: tuple[TimingRecord, ...]


@dataclass(frozen=True, kw_only=True)
class CheckRecord(Check):
    """A recorded gate case. stage, round: as in `TimingRecord`."""

    stage: str
    round: int


@dataclass(frozen=True, kw_only=True)
class BuildRecord:
    """A recorded compilation; see `evo.evaluation.Build`. binary: sha256 of the code, if that is stored."""

    status: str
    arch: str
    compiler: str
    seconds: float
    cached: bool
    log: str
    remarks: str
    source_digest: str
    registers: int | None
    spill_bytes: int | None
    smem_static_bytes: int | None
    smem_dynamic_bytes: int | None
    stack_bytes: int | None
    occupancy: float | None
    code_hash: str | None
    binary: str | None
    launch: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FinalRecord:
    """A finalist's re-timing; its checks and timings are those of the same round."""

    round: int
    status: str
    log: str
    seconds: float
    gate_seconds: float
    timing_seconds: float
    created: str


@dataclass(frozen=True, kw_only=True)
class CandidateSummary:
    """A candidate at a glance."""

    COLUMNS: ClassVar = (_c.public_id.label("id"), _c.order, _c.operator, _c.status, _c.score)
    id: str
    order: int
    operator: str
    status: str
    score: float | None


@dataclass(frozen=True, kw_only=True)
class Relative(CandidateSummary):
    """A parent or child of a candidate. role: the part of the parent in making the child."""

    role: str


@dataclass(frozen=True, kw_only=True)
class CandidateRecord(Subject, CandidateSummary):
    """The whole record of one candidate.

    digest: sha256 of the genome. source: sha256 of the stored text. winner: whether it won its task. seeds: the seeds of the
    gate's data, by stage. origin: where a start came from, a candidate's id or the text of --start. noise_floor: that of the
    last final of its run and workload. final_races: what its finals timed beside it. created: ISO 8601 in UTC.
    """

    task: int
    dims: dict[str, int]
    options: dict[str, Value]
    parameters: dict[str, Value]
    digest: str
    source: str | None
    log: str
    same_code_as: str | None
    winner: bool
    seconds: float
    gate_seconds: float
    timing_seconds: float
    elapsed_s: float
    created: str
    seeds: dict[str, int]
    origin: str
    noise_floor: float | None
    build: BuildRecord | None
    checks: tuple[CheckRecord, ...]
    timings: tuple[TimingRecord, ...]
    finals: tuple[FinalRecord, ...]
    final_races: tuple[FinalRace, ...]
    parents: tuple[Relative, ...]
    children: tuple[Relative, ...]

    @property
    def refusal(self) -> str:
        """Why the last of its finals refused it, such as "wrong: for 7 float32: ..."; empty if it did not."""
        last = self.finals[-1] if self.finals else None
        if last is None or last.status in PASSED:
            return ""
        reason = error_line(last.log)
        return f"{last.status.replace('_', ' ')}{f': {reason}' if reason else ''}"


def resolve_candidate(connection: Connection, prefix: str) -> int:
    """The key of the candidate whose public id begins so. Raises UsageError for a name that is not a text."""
    if not isinstance(prefix, str):
        raise UsageError(f"{prefix!r} is not the name of a candidate; give names one by one, as texts")
    prefix = prefix.strip().lower()
    found = _beginning(connection, prefix) if prefix and set(prefix) <= set(string.hexdigits) else []
    if not found:
        near = _beginning(connection, prefix[:3]) if len(prefix) > 3 else []
        latest = connection.scalars(select(_c.public_id).order_by(_c.id.desc()).limit(3))
        raise UnknownNameError("candidate", prefix, [name for _, name in near] or list(latest))
    if len(found) > 1:
        several = ", ".join(name for _, name in found[:3])
        raise StoreError(f"several candidates begin with {prefix!r} ({several}, ...); write more digits")
    return found[0][0]


def _beginning(connection: Connection, prefix: str) -> list[tuple[int, str]]:
    # An index serves a range, but not LIKE; "g" comes after every hexadecimal digit.
    rows = connection.execute(
        select(_c.id, _c.public_id)
        .where(_c.public_id >= prefix, _c.public_id < prefix + "g")
        .order_by(_c.public_id)
        .limit(4)
    )
    return [(key, name) for key, name in rows]


def read_candidate(store: Store, candidate: str) -> CandidateRecord:
    """The record of a candidate."""
    original = aliased(_c)
    query = select_candidates(
        _c.task, _c.genome, _c.source_sha.label("source"), _c.operator, _c.status, _c.score, _c.log, _c.seconds,
        _c.gate_seconds, _c.timing_seconds, _c.elapsed_s, _c.created, _i.dims, _i.options,
        original.public_id.label("same_code_as"), func.coalesce(_i.winner_id == _c.id, False).label("winner"),
        _r.options.label("run_options"), _r.seed,
    ).join(original, original.id == _c.same_code_as_id, isouter=True)  # fmt: skip
    with store.reading() as connection:
        key = resolve_candidate(connection, candidate)
        row = connection.execute(query.where(_c.id == key)).one()
        seeds = gate_seeds(row.run_options, row.seed)
        floors = noise_floors(connection, [key // ORDERS_PER_RUN])
        builds = select(m.Build.__table__, m.Build.binary_sha.label("binary")).where(m.Build.candidate_id == key)
        details = list(read_details(connection, m.Detail.candidate_id == key))
        told = {name: getattr(details[0], name) for name in ("log", "remarks", "launch")} if details else {}
        finals = select(m.Final.__table__).where(m.Final.candidate_id == key).order_by(m.Final.round)
        checks = (
            CheckRecord(**vars(check), stage=(Stage.FINAL if detail.round else Stage.SEARCH).value, round=detail.round)
            for detail in details
            for check in detail.checks
        )
        timings = select(_t.__table__).where(_t.run_id == key // ORDERS_PER_RUN, _t.candidate_id == key).order_by(_t.id)
        return record_of(
            CandidateRecord,
            row,
            digest=hashlib.sha256(row.genome.encode()).hexdigest(),
            seeds={stage.value: seed for stage, seed in seeds.items()},
            origin=_origin(row.run_options, Genome.from_json(row.genome).parameters) if row.operator == "start" else "",
            noise_floor=floors.get((key // ORDERS_PER_RUN, row.task)),
            build=next((record_of(BuildRecord, row, **told) for row in connection.execute(builds)), None),
            checks=tuple(checks),
            timings=tuple(record_of(TimingRecord, row) for row in connection.execute(timings)),
            finals=tuple(record_of(FinalRecord, row) for row in connection.execute(finals)),
            final_races=_final_races(connection, key, row.task),
            parents=read_relatives(connection, [key]).get(key, ()),
            children=read_relatives(connection, [key], children=True).get(key, ()),
        )


def _origin(options: Mapping[str, Any], genome: Mapping[str, Value]) -> str:
    """The recorded origin of a run's start with that genome; empty where none is recorded."""
    found = []
    for point, origin in zip(options.get("starts", ()), options.get("origins", ()), strict=False):
        known = {name: value for name, value in point.items() if name in genome}
        if all(genome[name] == value for name, value in known.items()):
            found.append((len(known), str(origin)))
    return max(found, key=lambda pair: pair[0], default=(0, ""))[1]


def _final_races(connection: Connection, key: int, task: int) -> tuple[FinalRace, ...]:
    """The timings beside a candidate in each of its finals, by round; the last race of a round counts."""
    held = held_races(connection, key // ORDERS_PER_RUN, task)
    races = {row.round: race for race in held for row in race.finalists if row.candidate_id == key}
    found = []
    for round_, race in sorted(races.items()):
        timings = tuple(record_of(TimingRecord, row, round=round_) for row in race.beside)
        if timings:
            found.append(FinalRace(round=round_, beside=not race.confirmed or key in race.confirmed, timings=timings))
    return tuple(found)


def read_relatives(
    connection: Connection, keys: Sequence[int], *, children: bool = False
) -> dict[int, tuple[Relative, ...]]:
    """The parents of each candidate in their order, by its key; or its children. Candidates without any are left out."""
    own, other = (_p.parent_id, _p.child_id) if children else (_p.child_id, _p.parent_id)
    query = select(own.label("own"), *CandidateSummary.COLUMNS, _p.role).join_from(_p, _c, _c.id == other)
    found: dict[int, tuple[Relative, ...]] = {}
    for row in rows_of(connection, query.order_by(own, _p.child_id, _p.position), keys, own):
        found[row.own] = (*found.get(row.own, ()), record_of(Relative, row))
    return found


def read_source(store: Store, candidate: str) -> str:
    """The source text of a candidate. Raises StoreError if it has none."""
    record = read_candidate(store, candidate)
    with store.reading() as connection:
        kept = read_artefacts(connection, [record.source or ""])
    if record.source in kept:
        return kept[record.source].decode("utf-8", "surrogatepass")
    why = "it was never built" if record.build is None else "it was dropped by evo prune"
    why = "it could not be rendered" if record.status == Status.RENDER_ERROR else why
    raise StoreError(f"candidate {record.id} has no source: {why}")
