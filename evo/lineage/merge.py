"""Merging one database into another. Runs are the same by their uid, artefacts by their digest; keys are made anew. The
other database may be anybody's: a run is taken only if all of it is as evo records one."""

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Table, delete, exc, insert, select, update

from evo.errors import StoreError
from evo.lineage import RunStatus
from evo.lineage.database import first_line
from evo.lineage.faults import (
    ARTEFACT,
    CANDIDATE,
    ENVIRONMENT,
    KEYS,
    PARTS,
    RUN,
    TASK,
    TIMING,
    Fault,
    check,
    chunks,
    prove,
    prove_artefacts,
    read_rows,
    refuse_dangling,
)
from evo.lineage.liveness import write_alone
from evo.lineage.models import ORDERS_PER_RUN, key_range
from evo.lineage.read import read_run, rows_of
from evo.lineage.store import Store
from evo.lineage.write import Row, insert_rows, known_artefacts


@dataclass(kw_only=True)
class Merged:
    """The result of a merge: names of runs in the receiving database, and numbers of what was copied.

    renamed: the new name by the old one, where that was taken. unchanged: runs that were there already, no less complete.
    """

    added: list[str] = field(default_factory=list)
    continued: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    candidates: int = 0
    artefacts: int = 0


def merge(target: Store, source: Store) -> Merged:
    """Adds the runs of `source` to `target`, in one transaction. A second merge changes nothing.

    A run that both have is taken from the one with more of it. Raises StoreError for a run that went on differently in the
    two, that is being searched, or that is not as evo records one, with the row and the reason.
    """
    with source.reading() as theirs, target.transaction() as ours:
        write_alone(ours)
        target.bases.forget()
        merging = _Merging(target, ours, theirs)
        try:
            for run in list(read_rows(theirs, RUN, select(RUN).order_by(RUN.c.id))):
                merging.run = f"run {run['name']!r} of {source}"
                merging.add(run)
        except (Fault, exc.IntegrityError, exc.DataError) as error:
            contradict = f"its rows contradict each other ({first_line(getattr(error, 'orig', error))})"
            told = error if isinstance(error, Fault) else contradict
            raise StoreError(f"{merging.run} cannot be merged: {told}; nothing was changed") from None
        return merging.report


