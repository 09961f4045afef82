"""One database into another: runs by their uid, artefacts by their digest, keys as they fall out there."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Select, Table, delete, insert, select, text, update

from evo.errors import StoreError
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.liveness import take_turns, write_alone
from evo.lineage.models import ORDERS_PER_RUN, key_range
from evo.lineage.read import at_once, read_run
from evo.lineage.store import Store
from evo.lineage.write import Row, insert_new, insert_rows

__all__ = ["Merged", "merge"]

_CANDIDATES_AT_ONCE = 2000
_ROWS_AT_ONCE = 200

_RUN, _TASK, _ENVIRONMENT, _CANDIDATE, _ARTEFACT, _TIMING = (
    m.Base.metadata.tables[name] for name in ("run", "task", "environment", "candidate", "artefact", "timing")
)
# What belongs to candidates, with the columns that hold keys of them. Timings are copied by themselves.
_PARTS: tuple[tuple[Table, tuple[str, ...]], ...] = tuple(
    (m.Base.metadata.tables[name], keys)
    for name, keys in (
        ("parentage", ("child_id", "parent_id")),
        ("build", ("candidate_id",)),
        ("check", ("candidate_id",)),
        ("final", ("candidate_id",)),
    )
)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Names of runs, as the receiving database has them.

    renamed: what a run is called there, by the name it had, where that was taken.
    unchanged: those that were there already, no less complete.
    """

    added: tuple[str, ...] = ()
    continued: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    candidates: int = 0
    artefacts: int = 0


def merge(target: Store, source: Store) -> Merged:
    """Adds the runs of `source` to `target`, in one transaction. A second time it changes nothing.

    A run that is in both is taken from whichever has more of it. Raises StoreError for one that went on in
    different ways in the two, or that is being searched.
    """
    with source.reading() as theirs, target.writing() as ours:
        take_turns(ours)
        write_alone(ours)
        merging = _Merging(target, ours, theirs)
        for key in theirs.scalars(select(m.Run.id).order_by(m.Run.id)).all():
            merging.add(key)
        return merging.report


