"""One database into another: runs by their uid, artefacts by their digest, keys as they fall out there. The other one may
be anybody's: a run is taken only if all of it is as evo records one."""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sqlalchemy import JSON, Column, Connection, Table, and_, delete, exc, insert, select, update
from sqlalchemy.orm import aliased

from evo.errors import EngineError, EvoError, StoreError
from evo.evaluation import PASSED, Status
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.database import Location, connect, first_line, translated
from evo.lineage.liveness import write_alone
from evo.lineage.models import ORDERS_PER_RUN, key_range
from evo.lineage.read import read_artefacts, read_details, read_evaluations, read_run, rows_of
from evo.lineage.store import Store
from evo.lineage.write import Row, insert_rows, is_run_name, known_artefacts
from evo.problem.genome import Genome
from evo.problem.kernel import DTYPE_BYTES
from evo.problem.space import Value

_ROWS_AT_ONCE = 1000
_TABLES = m.Base.metadata.tables
_RUN, _TASK, _ENVIRONMENT, _CANDIDATE, _ARTEFACT, _TIMING = (
    _TABLES[name] for name in ("run", "task", "environment", "candidate", "artefact", "timing")
)
_PARTS = tuple(_TABLES[name] for name in ("parentage", "build", "detail", "final"))
"""Tables of what belongs to candidates; timings also belong to a run."""
_KEYS = {
    "candidate": ("id", "same_code_as_id"),
    "parentage": ("child_id", "parent_id"),
    "detail": ("candidate_id", "base_id"),
    **dict.fromkeys(("build", "final", "timing"), ("candidate_id",)),
    "task": ("winner_id",),
}
"""The columns that hold keys of candidates, by table."""


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
    different ways in the two, that is being searched, or that is not as evo records one, with the row and the reason.
    """
    with source.reading() as theirs, target.transaction() as ours:
        write_alone(ours)
        target.bases.forget()
        merging = _Merging(target, ours, theirs)
        try:
            for run in list(_rows(theirs, _RUN, select(_RUN).order_by(_RUN.c.id))):
                merging.run = f"run {run['name']!r} of {source}"
                merging.add(run)
        except (_Fault, exc.IntegrityError, exc.DataError) as error:
            contradict = f"its rows contradict each other ({first_line(getattr(error, 'orig', error))})"
            told = error if isinstance(error, _Fault) else contradict
            raise StoreError(f"{merging.run} cannot be merged: {told}; nothing was changed") from None
        return merging.report


class _Fault(Exception):
    """A row of a run that is not as evo records it, and why."""


class _Merging:
    def __init__(self, target: Store, ours: Connection, theirs: Connection) -> None:
        self._target, self._ours, self._theirs = target, ours, theirs
        self.report = Merged()
        self.run = "the other database"
        """The run that is being merged, in words."""

    def add(self, run: Row) -> None:
        """run: its row in the source."""
        _check(_RUN, run, "the run")
        key = run.pop("id")
        if run["status"] == RunStatus.RUNNING:
            run |= {"status": RunStatus.INTERRUPTED.value, "stop_reason": "it was being searched when it was copied"}
        environments = select(_ENVIRONMENT).where(_ENVIRONMENT.c.id == run["environment_id"])
        found = list(_rows(self._theirs, _ENVIRONMENT, environments))
        if not found:
            raise _Fault(f"the run is of environment {run['environment_id']}, which is not there")
        environment = found[0]
        _check(_ENVIRONMENT, environment, "its environment")
        del environment["id"]
        run["environment_id"] = self._key(_ENVIRONMENT, "digest", environment) or self._new(_ENVIRONMENT, environment)
        known = self._key(_RUN, "uid", run)
        if known is None:
            run["name"] = self._free_name(run)
            self._copy(key, new := self._new(_RUN, run), None)
            _prove(self._ours, new)
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
        _prove(self._ours, known)
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
        _refuse_dangling(self._theirs, theirs)
        tasks = [row | {"run_id": new} for rows in _chunks(self._theirs, _TASK, key) for row in rows]
        if orders is None:
            self._insert(_TASK, tasks, shift)
        else:
            self._erase(new, tasks, shift)
        for rows in _chunks(self._theirs, _CANDIDATE, key):
            lacking = [row | {"run_id": new} for row in rows if row["order"] not in (orders or ())]
            self._insert(_CANDIDATE, lacking, shift)
            self.report.candidates += len(lacking)
        for table in _PARTS:
            for rows in _chunks(self._theirs, table, key):
                self._insert(table, rows, shift)
        for rows in _chunks(self._theirs, _TIMING, key):
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
            _prove_artefacts(self._theirs, artefacts)
            insert_rows(self._ours, "artefact", artefacts)
            self.report.artefacts += len(artefacts)
            wanted = {artefact["base_sha"] for artefact in artefacts} - {None}
        for row in rows:
            row |= {name: row[name] + shift for name in _KEYS[table.name] if row[name] is not None}
        insert_rows(self._ours, table.name, rows)


def _chunks(connection: Connection, table: Table, run_id: int) -> Iterator[list[Row]]:
    """The rows of a run, each as evo records one. Raises _Fault."""
    column = table.c["run_id" if table in (_TASK, _TIMING) else _KEYS[table.name][0]]
    within = column == run_id if table in (_TASK, _TIMING) else column.between(*key_range(run_id))
    c = _CANDIDATE.c
    # A duplicate refers to a candidate that may be a later one. The order of timings tells one final from the next.
    order = {_CANDIDATE: (c.same_code_as_id.is_not(None), c.id), _TIMING: (_TIMING.c.id,)}.get(table, ())
    rows = _rows(connection, table, select(table).where(within).order_by(*order))
    while some := [_checked(table, row) for row in islice(rows, _ROWS_AT_ONCE)]:
        yield some


def _rows(connection: Connection, table: Table, query: Any) -> Iterator[Row]:
    """Raises _Fault for a row whose values cannot be read: no JSON, no time, no UTF-8."""
    options: Any = {"yield_per": _ROWS_AT_ONCE}
    try:
        with connection.execute(query, execution_options=options) as found:
            for row in found.mappings():
                yield dict(row)
    except (ValueError, TypeError, exc.DBAPIError) as error:
        keys = [column.label(f"key_{column.name}") for column in table.primary_key]
        for key in connection.execute(query.with_only_columns(*keys)).all():
            where = (column == value for column, value in zip(table.primary_key, key, strict=True))
            try:
                connection.execute(select(table).where(*where)).all()
            except (ValueError, TypeError, exc.DBAPIError) as worse:
                name = _name(table, dict(zip(table.primary_key.columns.keys(), key, strict=True)))
                raise _Fault(f"{name} cannot be read ({first_line(getattr(worse, 'orig', worse))})") from None
        raise _Fault(f"its table {table.name!r} cannot be read ({first_line(getattr(error, 'orig', error))})") from None


# -- what a row must be --------------------------------------------------------------------------------------------


def _name(table: Table, row: Row) -> str:
    """The name of a row in a sentence: by its candidate, where it is of one."""
    key = next((row[name] for name in _KEYS.get(table.name, ())[:1] if row.get(name) is not None), None)
    if table is _TASK:
        return f"task {row.get('number')}"
    if isinstance(key, int):
        of = f"candidate {key % ORDERS_PER_RUN}"
        return of if table is _CANDIDATE else f"a {table.name} of {of}"
    return f"row {row.get('id')!r} of table {table.name!r}"


def _checked(table: Table, row: Row) -> Row:
    _check(table, row, _name(table, row))
    return row


def _check(table: Table, row: Row, name: str) -> None:
    """Raises _Fault for a row that evo would not write."""
    for column in table.columns:
        if wrong := _wrong(column, row[column.name]):
            raise _Fault(f"{name} has the {column.name} {row[column.name]!r:.80}, {wrong}")
    if wrong := next(_broken_rules(table, row), ""):
        raise _Fault(f"{name} {wrong}")


def _wrong(column: Column[Any], value: Any) -> str:
    if value is None:
        return "" if column.nullable else "which must not be missing"
    several, numbers = isinstance(column.type, m.Numbers), value
    kind: Any = dict if isinstance(column.type, JSON) else tuple if several else column.type.python_type
    if not isinstance(value, (int, float) if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        return f"which is no {'object' if kind is dict else 'number' if kind in (int, float) else kind.__name__}"
    if isinstance(value, str) and "\0" in value:
        return "which holds a NUL"
    if kind is not tuple:
        numbers = numbers.values() if column.name == "clocks" else [value] if kind in (int, float) else ()
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            return "which is no finite number"
        if number < 0 and column.name not in ("seed", "clocks"):
            return "which is negative"
    try:
        json.dumps(value if kind is dict else None, allow_nan=False)
    except ValueError:
        return "which is no JSON"
    return ""


_OPTIONS = {"sampler": dict, "fixed": dict, "starts": list, "origins": list, "finalists": int, "missing_kinds": dict}
"""Kinds of a run's options that continuing it relies on."""

