"""One database into another: runs by their uid, artefacts by their digest, keys as they fall out there."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Table, delete, insert, select, update

from evo.errors import StoreError
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.liveness import write_alone
from evo.lineage.models import ORDERS_PER_RUN, key_range
from evo.lineage.read import read_run, rows_of
from evo.lineage.store import Store
from evo.lineage.write import Row, insert_rows, known_artefacts

_ROWS_AT_ONCE = 1000
_TABLES = m.Base.metadata.tables
_RUN, _TASK, _ENVIRONMENT, _CANDIDATE, _ARTEFACT, _TIMING = (
    _TABLES[name] for name in ("run", "task", "environment", "candidate", "artefact", "timing")
)
_PARTS = tuple(_TABLES[name] for name in ("parentage", "build", "detail", "final"))
"""What belongs to candidates; timings also belong to a run."""
_KEYS = {
    "candidate": ("id", "same_code_as_id"),
    "parentage": ("child_id", "parent_id"),
    "detail": ("candidate_id", "base_id"),
    **dict.fromkeys(("build", "final", "timing"), ("candidate_id",)),
    "task": ("winner_id",),
}
"""By table, the columns that hold keys of candidates."""


@dataclass(kw_only=True)
class Merged:
    """Names of runs, as the receiving database has them.

    renamed: what a run is called there, by the name it had, where that was taken.
    unchanged: those that were there already, no less complete.
    """

    added: list[str] = field(default_factory=list)
    continued: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    candidates: int = 0
    artefacts: int = 0


def merge(target: Store, source: Store) -> Merged:
    """Adds the runs of `source` to `target`, in one transaction. A second time it changes nothing.

    A run that is in both is taken from whichever has more of it. Raises StoreError for one that went on in
    different ways in the two, or that is being searched.
    """
    with source.reading() as theirs, target.transaction() as ours:
        write_alone(ours)
        target.bases.forget()
        merging = _Merging(target, ours, theirs)
        for run in _rows(theirs, select(_RUN).order_by(_RUN.c.id)):
            merging.add(run)
        return merging.report


class _Merging:
    def __init__(self, target: Store, ours: Connection, theirs: Connection) -> None:
        self._target, self._ours, self._theirs = target, ours, theirs
        self.report = Merged()

    def add(self, run: Row) -> None:
        """run: its row in the source."""
        key = run.pop("id")
        if run["status"] == RunStatus.RUNNING:
            run |= {"status": RunStatus.INTERRUPTED.value, "stop_reason": "it was being searched when it was copied"}
        (environment,) = _rows(self._theirs, select(_ENVIRONMENT).where(_ENVIRONMENT.c.id == run["environment_id"]))
        del environment["id"]
        run["environment_id"] = self._key(_ENVIRONMENT, "digest", environment) or self._new(_ENVIRONMENT, environment)
        known = self._key(_RUN, "uid", run)
        if known is None:
            run["name"] = self._free_name(run)
            self._copy(key, self._new(_RUN, run), None)
            self.report.added.append(run["name"])
            return
        present = read_run(self._ours, known)
        run["name"] = present.name
        their, our = _course(self._theirs, key), _course(self._ours, known)
        if their - our and our - their:
            raise StoreError(
                f"run {present.name!r} is in both databases and was searched on in each of them, so it cannot be merged;"
                " nothing was changed"
            )
        updated = self._ours.scalar(select(_RUN.c.updated).where(_RUN.c.id == known))
        if our > their or (our == their and run["updated"] <= updated):
            self.report.unchanged.append(present.name)
            return
        self._target.claim(present)
        self._ours.execute(update(_RUN).where(_RUN.c.id == known), run)
        self._copy(key, known, frozenset(order for order, *_ in our))
        self.report.continued.append(present.name)

    def _key(self, table: Table, column: str, row: Row) -> int | None:
        return self._ours.scalar(select(table.c.id).where(table.c[column] == row[column]))

    def _new(self, table: Table, row: Row) -> int:
        return int(self._ours.execute(insert(table).returning(table.c.id), row).scalar_one())

    def _free_name(self, run: Row) -> str:
        """Its own, or that with as many digits of its uid as it takes."""
        name, uid = str(run["name"]), str(run["uid"])
        names = (name, *(f"{name[: 63 - digits]}-{uid[:digits]}" for digits in range(4, len(uid) + 1)))
        free = next((other for other in names if self._key(_RUN, "name", {"name": other}) is None), names[-1])
        if free != name:
            self.report.renamed[name] = free
        return free

    def _copy(self, key: int, new: int, orders: frozenset[int] | None) -> None:
        """All that belongs to a run, by its keys there and here. orders: of the candidates that are here already, None for a
        new run; what belongs to them is made anew, but a source that was pruned here stays so."""
        shift, theirs = (new - key) * ORDERS_PER_RUN, key_range(key)
        tasks = [row | {"run_id": new} for row in _rows(self._theirs, select(_TASK).where(_TASK.c.run_id == key))]
        if orders is None:
            self._insert(_TASK, tasks, shift)
        else:
            self._erase(new, tasks, shift)
        c = _CANDIDATE.c
        originals_first = (c.same_code_as_id.is_not(None), c.id)  # a duplicate refers to one of them, perhaps a later one
        for rows in self._chunks(select(_CANDIDATE).where(c.id.between(*theirs)).order_by(*originals_first)):
            lacking = [row | {"run_id": new} for row in rows if row["order"] not in (orders or ())]
            self._insert(_CANDIDATE, lacking, shift)
            self.report.candidates += len(lacking)
        for table in _PARTS:
            for rows in self._chunks(select(table).where(table.c[_KEYS[table.name][0]].between(*theirs))):
                self._insert(table, rows, shift)
        # In the order they were recorded, which tells one of its finals from the next.
        for rows in self._chunks(select(_TIMING).where(_TIMING.c.run_id == key).order_by(_TIMING.c.id)):
            for row in rows:
                del row["id"]
            self._insert(_TIMING, [row | {"run_id": new} for row in rows], shift)

    def _erase(self, run_id: int, tasks: list[Row], shift: int) -> None:
        """Takes away what belongs to a run's candidates, and gives its tasks the winners of the source."""
        for table in _PARTS:
            self._ours.execute(delete(table).where(table.c[_KEYS[table.name][0]].between(*key_range(run_id))))
        self._ours.execute(delete(_TIMING).where(_TIMING.c.run_id == run_id))
        for task in tasks:
            winner = None if task["winner_id"] is None else task["winner_id"] + shift
            where = (_TASK.c.run_id == run_id, _TASK.c.number == task["number"])
            self._ours.execute(update(_TASK).where(*where), {"winner_id": winner})

    def _insert(self, table: Table, rows: list[Row], shift: int) -> None:
        """Rows of the source, with the sources and code that they refer to."""
        referred = (row.get("source_sha") or row.get("binary_sha") for row in rows)
        wanted = {digest for digest in referred if digest is not None}
        while lacking := wanted - known_artefacts(self._ours, wanted):
            artefacts = [dict(row._mapping) for row in rows_of(self._theirs, select(_ARTEFACT), lacking, _ARTEFACT.c.sha256)]
            insert_rows(self._ours, "artefact", artefacts)
            self.report.artefacts += len(artefacts)
            wanted = {artefact["base_sha"] for artefact in artefacts} - {None}
        for row in rows:
            row |= {name: row[name] + shift for name in _KEYS[table.name] if row[name] is not None}
        insert_rows(self._ours, table.name, rows)

    def _chunks(self, query: Any) -> Iterator[list[Row]]:
        options: Any = {"yield_per": _ROWS_AT_ONCE}
        with self._theirs.execute(query, execution_options=options) as found:
            for some in found.mappings().partitions():
                yield [dict(row) for row in some]


def _rows(connection: Connection, query: Any) -> list[Row]:
    return [dict(row) for row in connection.execute(query).mappings()]


def _course(connection: Connection, run_id: int) -> set[tuple[Any, ...]]:
    """What identifies the candidates of a run; the first is the order."""
    c = _CANDIDATE.c
    query = select(c.order, c.genome, c.status, c.score, c.created).where(c.id.between(*key_range(run_id)))
    return {tuple(row) for row in connection.execute(query)}
