"""One candidate: its whole record, its build, its source."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, and_, select
from sqlalchemy.orm import aliased

from evo.analysis.ancestry import ancestry
from evo.analysis.records import (
    BuildRecord,
    CandidateRecord,
    CheckRecord,
    FinalRecord,
    Relative,
    TimingRecord,
)
from evo.analysis.relatives import RELATIVE_COLUMNS, read_relative, resolve_candidate
from evo.errors import EngineError, StoreError, UnknownNameError
from evo.evaluation import Build, Status
from evo.lineage import models as m
from evo.lineage.read import BUILD_COLUMNS, CHECK_COLUMNS, TIMING_COLUMNS, columns_of, iso, read_build
from evo.lineage.store import Store
from evo.problem.genome import Genome

__all__ = ["ancestry", "artefact", "build", "candidate", "source"]

_c, _p = m.Candidate, m.Parentage
_BUILD_RECORD = columns_of(m.Build, BuildRecord, "remarks", "binary")


def candidate(store: Store, prefix: str) -> CandidateRecord:
    """The whole record of a candidate, by its public id or a unique prefix of it.

    Raises UnknownNameError, or StoreError for an ambiguous prefix.
    """
    with store.reading() as connection:
        key = resolve_candidate(connection, prefix)
        original = aliased(_c)
        i, r, e = m.Task, m.Run, m.Environment
        row: Any = connection.execute(
            select(
                *(column for column in _c.__table__.c if column.name != "log"),
                _c.log,
                original.public_id.label("original"),
                i.workload,
                i.dims,
                i.dtype,
                i.options,
                m.Task.winner_id.label("winner"),
                r.name.label("run"),
                r.kernel,
                r.target,
                r.arch,
                e.device,
            )
            .join_from(_c, i, and_(i.run_id == _c.run_id, i.number == _c.task))
            .join(r, r.id == i.run_id)
            .join(e, e.id == r.environment_id)
            .join(original, original.id == _c.same_code_as_id, isouter=True)
            .where(_c.id == key)
        ).one()
        genome = Genome.from_json(row.genome)
        return CandidateRecord(
            id=row.public_id,
            run=row.run,
            kernel=row.kernel,
            target=row.target,
            arch=row.arch,
            device=row.device,
            order=row.order,
            task=row.task,
            workload=row.workload,
            dims=row.dims,
            dtype=row.dtype,
            options=row.options,
            parameters=genome.parameters,
            digest=row.genome_digest,
            source=row.source_sha,
            operator=row.operator,
            status=row.status,
            score=row.score,
            log=row.log,
            same_code_as=row.original,
            winner=row.winner == key,
            seconds=row.seconds,
            gate_seconds=row.gate_seconds,
            timing_seconds=row.timing_seconds,
            elapsed_s=row.elapsed_s,
            created=iso(row.created),
            build=_build_record(connection, key),
            checks=_checks(connection, key),
            timings=_timings(connection, row.run_id, key),
            finals=_finals(connection, key),
            parents=_relatives(connection, key, "parent"),
            children=_relatives(connection, key, "child"),
        )


def _build_record(connection: Connection, key: int) -> BuildRecord | None:
    b = m.Build
    query = select(b.binary_sha, b.binary_log, *_BUILD_RECORD).where(b.candidate_id == key)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        return None
    remarks = row["log"] if row["binary_log"] is None else row["binary_log"]
    return BuildRecord(
        remarks=remarks if row["status"] == Status.OK else "",
        binary=row["binary_sha"],
        **{column.key: row[column.key] for column in _BUILD_RECORD},
    )


def _checks(connection: Connection, key: int) -> tuple[CheckRecord, ...]:
    k = m.Check
    rows = connection.execute(
        select(k.stage, k.round, *CHECK_COLUMNS).where(k.candidate_id == key).order_by(k.round, k.position)
    )
    return tuple(CheckRecord(**row._mapping) for row in rows)


def _timings(connection: Connection, run_id: int, key: int) -> tuple[TimingRecord, ...]:
    t = m.Timing
    rows = connection.execute(
        select(t.task, t.stage, t.round, *TIMING_COLUMNS)
        .where(t.run_id == run_id, t.candidate_id == key)
        .order_by(t.id)
    )
    return tuple(TimingRecord(**row._mapping) for row in rows)


def _finals(connection: Connection, key: int) -> tuple[FinalRecord, ...]:
    f = m.Final
    rows: Any = connection.execute(
        select(f.round, f.status, f.log, f.seconds, f.gate_seconds, f.timing_seconds, f.created)
        .where(f.candidate_id == key)
        .order_by(f.round)
    )
    return tuple(FinalRecord(**{**row._mapping, "created": iso(row.created)}) for row in rows)


def _relatives(connection: Connection, key: int, kind: str) -> tuple[Relative, ...]:
    """The parents in their order, or the children in theirs."""
    if kind == "parent":
        query = select(*RELATIVE_COLUMNS).join_from(_p, _c, _c.id == _p.parent_id).where(_p.child_id == key)
        rows = connection.execute(query.order_by(_p.position))
    else:
        query = select(*RELATIVE_COLUMNS).join_from(_p, _c, _c.id == _p.child_id).where(_p.parent_id == key)
        rows = connection.execute(query.order_by(_c.id, _p.position))
    return tuple(read_relative(row) for row in rows)


def source(store: Store, prefix: str) -> str:
    """The source text of a candidate. Raises UnknownNameError, or StoreError if it has none."""
    with store.reading() as connection:
        return _source(connection, resolve_candidate(connection, prefix), prefix)


def _source(connection: Connection, key: int, name: str) -> str:
    digest = connection.scalar(select(_c.source_sha).where(_c.id == key))
    if digest is None:
        raise StoreError(f"candidate {name} has no source: {_why_no_source(connection, key)}")
    return _artefact(connection, digest).decode("utf-8", "surrogatepass")


def _why_no_source(connection: Connection, key: int) -> str:
    status, built = connection.execute(
        select(_c.status, m.Build.candidate_id)
        .join_from(_c, m.Build, m.Build.candidate_id == _c.id, isouter=True)
        .where(_c.id == key)
    ).one()
    if status == Status.RENDER_ERROR:
        return "it could not be rendered"
    return "it was never built" if built is None else "it was dropped by evo prune"


def build(store: Store, prefix: str) -> Build:
    """The build of a candidate as it was added, with source text and, where that was stored, code.

    Raises UnknownNameError, or StoreError if it was never built.
    """
    with store.reading() as connection:
        key = resolve_candidate(connection, prefix)
        b = m.Build
        row = connection.execute(select(b.binary_sha, *BUILD_COLUMNS).where(b.candidate_id == key)).one_or_none()
        if row is None:
            raise StoreError(f"candidate {prefix} was never built")
        made = read_build(row[1:])
        if made.binary is not None and row[0] is not None:
            made = replace(made, binary=replace(made.binary, code=_artefact(connection, row[0])))
        stored = connection.scalar(select(_c.source_sha).where(_c.id == key))
        return made if stored is None else replace(made, source=_source(connection, key, prefix))


def artefact(store: Store, sha256: str) -> bytes:
    """The bytes of a source or a binary. Raises UnknownNameError."""
    with store.reading() as connection:
        return _artefact(connection, sha256)


def _artefact(connection: Connection, sha256: str) -> bytes:
    data = connection.scalar(select(m.Artefact.data).where(m.Artefact.sha256 == sha256))
    if data is None:
        raise UnknownNameError("artefact", sha256, [])
    try:
        return zlib.decompress(data)
    except zlib.error as error:
        raise EngineError(f"artefact {sha256} cannot be decompressed: {error}") from error