class _Merging:
    def __init__(self, target: Store, ours: Connection, theirs: Connection) -> None:
        self._target, self._ours, self._theirs = target, ours, theirs
        self.report = Merged()

    def add(self, key: int) -> None:
        """The run of this key in the source."""
        row = _one(self._theirs, select(_RUN).where(_RUN.c.id == key))
        if row["status"] == RunStatus.RUNNING:
            row |= {"status": RunStatus.INTERRUPTED.value, "stop_reason": "it was being searched when it was copied"}
        known = self._ours.scalar(select(m.Run.id).where(m.Run.uid == row["uid"]))
        if known is None:
            row["name"] = self._free_name(row["name"], row["uid"])
            self._copy(key, row, None)
            self.report = replace(self.report, added=(*self.report.added, row["name"]))
            return
        name = str(self._ours.scalar(select(m.Run.name).where(m.Run.id == known)))
        if not self._is_further(key, row, known, name):
            self.report = replace(self.report, unchanged=(*self.report.unchanged, name))
            return
        self._target.claim(read_run(self._ours, known))
        _erase_run(self._ours, known)
        self._copy(key, row | {"name": name}, known)
        self.report = replace(self.report, continued=(*self.report.continued, name))

    def _free_name(self, name: str, uid: str) -> str:
        if self._ours.scalar(select(m.Run.id).where(m.Run.name == name)) is None:
            return name
        for digits in range(4, len(uid) + 1):
            other = f"{name[: 63 - digits]}-{uid[:digits]}"
            if self._ours.scalar(select(m.Run.id).where(m.Run.name == other)) is None:
                break
        self.report.renamed[name] = other
        return other

    def _is_further(self, key: int, row: Row, known: int, name: str) -> bool:
        """Whether the source has more of a run than the target. Raises StoreError if each has what the other lacks."""
        with closing(_course(self._theirs, key)) as their, closing(_course(self._ours, known)) as our:
            more, less, differ = _differences(their, our)
        if differ or (more and less):
            raise StoreError(
                f"run {name!r} is in both databases and was searched on in each of them, so it cannot be merged;"
                " nothing was changed"
            )
        updated = self._ours.scalar(select(m.Run.updated).where(m.Run.id == known))
        assert updated is not None
        return bool(more) or (not less and row["updated"] > updated)

    def _copy(self, key: int, row: Row, known: int | None) -> None:
        environment = _one(self._theirs, select(_ENVIRONMENT).where(_ENVIRONMENT.c.id == row["environment_id"]))
        values = {**row, "environment_id": self._environment(environment)}
        if known is None:
            del values["id"]
            new = self._ours.scalar(insert(_RUN).returning(_RUN.c.id), values)
            assert isinstance(new, int)
        else:
            new = known
            values["id"] = new
            self._ours.execute(update(_RUN).where(_RUN.c.id == new), values)
        shift = (new - key) * ORDERS_PER_RUN
        tasks = _rows(self._theirs, select(_TASK).where(_TASK.c.run_id == key).order_by(_TASK.c.number))
        for task in tasks:
            task["run_id"] = new
            if task["winner_id"] is not None:
                task["winner_id"] += shift
        insert_rows(self._ours, _TASK, tasks)
        self._candidates(key, new, shift)
        self._timings(key, new, shift)

    def _environment(self, row: Row) -> int:
        known = self._ours.scalar(select(_ENVIRONMENT.c.id).where(_ENVIRONMENT.c.digest == row["digest"]))
        if known is None:
            known = self._ours.scalar(insert(_ENVIRONMENT).returning(_ENVIRONMENT.c.id), _without(row, "id"))
        assert isinstance(known, int)
        return known

    def _candidates(self, key: int, new: int, shift: int) -> None:
        """All of a run's, some thousand at a time, with what belongs to them."""
        later: list[tuple[int, int]] = []
        first, last = key_range(key)
        found = _stream(self._theirs, select(_CANDIDATE).where(_CANDIDATE.c.id.between(first, last)), _CANDIDATE.c.id)
        while chunk := list(islice(found, _CANDIDATES_AT_ONCE)):
            until = chunk[-1]["id"]
            parts = [(table, keys, self._part(table, keys[0], first, until)) for table, keys in _PARTS]
            builds = next(rows for table, _, rows in parts if table.name == "build")
            self._artefacts({c["source_sha"] for c in chunk} | {b["binary_sha"] for b in builds})
            for candidate in chunk:
                candidate["run_id"] = new
                candidate["id"] += shift
                same = candidate["same_code_as_id"]
                if same is not None:
                    candidate["same_code_as_id"] = same + shift
                    if same + shift > candidate["id"]:  # not there yet
                        later.append((candidate["id"], same + shift))
                        candidate["same_code_as_id"] = None
            insert_rows(self._ours, _CANDIDATE, chunk)
            for table, keys, rows in parts:
                for row in rows:
                    for name in keys:
                        row[name] += shift
                insert_rows(self._ours, table, rows)
            self.report = replace(self.report, candidates=self.report.candidates + len(chunk))
            first = until + 1
        for candidate_id, same in later:
            self._ours.execute(update(_CANDIDATE).where(_CANDIDATE.c.id == candidate_id), {"same_code_as_id": same})

    def _part(self, table: Table, column: str, first: int, last: int) -> list[Row]:
        query = select(table).where(table.c[column].between(first, last))
        return _rows(self._theirs, query.order_by(table.c[column], *table.primary_key.columns))

    def _timings(self, key: int, new: int, shift: int) -> None:
        """All of a run's in the order they were recorded, which tells one of its finals from the next."""
        keys = array("q", self._theirs.scalars(select(_TIMING.c.id).where(_TIMING.c.run_id == key).order_by(_TIMING.c.id)))
        for some in at_once(keys):
            rows = _rows(self._theirs, select(_TIMING).where(_TIMING.c.id.in_(some)).order_by(_TIMING.c.id))
            for row in rows:
                del row["id"]
                row["run_id"] = new
                if row["candidate_id"] is not None:
                    row["candidate_id"] += shift
            insert_rows(self._ours, _TIMING, rows)

    def _artefacts(self, digests: Iterable[str | None]) -> None:
        wanted = sorted(digest for digest in set(digests) if digest is not None)
        for some in at_once(wanted):
            known = set(self._ours.scalars(select(_ARTEFACT.c.sha256).where(_ARTEFACT.c.sha256.in_(some))))
            lacking = [digest for digest in some if digest not in known]
            if not lacking:
                continue
            rows = _rows(self._theirs, select(_ARTEFACT).where(_ARTEFACT.c.sha256.in_(lacking)))
            insert_new(self._ours, _ARTEFACT, rows)
            self.report = replace(self.report, artefacts=self.report.artefacts + len(rows))