_INTERVALS = (("low_us", "median_us", "high_us"), ("ratio_low", "ratio", "ratio_high"))
_SLACK = 0.01
"""How far a median may be outside of its own interval, which is drawn at random."""
_FAR = 10.0
"""Factor between a ratio and that of two medians which no disturbance of an honest race explains."""


def _broken_rules(table: Table, row: Row) -> Iterator[str]:
    """Holds a row to what `evo.evaluation` and `evo.lineage.write` do, beside the kind of its values."""
    known: frozenset[str] = frozenset(RunStatus if table is _RUN else Status)
    if "status" in row and row["status"] not in known:
        yield f"has the unknown status {row['status']!r:.80}"
    if table is _RUN:
        if not is_run_name(row["name"]):
            yield f"has the name {row['name']!r:.80}, which none may have"
        # Targets and samplers may be of another version of evo, or of its plug-ins: what needs one says if it is not there.
        if other := next((name for name in ("target", "sampler") if not is_run_name(row[name])), None):
            yield f"has the {other} {row[other]!r:.80}, which none may be called"
        if row["max_in_flight"] < 1:
            yield f"has {row['max_in_flight']} candidates in flight at most"
        if any(limit is not None and type(limit) not in (int, float) for limit in row["budget"].values()):
            yield f"has the budget {row['budget']}, whose limits are not all numbers"
        if wrong := [n for n, kind in _OPTIONS.items() if n in row["options"] and type(row["options"][n]) is not kind]:
            yield f"has the option {wrong[0]} {row['options'][wrong[0]]!r:.80}, which is no {_OPTIONS[wrong[0]].__name__}"
    if table is _TASK:
        dims, options = row["dims"].values(), row["options"].values()
        if any(type(v) is not int or v < 0 for v in dims) or not all(isinstance(v, Value) for v in options):
            yield f"has dimensions {row['dims']} and options {row['options']}, which are of no workload"
        if row["dtype"] not in DTYPE_BYTES:
            yield f"has the dtype {row['dtype']!r:.80}, which no kernel has ({', '.join(DTYPE_BYTES)} are known)"
    if table is _CANDIDATE:
        if row["id"] != row["run_id"] * ORDERS_PER_RUN + row["order"]:
            yield f"has the id {row['id']}, which does not follow from its run {row['run_id']} and order {row['order']}"
        try:
            values = Genome.from_json(row["genome"]).items
        except EvoError as error:
            yield f"has a genome that cannot be read: {error}"
        else:
            if not all(isinstance(v, Value) for _, v in values):
                yield f"has a genome whose values are not all numbers and words: {row['genome']:.80}"
        if row["score"] is not None and (row["score"] == 0 or row["status"] not in PASSED):
            yield f"has the score {row['score']} with status {row['status']}"
        # A candidate that was refused as another one of its code was has that one's status.
        same = row["same_code_as_id"]
        if (same is None) if row["status"] == Status.SAME_CODE else (same is not None and row["status"] in PASSED):
            yield f"has status {row['status']}, and {'no' if same is None else 'a'} candidate of the same code"
    if table.name == "parentage" and row["parent_id"] >= row["child_id"]:
        yield f"names a parent that is not earlier: {row['parent_id'] % ORDERS_PER_RUN}"
    if table is _TIMING and (row["median_us"] <= 0 or row["ratio"] == 0):
        yield f"has a time of {row['median_us']} us and a ratio of {row['ratio']}"
    for names in _INTERVALS if table is _TIMING else ():
        low, middle, high = (row[name] for name in names)
        if None not in (low, middle, high) and not low * (1 - _SLACK) <= middle <= high * (1 + _SLACK):
            yield f"has the {names[1]} {middle}, which is not within {low} to {high}"
    keys = [row[name] for name in _KEYS.get(table.name, ()) if row[name] is not None]
    own = row.get("run_id", keys[0] // ORDERS_PER_RUN if keys else 0)
    if far := next((key for key in keys if key // ORDERS_PER_RUN != own), None):
        yield f"refers to candidate {far % ORDERS_PER_RUN} of another run"


def find_fault(connection: Connection) -> str:
    """What in a database is not as evo records it, and where; empty if all is. Reads all of it."""
    where = ""
    try:
        for environment in _rows(connection, _ENVIRONMENT, select(_ENVIRONMENT)):
            _checked(_ENVIRONMENT, environment)
        for run in list(_rows(connection, _RUN, select(_RUN).order_by(_RUN.c.id))):
            where = f"run {run['name']!r:.80}: "
            _check(_RUN, run, "its row of table 'run'")
            if connection.scalar(select(_ENVIRONMENT.c.id).where(_ENVIRONMENT.c.id == run["environment_id"])) is None:
                raise _Fault(f"it is of environment {run['environment_id']}, which is not there")
            for table in (_TASK, _CANDIDATE, *_PARTS, _TIMING):
                for _ in _chunks(connection, table, run["id"]):
                    pass
            _refuse_dangling(connection, key_range(run["id"]))
            _prove(connection, run["id"])
        where = ""
        for table in (_TASK, _CANDIDATE, _TIMING):
            lost = select(table).where(table.c.run_id.not_in(select(_RUN.c.id))).limit(1)
            for row in _rows(connection, table, lost):
                raise _Fault(f"{_name(table, row)} is of run {row['run_id']}, which is not there")
        artefacts = _rows(connection, _ARTEFACT, select(_ARTEFACT))
        while some := list(islice(artefacts, _ROWS_AT_ONCE)):
            _prove_artefacts(connection, some)
    except _Fault as fault:
        return f"{where}{fault}"
    return ""


def explain(error: Exception, *locations: Location) -> StoreError | None:
    """What to say in place of an error that evo alone could be at fault for, if one of these databases holds a row that is
    not as evo records it."""
    if isinstance(error, EvoError | OSError) and not isinstance(error, EngineError):
        return None
    for location in locations:
        engine, fault = connect(location, write=False), ""
        with suppress(EvoError), translated(location), engine.connect() as connection:
            fault = find_fault(connection)
        engine.dispose()
        if fault:
            return StoreError(
                f"{location} holds what evo does not record there: {fault}; correct or delete that row, go back to a"
                " backup, or name another database with --db"
            )
    return None


def _refuse_dangling(connection: Connection, within: tuple[int, int]) -> None:
    """Raises _Fault for a row that refers to a candidate which is not there. within: keys of the run's candidates."""
    other = _CANDIDATE.alias("other")
    for table in (_CANDIDATE, *_PARTS, _TIMING):
        first, *others = (table.c[name] for name in _KEYS[table.name])
        for column in others or (first,):
            there = select(other.c.id).where(other.c.id == column).correlate(table).exists()
            query = select(table).where(first.between(*within), column.is_not(None), ~there).limit(1)
            for row in _rows(connection, table, query):
                raise _Fault(f"{_name(table, row)} refers to candidate {row[column.name]}, which is not there")


def _prove_artefacts(connection: Connection, artefacts: list[Row]) -> None:
    """Raises _Fault unless each is what its digest says, and packed as `evo.lineage.write.Bases` does it: the base of none
    has a base itself."""
    bases = {row["base_sha"] for row in artefacts} - {None}
    whole = select(_ARTEFACT.c.sha256).where(_ARTEFACT.c.base_sha.is_(None))
    lost = bases - {row.sha256 for row in rows_of(connection, whole, bases, _ARTEFACT.c.sha256)}
    for row in artefacts:
        _check(_ARTEFACT, row, name := f"stored file {row['sha256']}")
        if row["base_sha"] in lost:
            raise _Fault(f"{name} is packed against {row['base_sha']}, which is not there as a whole")
    try:
        content = read_artefacts(connection, [row["sha256"] for row in artefacts])
    except EvoError as error:
        raise _Fault(str(error)) from None
    for digest, data in content.items():
        if hashlib.sha256(data).hexdigest() != digest:
            raise _Fault(f"stored file {digest} has another content than its digest says")


def _prove(connection: Connection, run_id: int) -> None:
    """Reads a run that has been copied as a search would that continues it. Raises _Fault for what contradicts itself."""
    run = read_run(connection, run_id)
    tasks, within = len(run.spec.workloads), key_range(run_id)
    c, t, i, f = m.Candidate, m.Timing, m.Task, m.Final
    numbers = list(connection.scalars(select(i.number).where(i.run_id == run_id).order_by(i.number)))
    if numbers != list(range(tasks)) or not tasks:
        raise _Fault(f"its tasks are numbered {numbers}, and not from 0")
    named = select(c.order, c.public_id).where(c.id.between(*within))
    if wrong := next((order for order, name in connection.execute(named) if name != m.public_id(run.uid, order)), None):
        raise _Fault(f"candidate {wrong} has another identifier than follows from its run")
    try:
        read_evaluations(connection, run)
        for told in read_details(connection, m.Detail.candidate_id.between(*within), m.Detail.round > 0):
            told.checks  # noqa: B018 - is read for its errors
    except (EvoError, ValueError, TypeError, KeyError) as error:
        raise _Fault(str(error)) from None
    passed = select(f.candidate_id).where(f.candidate_id == t.candidate_id, f.round == t.round, f.status.in_(PASSED))
    unheld = select(t.candidate_id).where(t.run_id == run_id, t.candidate_id.is_not(None), t.round > 0, ~passed.exists())
    if (key := connection.scalar(unheld.limit(1))) is not None:
        raise _Fault(f"candidate {key % ORDERS_PER_RUN} has the time of a final that it did not pass")
    beside = aliased(t)  # the reference, which has no ratio
    raced = and_(t.run_id == run_id, t.round == 0, beside.run_id == run_id, beside.round == 0, beside.ratio.is_(None))
    raced &= and_(*(getattr(beside, name) == getattr(t, name) for name in ("candidate_id", "workload", "protocol", "stage")))
    factor = t.ratio * beside.median_us / t.median_us
    odd = select(t.candidate_id % ORDERS_PER_RUN, t.ratio, t.median_us, beside.median_us).where(raced)
    if (odds := connection.execute(odd.where(~factor.between(1 / _FAR, _FAR)).limit(1)).first()) is not None:
        raise _Fault("a timing of candidate {} has the ratio {}, and its medians are {} us and {} us".format(*odds))
    timed = select(t.id).where(t.run_id == run_id, t.candidate_id == i.winner_id, t.task == i.number)
    timed = timed.where(t.contender == "candidate", t.ratio.is_not(None))
    held = select(f.round).where(f.candidate_id == c.id).exists()
    won = and_(c.task == i.number, m.unrefused(), c.status.in_(PASSED) | held)
    winners = select(i.number, i.winner_id).join(c, and_(c.id == i.winner_id, won), isouter=True)
    winners = winners.where(i.run_id == run_id, i.winner_id.is_not(None), c.id.is_(None) | ~timed.exists())
    if (winner := connection.execute(winners.limit(1)).first()) is not None:
        order = winner.winner_id % ORDERS_PER_RUN
        raise _Fault(f"candidate {order}, the winner of task {winner.number}, has no time there, or did not pass")


def _course(connection: Connection, run_id: int) -> set[tuple[Any, ...]]:
    """The fields that identify the candidates of a run; the first is the order."""
    c = _CANDIDATE.c
    query = select(c.order, c.genome, c.status, c.score, c.created).where(c.id.between(*key_range(run_id)))
    return {tuple(row) for row in connection.execute(query)}