class _Merging:
    def __init__(self, target: Store, ours: Connection, theirs: Connection) -> None:
        self._target, self._ours, self._theirs = target, ours, theirs
        self.report = Merged()
        self.run = "the other database"
        """The run that is being merged, in words."""

    def add(self, run: Row) -> None:
        """Takes a run over, or what the target lacks of it. run: its row in the source."""
        check(RUN, run, "the run")
        key = run.pop("id")
        if run["status"] == RunStatus.RUNNING:
            run |= {"status": RunStatus.INTERRUPTED.value, "stop_reason": "it was being searched when it was copied"}
        environments = select(ENVIRONMENT).where(ENVIRONMENT.c.id == run["environment_id"])
        found = list(read_rows(self._theirs, ENVIRONMENT, environments))
        if not found:
            raise Fault(f"the run is of environment {run['environment_id']}, which is not there")
        environment = found[0]
        check(ENVIRONMENT, environment, "its environment")
        del environment["id"]
        run["environment_id"] = self._key(ENVIRONMENT, "digest", environment) or self._new(ENVIRONMENT, environment)
        known = self._key(RUN, "uid", run)
        if known is None:
            run["name"] = self._free_name(run)
            self._copy(key, new := self._new(RUN, run), None)
            prove(self._ours, new)
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
        updated = self._ours.scalar(select(RUN.c.updated).where(RUN.c.id == known))
        if our > their or (our == their and run["updated"] <= updated):
            self.report.unchanged.append(present.name)
            return
        self._target.claim(present)
        self._ours.execute(update(RUN).where(RUN.c.id == known), run)
        self._copy(key, known, frozenset(order for order, *_ in our))
        prove(self._ours, known)
        self.report.continued.append(present.name)

    def _key(self, table: Table, column: str, row: Row) -> int | None:
        return self._ours.scalar(select(table.c.id).where(table.c[column] == row[column]))

    def _new(self, table: Table, row: Row) -> int:
        return int(self._ours.execute(insert(table).returning(table.c.id), row).scalar_one())

    def _free_name(self, run: Row) -> str:
        """The run's own name, or that with as many digits of its uid as make it unique."""
        name, uid = str(run["name"]), str(run["uid"])
        names = (name, *(f"{name[: 63 - digits]}-{uid[:digits]}" for digits in range(4, len(uid) + 1)))
        free = next((other for other in names if self._key(RUN, "name", {"name": other}) is None), names[-1])
        if free != name:
            self.report.renamed[name] = free
        return free

    def _copy(self, key: int, new: int, orders: frozenset[int] | None) -> None:
        """Copies all that belongs to a run. key, new: its ids in the source and in the target. orders: those of the
        candidates that the target has, None for a new run; what belongs to them is copied anew, but a source that was
        pruned in the target stays so."""
        shift, theirs = (new - key) * ORDERS_PER_RUN, key_range(key)
        refuse_dangling(self._theirs, theirs)
        tasks = [row | {"run_id": new} for rows in chunks(self._theirs, TASK, key) for row in rows]
        if orders is None:
            self._insert(TASK, tasks, shift)
        else:
            self._erase(new, tasks, shift)
        for rows in chunks(self._theirs, CANDIDATE, key):
            lacking = [row | {"run_id": new} for row in rows if row["order"] not in (orders or ())]
            self._insert(CANDIDATE, lacking, shift)
            self.report.candidates += len(lacking)
        for table in PARTS:
            for rows in chunks(self._theirs, table, key):
                self._insert(table, rows, shift)
        for rows in chunks(self._theirs, TIMING, key):
            for row in rows:
                del row["id"]
            self._insert(TIMING, [row | {"run_id": new} for row in rows], shift)

    def _erase(self, run_id: int, tasks: list[Row], shift: int) -> None:
        """Deletes what belongs to a run's candidates, and gives its tasks the winners of the source."""
        for table in PARTS:
            self._ours.execute(delete(table).where(table.c[KEYS[table.name][0]].between(*key_range(run_id))))
        self._ours.execute(delete(TIMING).where(TIMING.c.run_id == run_id))
        for task in tasks:
            winner = None if task["winner_id"] is None else task["winner_id"] + shift
            where = (TASK.c.run_id == run_id, TASK.c.number == task["number"])
            self._ours.execute(update(TASK).where(*where), {"winner_id": winner})

    def _insert(self, table: Table, rows: list[Row], shift: int) -> None:
        """Inserts rows of the source, which it changes, after the artefacts that they refer to. shift: what is added to keys
        of candidates in them, from the source's to the target's."""
        referred = (row.get("source_sha") or row.get("binary_sha") for row in rows)
        wanted = {digest for digest in referred if digest is not None}
        while lacking := wanted - known_artefacts(self._ours, wanted):
            artefacts = [dict(row._mapping) for row in rows_of(self._theirs, select(ARTEFACT), lacking, ARTEFACT.c.sha256)]
            prove_artefacts(self._theirs, artefacts)
            insert_rows(self._ours, "artefact", artefacts)
            self.report.artefacts += len(artefacts)
            wanted = {artefact["base_sha"] for artefact in artefacts} - {None}
        for row in rows:
            row |= {name: row[name] + shift for name in KEYS[table.name] if row[name] is not None}
        insert_rows(self._ours, table.name, rows)


def _course(connection: Connection, run_id: int) -> set[tuple[Any, ...]]:
    """The candidates of a run, each by the fields that identify it; the first field is the order."""
    c = CANDIDATE.c
    query = select(c.order, c.genome, c.status, c.score, c.created).where(c.id.between(*key_range(run_id)))
    return {tuple(row) for row in connection.execute(query)}