def _erase_run(connection: Connection, run_id: int) -> None:
    """Takes away all that belongs to a run but the run itself and the artefacts."""
    first, last = key_range(run_id)
    connection.execute(delete(m.Timing).where(m.Timing.run_id == run_id))
    for column in (m.Parentage.child_id, m.Build.candidate_id, m.Check.candidate_id, m.Final.candidate_id):
        connection.execute(delete(column.class_).where(column.between(first, last)))
    with _indexed(connection, ("timing", "candidate_id"), ("candidate", "same_code_as_id")):
        connection.execute(delete(m.Candidate).where(m.Candidate.id.between(first, last)))
    connection.execute(delete(m.Task).where(m.Task.run_id == run_id))


@contextmanager
def _indexed(connection: Connection, *columns: tuple[str, str]) -> Iterator[None]:
    """Indices of (table, column) for the time of this block, within its transaction.

    For each row that goes the database looks for rows that refer to it, and without them reads whole tables; to
    keep them would cost every candidate ever recorded some 300 bytes.
    """
    for table, column in columns:
        connection.execute(text(f"CREATE INDEX tmp_{table}_{column} ON {table} ({column})"))
    yield
    for table, column in columns:
        connection.execute(text(f"DROP INDEX tmp_{table}_{column}"))


def _one(connection: Connection, query: Select[Any]) -> Row:
    return dict(connection.execute(query).mappings().one())


def _rows(connection: Connection, query: Select[Any]) -> list[Row]:
    return [dict(row) for row in connection.execute(query).mappings()]


def _stream(connection: Connection, query: Select[Any], order: Any) -> Iterator[Row]:
    options: Any = {"yield_per": _ROWS_AT_ONCE}
    with connection.execute(query.order_by(order), execution_options=options) as found:
        for row in found.mappings():
            yield dict(row)


def _course(connection: Connection, run_id: int) -> Generator[tuple[Any, ...], None, None]:
    """What identifies each candidate of a run, by order."""
    c = _CANDIDATE.c
    query = select(c.order, c.genome_digest, c.status, c.score, c.created).where(c.id.between(*key_range(run_id)))
    options: Any = {"yield_per": _ROWS_AT_ONCE}
    with connection.execute(query.order_by(c.id), execution_options=options) as found:
        for row in found:
            yield tuple(row)


def _differences(theirs: Iterator[tuple[Any, ...]], ours: Iterator[tuple[Any, ...]]) -> tuple[int, int, bool]:
    """How many candidates only they have, only we have, and whether some differ. Both sorted by order, which is
    the first of a candidate's values: the numbers recorded have gaps where others were still in flight."""
    more = less = 0
    their, our = next(theirs, None), next(ours, None)
    while their or our:
        if our is None or (their is not None and their[0] < our[0]):
            more, their = more + 1, next(theirs, None)
        elif their is None or our[0] < their[0]:
            less, our = less + 1, next(ours, None)
        elif their != our:
            return more, less, True
        else:
            their, our = next(theirs, None), next(ours, None)
    return more, less, False


def _without(row: Row, name: str) -> Row:
    return {key: value for key, value in row.items() if key != name}
